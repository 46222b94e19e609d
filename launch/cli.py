"""`samerun COMMAND ...`: the one command. Each subcommand is imported only when it is called, so `--help` is fast.

A mistake of the user ends the program with one sentence on stderr and the exit code of its error (`app/errors.py`).
"""

from __future__ import annotations

import errno
import importlib
import io
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress

from app.environment import host
from app.environment.launched import errors_folder, without_leftovers
from app.environment.slurm_variables import is_in_step, own_environment
from app.errors import SamerunError, UsageError, did_you_mean, exits_refused, printable
from app.options import HelpShown, Parser
from app.recipe import recipe_file
from app.runs.run_folder import Recorder
from launch import preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    host.guard_stdout(is_needed=True)
    name, words = (arguments or ["--help"])[0], arguments[1:]
    try:
        if name in ("version", "-v", "-V", "--version"):
            from importlib.metadata import version  # not at the top: the help is fast

            sys.stdout.write(f"samerun {version('samerun')}\n")
            return 0
        if name in ("-h", "--help"):
            _parser().parse_all([name])  # ends the program
        if name not in _COMMANDS:
            is_option = name.startswith("-")
            known = ("--help", "--version") if is_option else _COMMANDS
            hint = did_you_mean(name, known, then="`samerun --help` lists the commands")
            wrong = "expected a command first, as in `samerun launch --recipe digits`" if is_option else "unknown command"
            raise UsageError(f"{name}: {wrong}; {hint}")
        with exits_refused(), host.imports_explained():
            return _call(name, words)
    except host.StdoutError as error:
        if error.errno == errno.EPIPE:  # as of a program that SIGPIPE ends: `| head` has read enough
            return 128 + signal.SIGPIPE
        _say(f"stdout cannot be written: {error.strerror}")
        return 1
    except SamerunError as error:
        _say(f"{type(error).__name__}: {error}")
        if arguments[:1] == ["launch"]:  # of a node
            Recorder(errors_folder(own_environment())).record(error)
        if is_in_step(own_environment()):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun's, after another task failed: this one has its own exit code
            time.sleep(1.0)  # srun ends the step immediately, and output that it has not read by then is lost
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + signal.SIGINT


# Module, function and description of each command.
_GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "getting started": {
        "new": ("launch.shipped", "new", "create a project: your own task, its recipe, a job script and a test"),
        "recipes": ("launch.shipped", "recipes", "list the shipped recipes, print one, or print the recipe keys"),
        "presets": ("launch.shipped", "presets", "list the shipped presets, or print one"),
        "scripts": ("launch.shipped", "scripts", "list the shipped job scripts, or print one"),
        "doctor": ("launch.start.launch", "doctor", "check this machine, or all nodes of an allocation"),
        "data": ("app.checks.data", "main", "inspect and check data, tokenize text, convert or shrink images"),
        "completion": ("launch.cli", "completion", "print the completion script for bash or zsh"),
    },
    "training": {
        "launch": ("launch.start.launch", "launch", "train a recipe, on this machine or across an allocation"),
        "submit": ("launch.submit", "submit", "check a job, write its script and submit it to Slurm or PBS"),
        "sweep": ("launch.cases", "sweep", "train every combination of some recipe values, one after the other"),
        "train": ("app.train", "main", "train in this process, or in the processes that `accelerate launch` started"),
        "watch": ("app.reports.watch", "main", "follow a run in the terminal"),
        "stop": ("launch.start.launch", "stop", "make a run save a checkpoint and stop"),
        "resume": ("launch.start.launch", "resume", "continue a run from its newest checkpoint"),
    },
    "runs": {
        "runs": ("app.reports.runs", "main", "list runs with their states, scores and recipe differences"),
        "report": ("app.reports.report", "main", "write a report of a run as one HTML page"),
        "curves": ("app.reports.curves", "main", "plot training and validation curves of runs"),
        "compare": ("app.reports.compare", "main", "show what differs between two runs, and if they are the same run"),
        "replay": ("app.checks.replay", "main", "compute steps of a run again and compare them with the run"),
        "bisect": ("app.checks.bisect", "main", "find the first step where two runs part, and what differs there"),
        "timeline": ("app.reports.timeline", "main", "merge the profiler traces of all ranks into one timeline"),
        "verify": ("app.checks.verify", "main", "check that each global batch was applied exactly once"),
    },
    "models": {
        "evaluate": ("app.evaluate", "main", "evaluate a finished run or an exported model"),
        "predict": ("app.predict", "main", "predict new inputs with the model of a finished run"),
        "generate": ("app.tasks.causal_lm.generate", "main", "generate text with a language model"),
        "export": ("app.export", "main", "write the weights of a checkpoint as plain model.safetensors"),
    },
    "planning": {
        "plan": ("app.planning.plan", "main", "estimate memory and time of a recipe under each preset"),
        "audit": ("app.audit.audit", "main", "find out why an Accelerate script gives other results on more processes"),
        "parity": ("app.checks.parity", "main", "test that presets and numbers of processes give the same run"),
        "scale": ("app.reports.scale", "main", "measure how a recipe scales over presets, devices and nodes"),
    },
}  # fmt: skip
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_START_PROCESSES = ("launch", "resume", "sweep", "submit", "doctor", "audit", "parity", "scale", "verify", "replay", "bisect")
"""Commands that take the environment and a function to print messages with."""


def _parser() -> Parser:
    commands = "\n".join(
        f"{title}:\n" + "\n".join(f"  {name:8}  {text}" for name, (*_, text) in group.items()) + "\n"
        for title, group in _GROUPS.items()
    )
    parser = Parser(
        "",
        usage="%(prog)s COMMAND [options] [arguments]",
        description="Train a PyTorch model: the same run on any machine.",
        epilog=f"{commands}\n`samerun COMMAND --help` describes a command; so does `samerun help COMMAND`.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and end")
    return parser


def completion(argv: Sequence[str]) -> int:
    """Print the script with which a shell completes the words of `samerun`."""
    parser = Parser("completion", "Print the script with which bash or zsh completes commands, options, recipes, presets and "
        "files.", epilog="bash:\n  samerun completion bash > ~/.local/share/bash-completion/completions/samerun\n"
        "zsh, in a folder of $fpath:\n  samerun completion zsh > ~/.zfunc/_samerun")  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    shell = parser.parse_all(argv).shell
    import shtab  # not at the top: only this command needs it

    functions = ""
    for kind, names in {"recipe": recipe_file.names(), "preset": preset.names()}.items():
        words = " ".join(names)
        body = {"bash": f'compgen -W "{words}" -- "$1"; _shtab_compgen_files "$1";', "zsh": f"compadd -- {words}; _files"}
        functions += f"_samerun_{kind}() {{ {body[shell]} }}\n"
    root, parsers = _parser(), []
    for name in _COMMANDS:
        try:
            with redirect_stdout(io.StringIO()):
                _call(name, ["--help"])
        except HelpShown as shown:
            parsers.append(shown.parser)
        for action in parsers[-1]._actions:  # argparse has no public list of them
            kind = (name if action.dest == "name" else action.dest).removesuffix("s")
            if kind in ("recipe", "preset"):
                action.complete = {shell: f"_samerun_{kind}"}  # type: ignore[attr-defined]
            elif str(action.metavar).startswith(("RUN", "PATH", "FILE")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    commands = root.add_subparsers(parser_class=lambda **_: parsers.pop(0))  # type: ignore[call-overload]
    for name, (*_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    sys.stdout.write(shtab.complete(root, shell, preamble=functions))
    return 0


def _call(name: str, words: Sequence[str]) -> int:
    """Run a subcommand with these arguments and return its exit code."""
    module, function, _ = _COMMANDS[name]
    command: Callable[..., int | None] = getattr(importlib.import_module(module), function)
    if name in _START_PROCESSES:
        return command(words, without_leftovers(own_environment(), say=_say), say=_say) or 0
    return command(words) or 0


def _say(text: str) -> None:
    """Print a message on stderr, unless that is gone: stdout is for results."""
    with suppress(OSError):
        sys.stderr.write(f"samerun: {printable(text)}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
