"""`samerun data inspect|pack`: show what a data set of images contains, or convert it to another format."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from app.data.data_files import is_hidden
from app.data.preprocessing import in_order, progress
from app.environment import host
from app.errors import DataError, RecipeError
from app.options import Parser, positive
from app.recipe import recipe_file
from app.recipe.schema import Recipe

if TYPE_CHECKING:
    from app.tasks.image_classification.data.images import Images

FORMATS = ("webdataset", "parquet", "arrays", "hdf5", "lmdb")
"""Formats that `pack` writes."""
_WHAT = "recipe (also as --recipe NAME), or folder or file of data, whose kind is detected unless data.source=KIND is given"
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
_SAMPLED = 512
"""Images examined per split, unless --all is given."""
_PIECE = 16
_LISTED_CLASSES = 20


def main(argv: Sequence[str]) -> int:
    """Run `samerun data` with these arguments and return its exit code. Raises SamerunError."""
    return {"inspect": _inspect, "pack": _pack}[argv[0]](argv[1:])


def recipe_of(words: Sequence[str], *, any_task: bool = False) -> Recipe:
    """Return the recipe that the words name, with their overrides, or one for the data in a folder or file.

    Raises RecipeError if it is neither, wrong, or of another task (without `any_task`), and DataError if the kind of data is
    not recognized.
    """
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    named = [word for word in words if word not in overrides]
    if len(named) != 1:
        raise RecipeError(f"{' and '.join(named) or 'nothing'} is given: give one of these: {_WHAT}")
    what, path = named[0], Path(named[0])
    if what in recipe_file.names() or path.suffix in (".yaml", ".yml"):
        recipe = recipe_file.load(what, overrides).recipe
        if recipe.task != "image_classification" and not any_task:
            raise RecipeError(f"{what} is a recipe for the task {recipe.task}, and this command is for images")
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
    from app.tasks.image_classification.data.decoding import IMAGE_SUFFIXES

    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.glob("*/*")):  # class folders without folders for splits
        return "imagefolder"
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in path.glob("*")):
        raise DataError(f"{path} contains images, and no class folders: put each image into {path}/<class>/")
    raise DataError(f"{path} contains no data of a known kind; give data.source=KIND ({', '.join(_PATTERNS)})")


def _inspect(argv: Sequence[str]) -> int:
    parser = make_parser("inspect", "Show what a data set contains: samples, classes, sizes, pixels, and unreadable files.")
    parser.add_argument("--all", action="store_true", help="read every image, not only some, and list the unreadable ones")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_all(argv)
    sections = recipe_of(options.words).sections
    from app.tasks.image_classification.data.images import spread
    from app.tasks.image_classification.data.open import not_read, open_stored

    data, splits = open_stored(sections), {}
    for split, images in data.items():
        indices = range(len(images)) if options.all else spread(len(images), _SAMPLED)

        def examine(piece: range, images: Images = images, indices: Sequence[int] = indices) -> list[Examined | str]:
            return [_examined(images, indices[position]) for position in piece]

        found: list[Examined | str] = []
        with progress(f"reading {split}", len(indices), "images") as advance:
            for some in in_order(examine, len(indices), piece=_PIECE, processes=options.processes):
                found += some
                advance(len(some))
        facts = _facts(images, [one for one in found if isinstance(one, Examined)])
        splits[split] = {**facts, "looked_at": len(indices), "unreadable": [one for one in found if isinstance(one, str)]}
    source = {"source": sections.data.source, "path": sections.data.path, "not_read": not_read(data)}
    sys.stdout.write(json.dumps(source | splits) + "\n" if options.json else _as_text(source, splits))
    return DataError.exit_code if any(facts["unreadable"] for facts in splits.values()) else 0


class Examined(NamedTuple):
    """An image that was read."""

    format: str
    stored_bytes: int
    height: int
    width: int
    histogram: np.ndarray
    """Share of the pixels with each value, by channel: float64 [C, 256]."""


def _examined(images: Images, index: int) -> Examined | str:
    """Return an image's facts, or the error if it cannot be read."""
    from app.tasks.image_classification.data.decoding import opened

    try:
        stored = images.stored(index)
        image = stored.image(images.channels)
        (height, width), file = image.shape[1:], stored.value
        kind, size_bytes = "pixels", image.numel()
        if isinstance(file, bytes):
            with opened(file, stored.name) as header:  # whose size is right for a large one, which is decoded smaller
                kind, size_bytes, (width, height) = header.format or "unknown", len(file), header.size
    except DataError as error:
        return str(error)
    counts = np.stack([np.bincount(channel, minlength=256) for channel in image.flatten(1).numpy()])
    return Examined(kind, size_bytes, height, width, counts / image[0].numel())


def _facts(images: Images, examined: list[Examined]) -> dict[str, Any]:
    facts: dict[str, Any] = {"samples": len(images), "classes": len(images.classes)}
    if images.labels is not None:
        counts = np.bincount(images.labels, minlength=len(images.classes)).tolist()
        facts["samples_by_class"] = dict(zip(images.classes, counts, strict=True))
    if examined:
        channels = sorted({len(image.histogram) for image in examined})
        sizes = {"height_px": [image.height for image in examined], "width_px": [image.width for image in examined]}
        facts |= {
            "stored_as": dict(Counter(image.format for image in examined)),
            "stored_bytes": round(np.mean([image.stored_bytes for image in examined]) * len(images)),
            "channels": channels,
            **{name: {"min": min(of), "median": int(np.median(of)), "max": max(of)} for name, of in sizes.items()},
        }
        if len(channels) == 1:
            shares, values = np.mean([image.histogram for image in examined], 0), np.arange(256) / 255
            mean = shares @ values
            variance = (shares * (values - mean[:, None]) ** 2).sum(1)
            facts |= {"mean": mean.round(4).tolist(), "std": np.sqrt(variance).round(4).tolist()}
    return facts | {"decoded": images.workers, "fingerprint": images.fingerprint}


_WORDS = {"looked_at": "images read", "stored_as": "format", "stored_bytes": "size (bytes)", "decoded": "decoded each time"}
"""Words of the table for keys of the JSON output; other keys are printed unchanged."""


def _as_text(source: dict[str, Any], splits: dict[str, dict[str, Any]]) -> str:
    """Return the facts as a table with a column for each split, and what is wrong below it."""
    names = dict.fromkeys(name for facts in splits.values() for name in facts if name not in ("samples_by_class", "unreadable"))
    rows = [["", *splits], *([_WORDS.get(it, it), *(_word(facts.get(it)) for facts in splits.values())] for it in names)]
    by_class = [facts.get("samples_by_class", {}) for facts in splits.values()]
    listed = list(by_class[0])[:_LISTED_CLASSES]
    rows += [[f"  class {name}".replace("\n", r"\n"), *(str(counts.get(name, 0)) for counts in by_class)] for name in listed]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"data.source={source['source']}" + (f" data.path={source['path']}" if source["path"] else "")]
    lines += ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(by_class[0]) > len(listed):
        lines.append(f"  and {len(by_class[0]) - len(listed)} more classes (--json lists all)")
    lines += source["not_read"]
    unreadable = [f"unreadable in {split}: {text}" for split, facts in splits.items() for text in facts["unreadable"]]
    lines += [line.replace("\n", r"\n") for line in unreadable]
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, str):
        return value[:16]  # of a fingerprint: the rest is in --json
    return f"{value:,}" if type(value) is int else {True: "yes", False: "no"}[value] if type(value) is bool else str(value)


def _pack(argv: Sequence[str]) -> int:
    parser = make_parser("pack", "Convert images to another format, or shrink them. Numbers, labels and classes stay the same.")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format to write")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="folder to create; no file is ever replaced")
    parser.add_argument("--max-side", type=positive, metavar="PIXELS", help="longest shorter side of images, to shrink them")
    options = parser.parse_all(argv)
    recipe = recipe_of(options.words)
    from app.tasks.image_classification.data import pack

    keys, not_read = pack.pack(recipe, options.to, options.out, max_side=options.max_side, processes=options.processes)
    sys.stdout.write("".join(f"{line}\n" for line in [*not_read, f"written; a recipe reads it with {' '.join(keys)}"]))
    return 0


def make_parser(command: str, description: str) -> Parser:
    """Return the parser of `samerun data COMMAND`, without the command's own options."""
    parser = Parser(f"data {command}", description)
    parser.add_argument("words", nargs="+", metavar="RECIPE|PATH", help=f"{_WHAT}; and recipe values, key=value")
    count = host.usable(1)
    parser.add_argument("--workers", dest="processes", metavar="N", type=positive, default=count, help="processes that read "
        f"images (default: {count}, the CPU cores here)")  # fmt: skip
    return parser
