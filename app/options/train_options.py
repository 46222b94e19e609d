"""The options of `python -m app.train`: the one table of them, which the launcher reads too, before anything starts.

Standard library and PyYAML only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from app.options.command_line import Parser
from app.options.values import not_negative
from app.recipe import recipe_file

_HANG_TIMEOUT_S = 540
"""Longer than a first step with its compilation takes. The process group waits twice as long, and 1800 s at least: see
`runtime`."""


def parser(prog: str = "python -m app.train", *, keys_of: str | None = None) -> Parser:
    """Return the parser for the command line of a training; its help lists the keys of recipes for the task `keys_of`."""
    parser = Parser(
        prog=prog,
        description="Train what a recipe says, on the processes that a preset starts: `samerun launch --preset PRESET ...`, or "
        "`accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.train ...`.",
        epilog=f"recipe keys, of the task {keys_of}:\n\n" + recipe_file.reference(keys_of) if keys_of else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder for all that the run writes (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--trackers",
        default="tensorboard",
        help="comma-separated Accelerate trackers, such as tensorboard,wandb; or none (default: tensorboard)",
    )
    parser.add_argument("--resume", default="never", metavar="auto|never|PATH", help="go on from a checkpoint: auto takes the "
                        "newest of --run-dir, if it has one; PATH is a run folder or a checkpoint (default: never)"
                        )  # fmt: skip
    parser.add_argument("--changed-task", action="store_true", help="go on although the recipe's own task file was changed "
                        "since: for changes that have no part in what is learnt")  # fmt: skip
    parser.add_argument("--hang-timeout", type=not_negative, default=_HANG_TIMEOUT_S, metavar="SECONDS", help="end the run, "
                        "with the stacks of all processes in RUN/stacks, when it stood still for so long; it has to be longer "
                        "than any step, forward pass of an evaluation and save takes; 0: never "
                        f"(default: {_HANG_TIMEOUT_S})")  # fmt: skip
    add_workers(parser)
    parser.add_argument("--print-recipe", action="store_true", help="print every value and where it came from, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that replace those of the file")
    return parser


def show_help(words: Sequence[str]) -> NoReturn:
    """Print the help and end the process. The recipe among the words, if there is one, decides which keys there are."""
    given = parser().parse_known_intermixed_args([word for word in words if word not in ("-h", "--help")])[0]
    parser(keys_of=recipe_file.load(given.recipe, given.overrides).recipe.task).print_help()
    sys.exit(0)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`: what is made by how many is the same, so it is no recipe key."""
    parser.add_argument("--workers", type=not_negative, metavar="N", help="processes that make the samples of each training "
                        "process, where samples are made one by one; 0: it makes them itself, beside a GPU one does. They are "
                        "the same samples with any number (default: as its cores allow, at most 16)")  # fmt: skip
