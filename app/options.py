"""The command-line parser, whose errors are one sentence, and the options of `python -m app.train`.

Standard library and PyYAML only.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from app.errors import TrackerError, UsageError, did_you_mean
from app.recipe import recipe_file

_N = TypeVar("_N", int, float)


def names(text: str) -> list[str]:
    """Return the words of an option with commas between them, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def numbers(text: str) -> list[int]:
    """Return the whole numbers, 1 or more, of an option with commas between them, each once."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, separated by commas, such as 1,2,4")
    return list(dict.fromkeys(map(int, parts)))


def _number(kind: Callable[[str], _N], is_allowed: Callable[[_N], bool], expected: str) -> Callable[[str], _N]:
    """Return a type for `add_argument`, whose error names the value and what is expected."""

    def read(text: str) -> _N:
        with suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")

    return read


positive = _number(int, lambda value: value >= 1, "a whole number, 1 or more")
not_negative = _number(int, lambda value: value >= 0, "a whole number, 0 or more")
above_zero = _number(float, lambda value: 0 < value < math.inf, "a number, more than 0, such as 2.5")
tolerance = _number(float, lambda value: 0 <= value < math.inf, "a number, 0 or more, such as 1e-5")
share = _number(float, lambda value: 0 < value <= 1, "a share, more than 0 and at most 1, such as 0.8")

_ACCELERATES = {
    "config_file": "--preset",
    "num_machines": "--nodes",
    "main_process_port": "--port",
    "mixed_precision": "--mixed-precision",
    "parallelism_config_tp_size": "--tensor-parallel",
    "parallelism_config_dp_replicate_size": "--replicas",
}


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises UsageError, one sentence, where the other prints its usage; no option is abbreviated."""

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `ArgumentParser`."""
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message.removeprefix('argument ')} (`{self.prog} --help` lists the options)")

    def parse_all(self, argv: Sequence[str] | None, *, also: Collection[str] = ()) -> argparse.Namespace:
        """Parse options and positional arguments in any order; None: those of this program. Raises UsageError for others.

        `also` are options that the command has beside this parser's: one that was not meant may be near one of them.
        """
        arguments, unknown = self.parse_known_intermixed_args(argv)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"{word}: one argument too many")
            option = word.partition("=")[0]
            hint = self._hint(option, [*self.options(), *also])
            self.error(f"{option}: unknown option{hint and '; '}{hint}")
        self.refuse_empty(arguments)
        return arguments

    def refuse_empty(self, arguments: argparse.Namespace) -> None:
        """Raise UsageError for an option whose value is the empty text, as an unset variable of a shell makes it."""
        for action in self._actions:
            if action.option_strings and getattr(arguments, action.dest, None) == "":
                self.error(f"{action.option_strings[0]} is empty: give it a value or leave it out")

    def take_accelerates_words(self) -> None:
        """Take options by the names that `accelerate launch` has for them, and `num_processes`, which is that of all nodes."""
        for spelling, option in {**_ACCELERATES, "num_processes": ""}.items():
            names = (f"--{spelling}", f"--{spelling.replace('_', '-')}")
            new = [name for name in dict.fromkeys(names) if name not in self._option_string_actions]
            like = self._option_string_actions.get(option)
            if not option:
                self.add_argument(*new, type=positive, help=argparse.SUPPRESS)
            elif like is not None:
                kind: dict[str, Any] = {"dest": like.dest, "type": like.type, "choices": like.choices}
                self.add_argument(*new, **kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def options(self) -> list[str]:
        """Return all that begins with a dash and means something here."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [option for action in shown for option in action.option_strings if option.startswith("--")]

    def _hint(self, option: str, known: Sequence[str]) -> str:
        """Return what may have been meant by an unknown option, where these are known."""
        from app import tasks

        name = option.lstrip("-").replace("-", "_")
        ours = _ELSEWHERE.get(name, ())
        if meant := next((it for it in ours if it in known), None):
            return f"give {meant}"
        takes_values = any("key=value" in str(action.metavar) for action in self._actions)
        keys = recipe_file.kinds(tasks.DEFAULT) if takes_values else ()
        if near := [f"{key}=..." for key in keys if key in (name, *ours) or key.endswith(f".{name}")]:
            return f"recipe values are given as key=value: {' or '.join(near)}"
        otherwise = "recipe values are given as key=value" if takes_values else ""
        return did_you_mean(option.replace("_", "-"), known, otherwise=otherwise, cutoff=0.7)


# Names that other programs have for our options and keys; the first that the command takes is meant.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpus", "num_gpus", "devices"), ("--gpus-per-node", "--processes")),
    **dict.fromkeys(("nproc_per_node", "ntasks_per_node"), ("--processes-per-node",)),
    **dict.fromkeys(("nnodes", "num_nodes"), ("--nodes",)),
    **dict.fromkeys(("output_dir", "save_dir", "logdir"), ("--run-dir",)),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), ("train.global_batch_size",)),
    **dict.fromkeys(("learning_rate", "base_lr"), ("optim.lr",)),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), ("train.epochs",)),
    "max_steps": ("train.steps",),
}

_HANG_TIMEOUT_S = 540
"""Longer than a first step with its compilation takes. The process group waits twice as long, and 1800 s at least: see
`runtime`."""

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Accelerate's trackers (1.15), by the names of the modules that they need."""


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
    found = [name for name in names(text) if name != "none"]
    for name in found:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS, then=f"Known are {', '.join(TRACKERS)}; or none")
            raise TrackerError(f"--trackers has {name!r}: unknown tracker; {hint}")
        if importlib.util.find_spec(name) is None:
            raise TrackerError(f"--trackers has {name}, which is not installed here: pip install {name.replace('_', '-')}")
    return found
