"""The command-line parser, whose errors are one sentence, and the options of `samerun train`.

Standard library and PyYAML only.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from app import tasks
from app.environment.launched import PRECISIONS
from app.errors import RecipeError, TrackerError, UsageError, did_you_mean, short_traceback
from app.recipe import recipe_file
from app.runs import run_folder

_N = TypeVar("_N")


def names(text: str) -> list[str]:
    """Return the words of an option with commas between them, each once."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def numbers(text: str) -> list[int]:
    """Return the whole numbers, 1 or more, of an option with commas between them, each once."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of at least 1, separated by commas, such as 1,2,4")
    return list(dict.fromkeys(map(int, parts)))


def value_reader(kind: Callable[[str], _N], is_allowed: Callable[[_N], bool], expected: str) -> Callable[[str], _N]:
    """Return a type for `add_argument`, whose error names the value and what is expected."""

    def read(text: str) -> _N:
        with suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")

    return read


whole = value_reader(int, lambda _: True, "a whole number, such as 2")
precision = value_reader(str, PRECISIONS.__contains__, "no (float32), bf16 or fp16; fp8 is not supported")
positive = value_reader(int, lambda value: value >= 1, "a whole number, 1 or more")
not_negative = value_reader(int, lambda value: value >= 0, "a whole number, 0 or more")
above_zero = value_reader(float, lambda value: 0 < value < math.inf, "a number, more than 0, such as 2.5")
tolerance = value_reader(float, lambda value: 0 <= value < math.inf, "a number, 0 or more, such as 1e-5")
share = value_reader(float, lambda value: 0 < value <= 1, "a share, more than 0 and at most 1, such as 0.8")

_ACCELERATES = {
    "config_file": "--preset",
    "num_machines": "--nodes",
    "main_process_port": "--port",
    "mixed_precision": "--mixed-precision",
    "parallelism_config_tp_size": "--tensor-parallel",
    "parallelism_config_cp_size": "--context-parallel",
    "parallelism_config_dp_replicate_size": "--replicas",
}


def wrapped(text: str, width: int = 96) -> str:
    """Return the text with its lines broken to fit the terminal, or `width`; each piece keeps the indent of its line."""
    width, lines = min(width, shutil.get_terminal_size().columns), []
    for line in text.splitlines():
        margin = " " * (len(line) - len(line.lstrip()))
        broken = textwrap.wrap(line.strip(), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
        lines += broken or [""]
    return "\n".join(lines)


class _Help(argparse.HelpFormatter):
    """A help of at most 96 columns, whose descriptions keep their line breaks."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(96, shutil.get_terminal_size().columns))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(wrapped(text, width), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width).splitlines()


class HelpShown(SystemExit):
    """Ends the program after the help of `parser`."""

    def __init__(self, parser: Parser) -> None:
        super().__init__(0)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises UsageError, one sentence, where the other prints its usage; no option is abbreviated."""

    def __init__(self, command: str, description: str, **settings: Any) -> None:
        """`command` is the part after `samerun`; `settings` go to `ArgumentParser`."""
        prog = f"samerun {command}".strip()
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help, **settings)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse, raise an error if it cannot be written."""
        (file or sys.stdout).write(self.format_help())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - as argparse calls it after --help
        """Raise HelpShown."""
        raise HelpShown(self)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        message = message.removeprefix("argument ").replace("ignored explicit argument", "it takes no value, but is given")
        raise UsageError(f"{message} (`{self.prog} --help` lists the options)")

    def parse_all(
        self, argv: Sequence[str] | None, *, also: Collection[str] = (), after_dashes: Collection[str] = ()
    ) -> argparse.Namespace:
        """Parse options and positional arguments in any order; None: the arguments of this program. Raises UsageError for
        others.

        `also` are options that the command has in addition to this parser's, `after_dashes` the ones that it takes after `--`.
        """
        arguments, unknown = self.parse_known_intermixed_args(argv)
        here = [*self.options(), *also]
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"{word}: one argument too many")
            option = word.partition("=")[0]
            hint = _RENAMED.get((self.prog, option)) or self._hint(option, _task(arguments), [*here, *after_dashes])
            hint = re.sub("--[a-z-]+", lambda it: f"-- {it[0]}" if {it[0]} <= {*after_dashes} - {*here} else it[0], hint)
            raise UsageError(f"{option}: unknown option; {hint}")
        for word in getattr(arguments, "overrides", ()) if self.get_default("recipe") else ():
            if "=" not in word and (hint := _meant_by_word(word, _task(arguments), here)):
                raise UsageError(f"{word!r}: expected an option or key=value; {hint}")
        if not getattr(arguments, "full_traceback", False):
            sys.excepthook = lambda _, error, __: print(short_traceback(error), end="", file=sys.stderr)  # noqa: T201
        return arguments

    def take_accelerates_words(self) -> None:
        """Take options by the names that `accelerate launch` has for them, and `num_processes`, which is that of all nodes."""
        self.add_argument("--num_processes", "--num-processes", type=positive, help=argparse.SUPPRESS)
        for spelling, option in _ACCELERATES.items():
            if option in self._option_string_actions:
                self.take_also(option, f"--{spelling}", f"--{spelling.replace('_', '-')}")

    def take_also(self, option: str, *spellings: str) -> None:
        """Take an option by other names, which the help does not list."""
        for spelling in spellings:
            self._option_string_actions.setdefault(spelling, self._option_string_actions[option])

    def options(self) -> list[str]:
        """Return all that begins with a dash and means something here."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        return [option for action in shown for option in action.option_strings if option.startswith("--")]

    def _hint(self, option: str, task: str, known: Collection[str]) -> str:
        """Return what may have been meant by an unknown option, in a recipe of this task, where these options are known."""
        takes_values = any("key=value" in str(action.metavar) for action in self._actions)
        values, dashed = "recipe values are given as key=value", option.replace("_", "-")
        if takes_values and (hint := recipe_file.meant(option, task, known, lead=f"{values}:")):
            return hint
        if dashed in known:
            return f"give {dashed}"
        otherwise = f"{values}; " * takes_values + f"`{self.prog} --help` lists the options"
        return did_you_mean(dashed, dict.fromkeys(known), otherwise=otherwise, cutoff=0.75)


def _task(arguments: argparse.Namespace) -> str:
    """Return the task of the recipe that the arguments name, or the default task if there is none."""
    with suppress(RecipeError):
        named = [word for word in getattr(arguments, "overrides", ()) if word.startswith("task=")]
        return recipe_file.load(getattr(arguments, "recipe", None) or "digits", named).recipe.task
    return tasks.DEFAULT


def _meant_by_word(word: str, task: str, known: Collection[str]) -> str:
    """Return what may have been meant by a word of a training's command line that is no option and no `key=value`."""
    if word.endswith(".py"):
        return f"write `task: {word}` into a recipe.yaml and give --recipe recipe.yaml; `samerun new DIR` creates an example"
    if word in recipe_file.names() or word.endswith((".yaml", ".yml")):
        is_preset = Path(word).is_file() and b"distributed_type" in Path(word).read_bytes()
        return f"give --{'preset' if is_preset else 'recipe'} {shlex.quote(word)}"
    if Path(word, run_folder.RUN).exists():
        return f"`samerun resume {shlex.quote(word)}` continues this run"
    recipes = [f"--recipe {name}" for name in recipe_file.names()]
    return recipe_file.meant(word.rstrip(":"), task, known) or did_you_mean(f"--recipe {word}", recipes, cutoff=0.85)


class _Once(argparse.Action):
    """Store the value of an option; another value for it is refused, and the empty text, which an unset variable leaves."""

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """Store it. Raises UsageError if it is empty, ArgumentError if there is another one."""
        if option and values == "":
            raise UsageError(f"{option} is empty: give it a value or leave it out")
        given: dict[str, Any] = namespace.__dict__.setdefault("_given", {})
        if option and given.setdefault(self.dest, values) != values:
            both = f"give {option} {given[self.dest]},{values}" if "," in str(self.metavar) else "keep one of them"
            raise argparse.ArgumentError(self, f"given twice ({given[self.dest]} and {values}); {both}")
        setattr(namespace, self.dest, values)


# Answers for earlier names of options, by their commands.
_RENAMED = {
    ("samerun parity", "--keep"): "it is now --out",
    **{(f"samerun data {tool}", "--processes"): "it is now --workers" for tool in ("inspect", "check", "pack")},
}

_HANG_TIMEOUT_S = 540
"""Longer than a first step with its compilation takes. The process group waits twice as long, and 1800 s at least: see
`runtime`."""

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Accelerate's trackers (1.15), by the names of the modules that they need."""


def parser(command: str = "train") -> Parser:
    """Return the parser for the command line of a training."""
    parser = Parser(command, "Train a recipe in this process, or in the processes that `accelerate launch --config_file "
        "accelerate_configs/PRESET.yaml -m app.train ...` starts; `samerun launch` starts them itself. `samerun recipes "
        "--keys` lists the keys.", usage="%(prog)s [options] [key=value ...]")  # fmt: skip
    add_recipe(parser)
    parser.add_argument("--run-dir", metavar="PATH", help="folder that the run writes to (default: runs/<recipe>-<time>)")
    add_resume(parser, default="never", when="never")
    add_training(parser)
    return parser


def add_recipe(parser: Parser, values: str | None = "recipe values that override the file's") -> None:
    """Add --recipe, and the positional arguments `key=value` with the help `values`, unless that is None."""
    parser.add_argument("--recipe", default="digits", metavar="NAME|PATH", help="shipped recipe or YAML file (default: digits)")
    if values is not None:
        parser.add_argument("overrides", nargs="*", metavar="key=value", help=values)


def add_presets(parser: Parser) -> None:
    """Add --presets, of a command that runs several."""
    parser.add_argument("--presets", type=names, default=["multi_gpu"], metavar="NAME,...", help="presets (default: multi_gpu)")
    parser.take_also("--presets", "--preset", "--config_file")


def add_resume(parser: Parser, *, default: str | None, when: str) -> None:
    """Add --resume; `when` describes its default. Without a value it is auto."""
    parser.add_argument("--resume", nargs="?", const="auto", default=default, metavar="auto|never|PATH",
        help="resume from a checkpoint. auto, or no value: from the newest in the run folder, if there is one; PATH: a run "
        f"folder or a checkpoint (default: {when})")  # fmt: skip


def add_training(parser: argparse._ActionsContainer) -> None:
    """Add the options that only the training has, and no launcher reads."""
    parser.add_argument("--trackers", default="tensorboard", metavar="NAME,...", help="Accelerate trackers, such as "
        "tensorboard,wandb; or none (default: tensorboard)")  # fmt: skip
    parser.add_argument("--changed-task", action="store_true", help="resume although your task file has changed since the "
        "checkpoint; only for changes that do not affect training")  # fmt: skip
    parser.add_argument("--hang-timeout", type=not_negative, default=_HANG_TIMEOUT_S, metavar="SECONDS", help="end a run that "
        "has hung for this time, after writing every rank's stack to RUN/stacks; must be longer than any step, evaluation "
        f"forward pass or checkpoint save; 0: never (default: {_HANG_TIMEOUT_S})")  # fmt: skip
    add_workers(parser)
    add_full_traceback(parser)
    parser.add_argument("--print-recipe", action="store_true", help="print every recipe value with its origin and stop")
    # What `samerun replay` gives the run that it starts (app/checks/replay.py).
    parser.add_argument("--replay-until", type=positive, help=argparse.SUPPRESS)
    parser.add_argument("--replay-samples", help=argparse.SUPPRESS)


def add_best(parser: argparse._ActionsContainer) -> None:
    """Add `--best`: which checkpoint of a run."""
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint by validation score (needs "
        "checkpoint.keep_best=true), not its last weights")  # fmt: skip


def add_full_traceback(parser: argparse._ActionsContainer) -> None:
    """Add `--full-traceback`: of errors in code of the user's."""
    parser.add_argument("--full-traceback", action="store_true", help="show all frames of an error in your own code, not only "
        "the ones in your files")  # fmt: skip


def add_workers(parser: argparse._ActionsContainer) -> None:
    """Add `--workers`: what is made by how many is the same, so it is no recipe key."""
    parser.add_argument("--workers", type=not_negative, metavar="N", help="data-loading processes of each training process, "
        "for tasks that load samples one by one; 0: none, but one with a GPU. The samples are the same with any number "
        "(default: from the CPU cores, at most 16)")  # fmt: skip


def trackers(text: str, *, in_image: bool = False) -> list[str]:
    """Return the names in the value of --trackers, each once; `none` is no tracker.

    Raises TrackerError for a name that is unknown, or whose library is not installed here, unless the run is `in_image`.
    """
    found = [name for name in names(text) if name != "none"]
    for name in found:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS, then=f"Known are {', '.join(TRACKERS)}; or none")
            raise TrackerError(f"--trackers has {name!r}: unknown tracker; {hint}")
        if not in_image and importlib.util.find_spec(name) is None:
            raise TrackerError(f"--trackers has {name}, which is not installed here: pip install {name.replace('_', '-')}")
    return found
