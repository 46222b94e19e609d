"""A command-line parser whose errors are one sentence, with what was probably meant; types of option values."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from app.errors import UsageError

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

# What other programs call it: the first that the command has is named. `key=` is of the recipe.
_MEANT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "ngpus", "devices"), ("--gpus-per-node", "--processes")),
    **dict.fromkeys(("nproc_per_node", "ntasks_per_node"), ("--processes-per-node",)),
    **dict.fromkeys(("nproc", "np", "n", "ntasks", "world_size"), ("--processes", "--processes-per-node")),
    **dict.fromkeys(("nnodes", "num_nodes"), ("--nodes",)),
    **dict.fromkeys(("output_dir", "out_dir", "out", "logdir", "log_dir", "save_dir"), ("--run-dir",)),
    **dict.fromkeys(("resume_from_checkpoint", "checkpoint", "ckpt"), ("--resume",)),
    **dict.fromkeys(("report_to", "logger", "tracker", "log_with"), ("--trackers",)),
    **dict.fromkeys(("precision", "fp16", "bf16", "amp"), ("--mixed-precision",)),
    **dict.fromkeys(("config", "cfg", "yaml"), ("--recipe",)),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), ("--tensor-parallel",)),
    **dict.fromkeys(("pretrained", "weights", "finetune"), ("train.init_from=",)),
    **dict.fromkeys(("master_port", "rdzv_port"), ("--port",)),
    **dict.fromkeys(("batch_size", "batch", "bs", "b", "per_device_train_batch_size"), ("train.global_batch_size=",)),
    **dict.fromkeys(("learning_rate", "base_lr"), ("optim.lr=",)),
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs", "epoch"), ("train.epochs=",)),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), ("train.steps=",)),
    **dict.fromkeys(("model", "arch", "architecture"), ("model.name=",)),
    **dict.fromkeys(("optimizer", "opt"), ("optim.name=",)),
    **dict.fromkeys(("dataset", "data"), ("data.source=",)),
    **dict.fromkeys(("data_dir", "data_path", "dataset_path"), ("data.path=",)),
    **dict.fromkeys(("wd", "decay"), ("optim.weight_decay=",)),
}

_ACCELERATES = {
    "config_file": "--preset",
    "num_machines": "--nodes",
    "main_process_port": "--port",
    "mixed_precision": "--mixed-precision",
    "parallelism_config_tp_size": "--tensor-parallel",
    "parallelism_config_dp_replicate_size": "--replicas",
}
_OF_LAUNCHERS = {**_ACCELERATES, "num_processes": "--processes", "processes_per_node": "--processes-per-node"}


class _Once(argparse._StoreAction):
    """Stores the value of an option, and refuses a second one, which argparse would take without a word."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        if option_string and self.dest in parser._given:
            parser.error(f"{option_string} is given twice ({parser._given[self.dest]} and {values}): keep one of them")
        parser._given[self.dest] = values
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises UsageError, one sentence, where the other prints its usage; no option is abbreviated."""

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `ArgumentParser`."""
        super().__init__(allow_abbrev=False, **settings)
        self._given: dict[str, Any] = {}
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message.removeprefix('argument ')} (`{self.prog} --help` lists the options)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments that are known. Raises UsageError for an option that is given twice."""
        self._given = {}
        return super().parse_known_args(args, namespace)

    def parse_all(self, argv: Sequence[str] | None, *, also: Collection[str] = ()) -> argparse.Namespace:
        """Parse options and positional arguments in any order; None: those of this program. Raises UsageError for others.

        `also` are options that the command has beside this parser's: one that was not meant may be near one of them.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        arguments, unknown = self.parse_known_intermixed_args(words)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"{word}: one argument too many")
            meant = self._meant(word, words, also)
            self.error(f"{word.partition('=')[0]}: unknown option{meant and '; '}{meant}")
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

    def _meant(self, word: str, words: Sequence[str], also: Collection[str]) -> str:
        from app import tasks
        from app.recipe import recipe_keys  # here: the help need not wait for it

        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        after = words[words.index(word) + 1 :][:1]
        if not equals and after and not after[0].startswith("-") and "=" not in after[0]:
            value = after[0]
        takes_values = any("key=value" in str(action.metavar) for action in self._actions)
        keys = recipe_keys.kinds(tasks.DEFAULT) if takes_values else {}
        of_recipe = [key for key in keys if name in (key, key.rpartition(".")[2])]
        known = list(dict.fromkeys((*self.options(), *also)))
        if not of_recipe:
            meant = next((meant for meant in _MEANT.get(name, ()) if meant in known or meant[:-1] in keys), None)
            if meant and meant.startswith("-"):
                return f"give {meant} {value}".rstrip()
            of_recipe = [meant[:-1]] if meant else []
        if of_recipe:
            key = " or ".join(f"{key}={value or '...'}" for key in of_recipe)
            return f"recipe values are given as key=value: {key}"
        launchers = [*_MEANT.get(name, ()), _OF_LAUNCHERS.get(name, f"--{name.replace('_', '-')}")]
        if takes_values and (meant := next((option for option in launchers if option in _OF_LAUNCHERS.values()), None)):
            return f"it is for what starts the processes, `samerun launch` or `accelerate launch`: {meant} {value or '...'}"
        close = difflib.get_close_matches(option.replace("_", "-"), known, n=2, cutoff=0.7)
        if close:
            return f"did you mean {' or '.join(close)}?"
        return "recipe values are given as key=value" if takes_values else ""
