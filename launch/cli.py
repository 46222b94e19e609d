"""`samerun COMMAND ...`: the one command. Each subcommand is imported only when it is called, so `--help` is at once.

A mistake of the user ends the program with one sentence on stderr and the exit code of its error (`app/errors.py`).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence

from app.errors import SamerunError
from app.place.inherited import own_environment
from app.place.slurm_variables import is_in_step


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in _COMMANDS:
        _parser().parse_args(arguments or ["--help"])  # ends the program: with the help, or naming what is not a command
    try:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    except SamerunError as error:
        _say(f"{type(error).__name__}: {error}")
        if is_in_step(own_environment()):
            time.sleep(1.0)  # srun ends the step of a task that failed at once, and what it has not read by then is lost
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + signal.SIGINT


def _launch(argv: list[str]) -> int:
    from launch.start import launch

    return launch.launch(argv, own_environment(), say=_say)


def _submit(argv: list[str]) -> int:
    from launch.submit import submit

    return submit.submit(argv, own_environment(), say=_say)


def _doctor(argv: list[str]) -> int:
    from launch.start import examination

    return examination.doctor(argv, own_environment(), say=_say)


def _data(argv: list[str]) -> int:
    from app.tasks.image_classification.data_tools import command

    return command.main(argv)


def _watch(argv: list[str]) -> int:
    from app.reports import watch

    return watch.main(argv)


def _report(argv: list[str]) -> int:
    from app.reports import page

    return page.main(argv)


def _curves(argv: list[str]) -> int:
    from app.reports import curves

    return curves.main(argv)


def _compare(argv: list[str]) -> int:
    from app.reports import compare

    return compare.main(argv)


def _timeline(argv: list[str]) -> int:
    from app.reports import timeline

    return timeline.main(argv)


def _verify(argv: list[str]) -> int:
    from app.tools import verify

    return verify.main(argv)


def _export(argv: list[str]) -> int:
    from app import export

    return export.main(argv)


def _parity(argv: list[str]) -> int:
    from app.tools import parity

    return parity.main(argv)


def _scale(argv: list[str]) -> int:
    from app.scaling import scale_command

    return scale_command.main(argv, own_environment(), say=_say)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "launch": (_launch, "train a recipe, on this machine or across an allocation"),
    "submit": (_submit, "check a job, write its script and hand it to Slurm or PBS"),
    "doctor": (_doctor, "examine this machine, or all nodes of an allocation, before a run"),
    "data": (_data, "look at data, pack it smaller or in another form, measure how fast it is fed"),
    "watch": (_watch, "follow a run in the terminal, from any machine that sees its folder"),
    "report": (_report, "write all that a run folder tells as one HTML page"),
    "curves": (_curves, "draw the loss and the score of runs, while training and on the test set"),
    "compare": (_compare, "say what differs between two runs, and whether they were the same one"),
    "timeline": (_timeline, "put the traces of a run's ranks on one time axis: what overlaps, and which rank is late"),
    "verify": (_verify, "show that a run applied every global batch exactly once, and where its time went"),
    "export": (_export, "write the weights of a checkpoint as a plain model.safetensors"),
    "parity": (_parity, "show that presets and numbers of processes give the same run"),
    "scale": (_scale, "measure how a recipe scales over devices and nodes, and how many are worth their while"),
}


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:8}  {text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="samerun",
        description="One Accelerate training loop, the same run on any machine.",
        epilog=f"commands:\n{commands}\n\n`samerun COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="what to do")
    return parser


def _say(text: str) -> None:
    """Speak on stderr: stdout is for what was asked for."""
    sys.stderr.write(f"samerun: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
