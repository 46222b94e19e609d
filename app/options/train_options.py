"""The options of `python -m app.train`. The launcher reads this table too, to check them before anything starts.

Standard library and PyYAML only.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from typing import NoReturn

from app.errors import TrackerError
from app.options.command_line import Parser, not_negative
from app.recipe import recipe_file

_HANG_TIMEOUT_S = 540
"""Longer than a first step with its compilation takes. The process group waits twice as long, and 1800 s at least: see
`runtime`."""

# Modules of which Accelerate wants one (accelerate 1.15, utils/imports.py), and what pip calls the package.
_WANTED = {
    "aim": ("aim",), "clearml": ("clearml",), "comet_ml": ("comet_ml",), "dvclive": ("dvclive",), "mlflow": ("mlflow",),
    "swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",), "wandb": ("wandb",),
}  # fmt: skip
TRACKERS = tuple(_WANTED)


def parser(prog: str = "python -m app.train", *, keys_of: str | None = None) -> Parser:
    """Return the parser for the command line of a training; its help lists the keys of recipes for the task `keys_of`."""
    parser = Parser(
        prog=prog,
        description="Train a recipe in the processes that a preset starts: `samerun launch --preset PRESET ...`, or "
        "`accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.train ...`.",
        epilog=f"recipe keys of the task {keys_of}:\n\n" + recipe_file.reference(keys_of) if keys_of else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder that the run writes to (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--trackers",
        default="tensorboard",
        help="Accelerate trackers, comma-separated, such as tensorboard,wandb; or none (default: tensorboard)",
    )
    parser.add_argument("--resume", default="never", metavar="auto|never|PATH", help="resume from a checkpoint. auto: from "
        "the newest in --run-dir, if there is one; PATH: a run folder or a checkpoint (default: never)"
                        )  # fmt: skip
    parser.add_argument("--changed-task", action="store_true", help="resume although your task file has changed since the "
        "checkpoint; only for changes that do not affect training")  # fmt: skip
    parser.add_argument("--hang-timeout", type=not_negative, default=_HANG_TIMEOUT_S, metavar="SECONDS", help="end a run that "
        "has hung for so long, after writing every rank's stack to RUN/stacks; must be longer than any step, evaluation "
        "forward pass or checkpoint save; 0: never "
                        f"(default: {_HANG_TIMEOUT_S})")  # fmt: skip
    add_workers(parser)
    parser.add_argument("--print-recipe", action="store_true", help="print every recipe value with its origin and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that override the file's")
    return parser


def show_help(words: Sequence[str]) -> NoReturn:
    """Print the help and end the process. The recipe among the words, if there is one, decides which keys there are."""
    given = parser().parse_known_intermixed_args([word for word in words if word not in ("-h", "--help")])[0]
    parser(keys_of=recipe_file.load(given.recipe, given.overrides).recipe.task).print_help()
    sys.exit(0)


def add_best(parser: argparse.ArgumentParser) -> None:
    """Add `--best`: which checkpoint of a run."""
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint by validation score (needs "
        "checkpoint.keep_best=true), not its last weights")  # fmt: skip


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`: what is made by how many is the same, so it is no recipe key."""
    parser.add_argument("--workers", type=not_negative, metavar="N", help="data-loading processes per training process, for "
        "tasks that load samples one by one; 0: none, but beside a GPU one is used. The samples are the same with any number "
        "(default: from the CPU cores, at most 16)")  # fmt: skip


def trackers(text: str) -> list[str]:
    """Return the names in the value of --trackers, each once; `none` is no tracker.

    Raises TrackerError for a name that is unknown, or whose library is not installed here.
    """
    names = list(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name and name != "none"))
    for name in names:
        if name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TrackerError(f"--trackers has {name!r}: unknown tracker; {hint}Known are {', '.join(TRACKERS)}; or none")
        if not any(map(importlib.util.find_spec, _WANTED[name])):
            raise TrackerError(f"--trackers has {name}, which is not installed here: pip install {name.replace('_', '-')}")
    return names
