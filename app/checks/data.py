"""`samerun data COMMAND ...`: inspect and prepare data before a run, with the tools of its task; `check` is here.

`samerun data check` reads every sample of a recipe's splits once, and lists those that cannot be read.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app import tasks
from app.data.preprocessing import in_order, progress
from app.errors import DataError, RecipeError
from app.files.atomic_files import disk_errors, file_made_whole
from app.options import Parser
from app.recipe import recipe_file
from app.recipe.schema import Recipe
from app.reports.past_run import print_text

_IMAGES, _TEXTS = "image_classification", "causal_lm"
# Task whose tools have the command, and what it is for. None: the task of the data; empty: every task.
_COMMANDS = {
    "inspect": (None, "show what a data set of images, or a token folder, contains"),
    "tokenize": (_TEXTS, "tokenize text, or prompts and answers, into a token folder"),
    "check": ("", "read every sample once and list the unreadable ones"),
    "pack": (_IMAGES, "shrink images or convert them to another format"),
}
_PIECE = 16
"""Samples that are read together."""


def main(argv: Sequence[str]) -> int:
    """Run `samerun data` with these arguments and return its exit code. Raises SamerunError."""
    if not argv or argv[0] not in _COMMANDS:
        commands = "\n".join(f"  {name:8}  {text}" for name, (_, text) in _COMMANDS.items())
        epilog = f"commands:\n{commands}\n\n`samerun data COMMAND --help` shows its options."
        parser = Parser("data", "Inspect and prepare data before a run, with the tools of its task.", epilog=epilog)
        parser.add_argument("command", choices=[*_COMMANDS], metavar="COMMAND", help="what to do")
        parser.parse_all(argv or ["--help"])  # ends the program
    if argv[0] != "tokenize":  # every other command takes a recipe by this option, and these as a plain word too
        argv = [word.removeprefix("--recipe=") for word in argv if word != "--recipe"]
    if argv[0] == "check":
        return _check(argv[1:])
    task = _COMMANDS[argv[0]][0] or _task_of(argv[1:])
    return importlib.import_module(f"app.tasks.{task}.data.command").main(argv)  # type: ignore[no-any-return]


def _task_of(words: Sequence[str]) -> str:
    """Return the task of the data that the words name: a token folder, or a recipe. Raises RecipeError."""
    overrides = [word for word in words if "=" in word and not word.startswith("-") and not Path(word).exists()]
    for word in words:
        path = Path(word)
        if (path / "tokens.json").is_file() or (path.name == "tokens.json" and path.is_file()):
            return _TEXTS
        if word in recipe_file.names() or (path.suffix in (".yaml", ".yml") and path.is_file()):
            task = recipe_file.load(word, overrides).recipe.task
            return task if task in tasks.SHIPPED else _IMAGES
    return _IMAGES


def _check(argv: Sequence[str]) -> int:
    from app.tasks.image_classification.data.command import make_parser, recipe_of  # not for the other commands

    parser = make_parser("check", "Read every sample of all splits of a recipe once, as training would, and list the "
        "unreadable ones. The exit code is 6 if there are any that --write has not written down.")  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="PATH", help="write their names into a file, for data.leave_out=PATH; "
        "names that it already leaves out are kept")  # fmt: skip
    options = parser.parse_all(argv)
    recipe = recipe_of(options.words, any_task=True)
    can_leave_out = recipe.task == _IMAGES
    if options.write is not None and not can_leave_out:
        raise RecipeError(
            f"--write makes a file for data.leave_out, a key of {_IMAGES}, and the task is {recipe.task}: leave --write out"
        )
    if options.write is not None and not os.access(options.write.parent, os.W_OK):  # now, because reading takes longer
        raise DataError(f"--write {options.write} cannot be written: its folder does not exist or is not writable")
    found: dict[str, str] = {}
    if can_leave_out:
        splits, not_read = _open_images(recipe, found)
        for line in not_read:
            print_text(line)
    else:
        task = tasks.of(recipe)
        task = task.prepare_data() or task
        splits = {split: it for split in ("train", "validation", "test") if (it := task.samples(split)) is not None}
    for split, samples in splits.items():
        print_text(f"{split}: {len(samples):,} samples")
        sys.stdout.flush()
        for number, why in _unreadable(samples, split, recipe.seed, options.processes):
            found[samples.name(number) if can_leave_out else f"{split}/{number}"] = why
    for name, why in found.items():
        print_text(f"unreadable: {name}: {why}".replace("\n", r"\n"))
    if options.write is not None and found:
        count = _write(options.write, recipe, found)
        print_text(f"{options.write} lists {count} sample{'s' * (count != 1)}: data.leave_out={options.write} leaves them out")
        return 0
    advice = ": repair them, or list them in a file for data.leave_out (--write FILE)" if can_leave_out else ""
    print_text(f"{len(found)} cannot be read{advice}" if found else "all can be read")
    return DataError.exit_code if found else 0


def _open_images(recipe: Recipe, found: dict[str, str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the splits, opened without the images that opening needs and cannot read, which are added to `found`.

    Also return what is not read of their folders.
    """
    from app.data.samples import CHECK
    from app.tasks.image_classification.data import images
    from app.tasks.image_classification.data.images import UnreadableError
    from app.tasks.image_classification.data.open import download_data, located, not_read, open_undecoded

    download_data(recipe.sections)
    sections = located(recipe.sections)
    with tempfile.NamedTemporaryFile("w", errors="surrogateescape") as file:
        while True:
            try:
                data = open_undecoded(sections)
                return data, not_read(data)
            except UnreadableError as error:
                found[error.name] = str(error).removesuffix(f". {CHECK}")
            names = [(name, "") for name in (*images.names_in(recipe.sections.data), *found)]
            file.seek(0)
            file.write(images.as_text(names))
            file.flush()
            sections = replace(sections, data=replace(sections.data, leave_out=file.name))


def _unreadable(samples: Any, split: str, seed: int, processes: int) -> Iterator[tuple[int, str]]:
    """Yield the numbers of the samples that cannot be fetched, ascending, and the error of each.

    Samples of the training split get the draws of the first epoch. Processes other than this one read where loader workers
    would.
    """
    from app.data.draws import HostDraws  # not at the top: `tokenize` does without torch

    def fetch(numbers: np.ndarray) -> str | None:
        try:
            samples.fetch(numbers, HostDraws(seed, numbers) if split == "train" else None)
        except DataError as error:
            return str(error)
        return None

    def look(piece: range) -> list[tuple[int, str]]:
        numbers = np.arange(piece.start, piece.stop)
        together = fetch(numbers)
        if together is None:
            return []
        alone = [(number, fetch(np.array([number]))) for number in piece]
        return [(number, why) for number, why in alone if why is not None] or [(piece.start, together)]

    with progress(f"reading {split}", len(samples), "samples") as advance:
        for some in in_order(look, len(samples), piece=_PIECE, processes=processes if samples.workers else 1):
            yield from some
            advance(_PIECE)


def _write(path: Path, recipe: Recipe, found: Mapping[str, str]) -> int:
    """Write the names, and those that the recipe leaves out already; return how many they are. Raises DataError."""
    from app.tasks.image_classification.data import images

    if broken := next((name for name in found if "\n" in name), None):
        raise DataError(f"{broken!r} has a line break in its name, and --write writes one name a line: rename it")
    before = [(name, "") for name in sorted(images.names_in(recipe.sections.data))]
    with disk_errors(path, "written", DataError), file_made_whole(path) as temporary:
        temporary.write_text(images.as_text([*before, *found.items()]), encoding="utf-8", errors="surrogateescape")
    return len(before) + len(found)
