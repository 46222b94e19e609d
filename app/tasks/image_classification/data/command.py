"""`samerun data inspect|pack`: show what a data set of images contains, or convert it to another format."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from app.data.data_files import is_hidden
from app.environment import host
from app.errors import DataError, RecipeError
from app.options import Parser, positive
from app.recipe import recipe_file
from app.recipe.schema import Recipe

FORMATS = ("webdataset", "parquet", "arrays", "hdf5", "lmdb")
"""Formats that `pack` writes."""
_TASK = "image_classification"
_WHAT = "a recipe, by name or path; or a folder or file of data, whose kind is detected unless data.source=KIND is given"
_PATTERNS = {
    "arrays": ("*/images.npy",),
    "webdataset": ("*.tar",),
    "hdf5": ("*.h5", "*.hdf5"),
    "lmdb": ("*.lmdb",),
    "tfrecord": ("*.tfrecord*",),
    "huggingface": ("dataset_dict.json", "*.parquet", "*.arrow", "*/*.parquet"),
    "mnist": ("train-images-idx3-ubyte*",),
    "cifar10": ("cifar-10-batches-py", "data_batch_1"),
    "cifar100": ("cifar-100-python",),
    "imagefolder": ("*/*/*",),
}
"""Files by which the kind of a folder is detected, by data.source; the first match counts."""


def main(argv: Sequence[str]) -> int:
    """Run `samerun data` with these arguments and return its exit code. Raises SamerunError."""
    return {"inspect": _inspect, "pack": _pack}[argv[0]](argv[1:])


def recipe_of(what: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with a name or path, or one for the data in a folder or file, with the overrides.

    Raises RecipeError if it is neither, or wrong, and DataError if the kind of data is not recognized.
    """
    path = Path(what)
    if what in recipe_file.names() or path.suffix in (".yaml", ".yml"):
        recipe = recipe_file.load(what, overrides).recipe
        if recipe.task != _TASK:
            raise RecipeError(f"{what} is a recipe for the task {recipe.task}, and this command is for pictures")
        return recipe
    if not path.exists():
        raise RecipeError(f"{what} is neither a recipe ({', '.join(recipe_file.names())}, or a .yaml file) nor a path to data")
    has_source = any(override.startswith("data.source=") for override in overrides)
    source = [] if has_source else [f"data.source={_detected_source(path)}"]
    return recipe_file.load("imagefolder", recipe_file.replaced([f"data.path={path}", *source], overrides)).recipe


def _detected_source(path: Path) -> str:
    if path.is_file():
        return "huggingface"
    for source, patterns in _PATTERNS.items():
        matches = (file.relative_to(path) for pattern in patterns for file in path.glob(pattern))
        if any(not any(map(is_hidden, file.parts)) for file in matches):
            return source
    raise DataError(f"{path} contains no data of a known kind; give data.source=KIND ({', '.join(_PATTERNS)})")


def _inspect(argv: Sequence[str]) -> int:
    parser = _parser("inspect", "Show what a data set contains: samples, classes, sizes, pixels, and unreadable files.")
    parser.add_argument(
        "--all", action="store_true", help="read every picture, not a sample of them, and list the unreadable ones"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_all(argv)
    recipe = _recipe(options.words)
    from app.tasks.image_classification.data import inspect

    facts = inspect.inspect(recipe, everything=options.all, processes=options.processes)
    sys.stdout.write(json.dumps(facts) + "\n" if options.json else inspect.as_text(facts))
    return DataError.exit_code if any(facts[split]["unreadable"] for split in inspect.SPLITS if split in facts) else 0


def _pack(argv: Sequence[str]) -> int:
    parser = _parser(
        "pack", "Convert pictures to another format, and shrink them. Samples keep their numbers, labels and classes."
    )
    parser.add_argument("--to", choices=FORMATS, required=True, help="format to write")
    parser.add_argument("--out", type=Path, required=True, help="folder to create; existing files are never replaced")
    parser.add_argument(
        "--max-side",
        type=positive,
        metavar="PIXELS",
        help="shrink pictures whose shorter side is longer than this, to this length",
    )
    options = parser.parse_all(argv)
    recipe = _recipe(options.words)
    from app.tasks.image_classification.data import pack

    keys, not_read = pack.pack(recipe, options.to, options.out, max_side=options.max_side, processes=options.processes)
    sys.stdout.write("".join(f"{line}\n" for line in [*not_read, f"written; a recipe reads it with {' '.join(keys)}"]))
    return 0


def _parser(command: str, description: str) -> Parser:
    parser = Parser(prog=f"samerun data {command}", description=description)
    parser.add_argument("words", nargs="+", metavar="WHAT [key=value ...]", help=f"{_WHAT}; and recipe values")
    count = host.usable(1)
    parser.add_argument(
        "--workers",
        "--processes",
        dest="processes",
        metavar="N",
        type=positive,
        default=count,
        help=f"processes that read and decode (default: {count}, the CPU cores here)",
    )
    return parser


def _recipe(words: Sequence[str]) -> Recipe:
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    paths = [word for word in words if word not in overrides]
    if len(paths) != 1:
        raise RecipeError(f"{' and '.join(paths) or 'nothing'} is given: give one of these: {_WHAT}")
    return recipe_of(paths[0], overrides)
