"""`samerun COMMAND ...`: the one command. Each subcommand is imported only when it is called, so `--help` is fast.

A mistake of the user ends the program with one sentence on stderr and the exit code of its error (`app/errors.py`).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Sequence

from app.environment.launched import errors_folder
from app.environment.slurm_variables import is_in_step, own_environment
from app.errors import SamerunError, UsageError, did_you_mean, exits_refused, printable
from app.options import Parser
from app.runs.run_folder import Recorder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0].startswith("-"):
            _parser().parse_all(arguments or ["--help"])  # ends here but for --version: with the help, or an unknown option
            from importlib.metadata import version  # not at the top: the help is fast

            sys.stdout.write(f"samerun {version('samerun')}\n")
            return 0
        if arguments[0] not in _COMMANDS:
            hint = did_you_mean(arguments[0], _COMMANDS, then="`samerun --help` lists the commands")
            raise UsageError(f"{arguments[0]}: unknown command; {hint}")
        module, function, _ = _COMMANDS[arguments[0]]
        with exits_refused():
            command: Callable[..., int | None] = getattr(importlib.import_module(module), function)
            if arguments[0] in _START_PROCESSES:
                return command(arguments[1:], own_environment(), say=_say) or 0
            return command(arguments[1:]) or 0
    except SamerunError as error:
        _say(f"{type(error).__name__}: {error}")
        if arguments[:1] == ["launch"]:  # of a node
            Recorder(errors_folder(own_environment())).record(error)
        if is_in_step(own_environment()):
            time.sleep(1.0)  # srun ends the step immediately, and output that it has not read by then is lost
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + signal.SIGINT


# Module, function and description of each command.
_GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "start": {
        "new": ("launch.shipped", "new", "create a project folder: your own task, its recipe, a job script and a test"),
        "recipes": ("launch.shipped", "recipes", "list the shipped recipes, or print one"),
        "presets": ("launch.shipped", "presets", "list the shipped presets, or print one"),
        "script": ("launch.shipped", "script", "list the shipped job scripts, or print one"),
        "doctor": ("launch.start.launch", "doctor", "check this machine, or all nodes of an allocation, before a run"),
        "data": ("app.checks.data", "main",
                 "inspect and check data, tokenize text, convert or shrink images"),
    },
    "train": {
        "launch": ("launch.start.launch", "launch", "train a recipe, on this machine or across an allocation"),
        "sweep": ("launch.cases", "sweep", "train every combination of some recipe values, one run after the other"),
        "submit": ("launch.submit", "submit", "check a job, write its script and submit it to Slurm or PBS"),
        "train": ("app.train", "main", "train in this process, or in the processes that accelerate launch started"),
        "watch": ("app.reports.watch", "main", "follow a run in the terminal, from any machine that can read its folder"),
    },
    "look at runs": {
        "runs": ("app.reports.runs", "main", "list runs with their states, scores and recipe differences"),
        "report": ("app.reports.report", "main", "write a report of a run as one HTML page"),
        "curves": ("app.reports.curves", "main", "plot training and validation curves of runs: loss and score"),
        "compare": ("app.reports.compare", "main", "show what differs between two runs, and whether they are the same run"),
        "timeline": ("app.reports.timeline", "main", "merge the profiler traces of all ranks into one timeline"),
        "verify": ("app.checks.verify", "main",
                   "check that a run applied every global batch exactly once, and show where its time went"),
    },
    "use the model": {
        "evaluate": ("app.evaluate", "main", "evaluate a finished run or an exported model"),
        "predict": ("app.predict", "main", "predict new inputs with the model of a finished run"),
        "generate": ("app.tasks.causal_lm.generate", "main", "generate text with a language model, printed as it comes"),
        "export": ("app.export", "main", "write the weights of a checkpoint as a plain model.safetensors file"),
    },
    "before something large": {
        "plan": ("app.planning.plan", "main",
                 "estimate whether a recipe fits into memory, under which preset, and at what cost"),
        "parity": ("app.checks.parity", "main", "test that presets and numbers of processes give the same run"),
        "scale": ("app.reports.scale", "main", "measure how a recipe scales over presets, devices and nodes"),
    },
}  # fmt: skip
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_START_PROCESSES = ("launch", "sweep", "submit", "doctor", "parity", "scale")
"""Commands that take the environment and a function to print messages with."""


def _parser() -> Parser:
    commands = "\n".join(
        f"{title}:\n" + "\n".join(f"  {name:8}  {text}" for name, (*_, text) in group.items()) + "\n"
        for title, group in _GROUPS.items()
    )
    parser = Parser(
        prog="samerun",
        description="One Accelerate training loop: the same run on any machine.",
        epilog=f"{commands}\n`samerun COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="what to do")
    return parser


def _say(text: str) -> None:
    """Print a message on stderr: stdout is for results."""
    sys.stderr.write(f"samerun: {printable(text)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
