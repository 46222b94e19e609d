"""`samerun data check`: reads every sample of a recipe's splits once, and lists those that cannot be read."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from app import tasks
from app.data.draws import HostDraws
from app.data.preprocessing import in_order, progress
from app.environment import host
from app.errors import DataError, RecipeError
from app.files.atomic_files import file_made_whole
from app.options import Parser, positive
from app.recipe import recipe_file
from app.recipe.schema import Recipe

_WITH_LEAVE_OUT = "image_classification"


def main(argv: Sequence[str]) -> int:
    """Run `samerun data check` with these arguments and return its exit code. Raises SamerunError."""
    options = _parser().parse_all(argv)
    recipe = _recipe(options.words)
    can_leave_out = recipe.task == _WITH_LEAVE_OUT
    if options.write is not None and not can_leave_out:
        raise RecipeError(
            f"--write makes a file for data.leave_out, a key of {_WITH_LEAVE_OUT}, and this recipe's task is "
            f"{recipe.task}: leave --write out, and repair the listed samples"
        )
    found: dict[str, str] = {}
    splits, not_read = _pictures(recipe, found) if can_leave_out else (_splits(recipe), [])
    sys.stdout.write("".join(f"{line}\n" for line in not_read))
    for split, samples in splits.items():
        sys.stdout.write(f"{split}: {len(samples):,} samples\n")
        sys.stdout.flush()
        found |= _found(samples, split, recipe, options.processes)
    for name, why in found.items():
        sys.stdout.write(f"unreadable: {name}: {why}\n")
    if options.write is not None and found:
        count = _write(options.write, recipe, found)
        sys.stdout.write(f"{options.write} names {count} samples: data.leave_out={options.write} leaves them out\n")
        return 0
    word = f"{len(found)} cannot be read" if found else "all can be read"
    advice = ": repair them, or list them in a file for data.leave_out (--write FILE)" if found and can_leave_out else ""
    sys.stdout.write(word + advice + "\n")
    return DataError.exit_code if found else 0


def _found(samples: Any, split: str, recipe: Recipe, processes: int) -> Iterator[tuple[str, str]]:
    for number, why in unreadable(samples, split=split, seed=recipe.seed, processes=processes):
        yield samples.name(number) if recipe.task == _WITH_LEAVE_OUT else f"{split}/{number}", why


def _pictures(recipe: Recipe, found: dict[str, str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the splits, opened without the pictures that opening them needs and cannot read, which go into `found`.

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


def _splits(recipe: Recipe) -> Mapping[str, Any]:
    from app.task import Split

    task = tasks.of(recipe)
    task = task.prepare_data() or task
    opened = {split: task.samples(split) for split in get_args(Split)}
    return {split: samples for split, samples in opened.items() if samples is not None}


def _write(path: Path, recipe: Recipe, found: Mapping[str, str]) -> int:
    """Write the names, and those that the recipe leaves out already; return how many they are. Raises DataError."""
    from app.tasks.image_classification.data import images

    before = [(name, "") for name in sorted(images.names_in(recipe.sections.data))]
    try:
        with file_made_whole(path) as temporary:
            temporary.write_text(images.as_text([*before, *found.items()]), encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"--write {path} cannot be written ({error.strerror}): choose another file") from error
    return len(before) + len(found)


def _recipe(words: Sequence[str]) -> Recipe:
    """Return the recipe of a name or path, with overrides; of a folder or file of pictures one that reads it."""
    from app.tasks.image_classification.data.command import recipe_of

    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    whats = [word for word in words if word not in overrides]
    if len(whats) != 1:
        raise RecipeError(
            f"give one recipe, by name or path, or one folder of pictures: {' and '.join(whats) or 'none'} is given"
        )
    is_recipe = whats[0] in recipe_file.names() or Path(whats[0]).suffix in (".yaml", ".yml")
    return recipe_file.load(whats[0], overrides).recipe if is_recipe else recipe_of(whats[0], overrides)


def _parser() -> Parser:
    parser = Parser(
        prog="samerun data check",
        description="Read every sample of all splits of a recipe once, as training would, and list the unreadable ones. The "
        "exit code is 6 if there are any that --write has not written down.",
    )
    parser.add_argument("words", nargs="+", metavar="RECIPE [key=value ...]", help="--recipe NAME_OR_PATH, or a folder or "
        "file of pictures; and recipe values")  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FILE", help="write their names into FILE, for data.leave_out=FILE; "
        "names that it already leaves out are kept")  # fmt: skip
    count = host.usable(1)
    parser.add_argument("--workers", "--processes", dest="processes", metavar="N", type=positive, default=count,
                        help=f"processes that read and decode (default: {count}, the CPU cores here)")  # fmt: skip
    return parser


_PIECE = 16


def unreadable(samples: Any, *, split: str, seed: int, processes: int) -> list[tuple[int, str]]:
    """Return the numbers of the samples that cannot be fetched, ascending, and what each one's error says.

    `samples` are `Samples`; those of the training split get the draws of the first epoch. Processes other than this one help
    where `samples` say that workers do.
    """

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

    found = []
    with progress(f"reading {split}", len(samples), "samples") as advance:
        for some in in_order(look, len(samples), piece=_PIECE, processes=processes if samples.workers else 1):
            found += some
            advance(_PIECE)
    return found
