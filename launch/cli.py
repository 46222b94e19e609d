"""`samerun COMMAND ...`: the one command. Each subcommand is imported only when it is called, so `--help` is at once.

A mistake of the user ends the program with one sentence on stderr and the exit code of its error (`app/errors.py`).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from app.errors import SamerunError
from app.place.inherited import own_environment
from app.place.slurm_variables import is_in_step


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in _COMMANDS:
        _parser().parse_args(arguments or ["--help"])  # ends the program: with the help, or naming what is not a command
    try:
        return _run(arguments[0], arguments[1:])
    except SamerunError as error:
        _say(f"{type(error).__name__}: {error}")
        if is_in_step(own_environment()):
            time.sleep(1.0)  # srun ends the step of a task that failed at once, and what it has not read by then is lost
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + signal.SIGINT


# Of each: its module, its function there, and what it is for.
_GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "start": {
        "new": ("launch.new", "new", "write a folder to start from: a task of your own, its recipe, a job script and a test"),
        "recipes": ("launch.shipped", "recipes", "list the recipes that come with it, or print one"),
        "presets": ("launch.shipped", "presets", "list the presets, or print one"),
        "script": ("launch.shipped", "script", "list the job scripts, or print one"),
        "doctor": ("launch.start.examination", "doctor", "examine this machine, or all nodes of an allocation, before a run"),
        "data": ("app.tools.data_command", "main",
                 "look at data, tokenise texts, pack pictures smaller or in another form, measure how fast they are fed"),
    },
    "train": {
        "launch": ("launch.start.launch", "launch", "train a recipe, on this machine or across an allocation"),
        "submit": ("launch.submit.submit", "submit", "check a job, write its script and hand it to Slurm or PBS"),
        "train": ("app.train", "main", "train in this one process, or in those that accelerate launch has started"),
        "watch": ("app.reports.watch", "main", "follow a run in the terminal, from any machine that sees its folder"),
    },
    "look at runs": {
        "runs": ("app.reports.runs", "main", "list runs: states, scores and how their recipes differ"),
        "report": ("app.reports.report_command", "main", "write all that a run folder tells as one HTML page"),
        "curves": ("app.reports.curves", "main", "draw the loss and the score of runs, in training and in validation"),
        "compare": ("app.reports.compare", "main", "say what differs between two runs, and whether they were the same one"),
        "timeline": ("app.reports.timeline", "main",
                     "put the traces of a run's ranks on one time axis: what overlaps, and which rank is late"),
        "verify": ("app.tools.verify", "main",
                   "show that a run applied every global batch exactly once, and where its time went"),
    },
    "use the model": {
        "evaluate": ("app.evaluate", "main", "score a finished run, or an exported model, again"),
        "predict": ("app.predict", "main", "ask the model of a finished run about new inputs"),
        "generate": ("app.tasks.causal_lm.generate", "main", "go on with a text by a language model, as it comes"),
        "export": ("app.export", "main", "write the weights of a checkpoint as a plain model.safetensors"),
    },
    "before something large": {
        "plan": ("app.tools.plan_command", "main",
                 "say whether a recipe fits on devices, under which preset, and what that costs"),
        "parity": ("app.tools.parity", "main", "show that presets and numbers of processes give the same run"),
        "scale": ("app.scaling.scale_command", "main",
                  "measure how a recipe scales over devices and nodes, and how many are worth their while"),
    },
}  # fmt: skip
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_START_PROCESSES = ("launch", "submit", "doctor", "scale")
"""Those that are told the environment, and by what to speak."""


def _run(command: str, arguments: list[str]) -> int:
    module, function, _ = _COMMANDS[command]
    main_of: Callable[..., int | None] = getattr(importlib.import_module(module), function)
    if command in _START_PROCESSES:
        return main_of(arguments, own_environment(), say=_say) or 0
    return main_of(arguments) or 0


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(
        f"{title}:\n" + "\n".join(f"  {name:8}  {text}" for name, (*_, text) in group.items()) + "\n"
        for title, group in _GROUPS.items()
    )
    parser = argparse.ArgumentParser(
        prog="samerun",
        description="One Accelerate training loop, the same run on any machine.",
        epilog=f"{commands}\n`samerun COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="what to do")
    return parser


class _Version(argparse.Action):
    """Looks for the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print it and end the program."""
        from importlib.metadata import version

        sys.stdout.write(f"samerun {version('samerun')}\n")
        parser.exit()


def _say(text: str) -> None:
    """Speak on stderr: stdout is for what was asked for."""
    sys.stderr.write(f"samerun: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
