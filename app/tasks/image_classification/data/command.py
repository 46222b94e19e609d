"""`samerun data inspect|pack|bench`: look at data, write it once more in another form, measure how fast it can be fed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from app.data.data_files import is_hidden
from app.environment import host
from app.errors import DataError, RecipeError
from app.options import Parser, above_zero, positive
from app.recipe import recipe_file
from app.recipe.schema import Recipe

FORMATS = ("webdataset", "parquet", "arrays", "hdf5", "lmdb")
"""Formats that `pack` writes."""
_TASK = "image_classification"
_WHAT = "a recipe, by name or path; or a folder or file of data, whose kind is detected unless data.source=KIND is given"


def main(argv: Sequence[str]) -> int:
    """Run `samerun data` with these arguments and return its exit code. Raises SamerunError."""
    return {"inspect": _inspect, "pack": _pack, "bench": _bench}[argv[0]](argv[1:])


def recipe_of(what: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a name or path of one, or one for the data in a folder or file, with the overrides.

    Raises RecipeError if it is neither, or wrong, and DataError if the kind of data cannot be told.
    """
    path = Path(what)
    if what in recipe_file.names() or path.suffix in (".yaml", ".yml"):
        recipe = recipe_file.load(what, overrides).recipe
        if recipe.task != _TASK:
            raise RecipeError(f"{what} is a recipe for the task {recipe.task}, and this command is for pictures")
        return recipe
    if not path.exists():
        raise RecipeError(f"{what} is neither a recipe ({', '.join(recipe_file.names())}, or a .yaml file) nor a path to data")
    said = [override for override in overrides if override.startswith("data.source=")]
    found = [] if said else [f"data.source={_kind(path)}"]
    return recipe_file.load("imagefolder", recipe_file.replaced([f"data.path={path}", *found], overrides)).recipe


def _kind(path: Path) -> str:
    """Return the value of data.source for the data in a folder or file."""
    patterns = {
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
    if path.is_file():
        return "huggingface"
    for kind, names in patterns.items():
        found = (file.relative_to(path) for name in names for file in path.glob(name))
        if any(not any(map(is_hidden, file.parts)) for file in found):
            return kind
    raise DataError(f"{path} contains no data of a known kind; give data.source=KIND ({', '.join(patterns)})")


def _inspect(argv: Sequence[str]) -> int:
    parser = _parser("inspect", "Show what a data set contains: samples, classes, sizes, pixels, and unreadable files.")
    parser.add_argument(
        "--all", action="store_true", help="read every picture, not a sample of them, and list the unreadable ones"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table: one object per data set")
    options = parser.parse_all(argv)
    paths, overrides = _told(options.words)
    recipes = [recipe_of(what, overrides) for what in paths]
    from app.tasks.image_classification.data import inspect

    unreadable = 0
    for recipe in recipes:
        facts = inspect.inspect(recipe, everything=options.all, processes=options.processes)
        sys.stdout.write(json.dumps(facts) + "\n" if options.json else inspect.as_text(facts))
        unreadable += sum(len(told["unreadable"]) for told in facts.values() if isinstance(told, dict))
    return DataError.exit_code if unreadable else 0


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
    parser.add_argument("--longer", action="store_true", help="apply --max-side to the longer side")
    parser.add_argument("--quality", type=int, default=90, help="quality of shrunk JPEG and WebP files, 1..100 (default: 90)")
    options = parser.parse_all(argv)
    recipe = _one_recipe(options.words)
    problems = [
        f"{name} is {value}: it must be {limits[0]}..{limits[1]}"
        for name, value, limits in (("--quality", options.quality, (1, 100)), ("--max-side", options.max_side, (1, 65535)))
        if value is not None and not limits[0] <= value <= limits[1]
    ]
    if problems:
        raise RecipeError(*problems)
    from app.tasks.image_classification.data import pack

    shrinking = None
    if options.max_side is not None:
        shrinking = pack.Shrinking(options.max_side, longer=options.longer, quality=options.quality)
    keys, not_read = pack.pack(recipe, options.to, options.out, shrinking=shrinking, processes=options.processes)
    sys.stdout.write("".join(f"{line}\n" for line in [*not_read, f"written; a recipe reads it with {' '.join(keys)}"]))
    return 0


def _bench(argv: Sequence[str]) -> int:
    parser = _parser("bench", "Measure how many pictures per second can be loaded, and where the time goes.")
    parser.add_argument(
        "--images-per-s",
        type=above_zero,
        metavar="N",
        help="pictures per second that a device trains on; shows how many CPU cores it needs",
    )
    parser.add_argument("--seconds", type=above_zero, default=2.0, help="approximate time to measure each part (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_all(argv)
    recipe = _one_recipe(options.words)
    from dataclasses import asdict

    from app.tasks.image_classification.data import bench

    costs = bench.measure(recipe, seconds=options.seconds)
    needed = {} if options.images_per_s is None else {"cores_needed": costs.cores_for(options.images_per_s)}
    as_json = json.dumps({**asdict(costs), **needed}) + "\n"
    sys.stdout.write(as_json if options.json else bench.as_text(costs, options.images_per_s))
    return 0


def _parser(command: str, description: str) -> Parser:
    parser = Parser(prog=f"samerun data {command}", description=description)
    several = "WHAT ..." if command == "inspect" else "WHAT"
    parser.add_argument("words", nargs="+", metavar=f"{several} [key=value ...]", help=f"{_WHAT}; and recipe values")
    if command != "bench":
        count = host.usable(1)
        parser.add_argument(
            "--workers",  # as everywhere else; --processes is what it was called
            "--processes",
            dest="processes",
            metavar="N",
            type=positive,
            default=count,
            help=f"processes that read and decode (default: {count}, the CPU cores here)",
        )
    return parser


def _told(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is to be looked at and the overrides. Raises RecipeError if there is nothing to look at."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    paths = [word for word in words if word not in overrides]
    if not paths:
        raise RecipeError(f"nothing is given: give {_WHAT}")
    return paths, overrides


def _one_recipe(words: Sequence[str]) -> Recipe:
    paths, overrides = _told(words)
    if len(paths) > 1:
        raise RecipeError(f"{' and '.join(paths)} are given: give one")
    return recipe_of(paths[0], overrides)
