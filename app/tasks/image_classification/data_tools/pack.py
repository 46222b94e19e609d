"""`samerun data pack`: converts a recipe's data to another format, or shrinks its pictures.

Samples keep their order, labels and classes, so that each keeps its number, except in an image folder, which numbers its
samples by class and name. All is written under a temporary name and renamed at the end.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from app.data.many import in_order
from app.data.progress import progress
from app.errors import DataError, RecipeError
from app.files.whole import made_whole
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.decoded import reader_of
from app.tasks.image_classification.data.folders import FileReader
from app.tasks.image_classification.data.open import OPEN, Data, open_stored
from app.tasks.image_classification.data.pictures import Reader, format_of
from app.tasks.image_classification.data.source import Source
from app.tasks.image_classification.data.split import Unstored, pictures_in_a_chunk, write_split
from app.tasks.image_classification.data.split_names import VALIDATION_NAMES
from app.tasks.image_classification.data.stage import located
from app.tasks.image_classification.data.writers import WRITERS, Record

_PIECE = 32
# Decoders of JPEG can halve the sides on the way, which saves most of the time for large photographs; from twice the wanted
# size the resampling filter still decides what is kept.
_DRAFT_MARGIN = 2
# What is shrunk stays in its format where that is one of these, and becomes PNG, which loses nothing, otherwise.
_KEPT_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")


@dataclass(frozen=True)
class Shrinking:
    """How pictures are made smaller; none is ever made larger, and a file that is small enough stays as it is."""

    max_side: int
    """Pixels that the side may have."""
    longer: bool = False
    """Whether the longer side is meant; the shorter one otherwise, which is what crops are taken of."""
    quality: int = 90
    """Of JPEG and WebP, 1..100."""


@dataclass(frozen=True)
class Packing:
    """What is asked of a pack."""

    to: str
    """imagefolder, arrays, or a name of `writers.WRITERS`."""
    out: Path
    shrinking: Shrinking | None = None
    processes: int = 1


def pack(recipe: Recipe, asked: Packing) -> tuple[str, ...]:
    """Write both splits of a recipe's data and return the recipe values that read what was written, `key=value` each.

    Raises DataError if the folder already exists, cannot be written, or the data cannot be read, RecipeError if pictures are to
    become arrays, and no size is given for them.
    """
    if asked.out.exists() or asked.out.is_symlink():
        raise DataError(f"{asked.out} already exists, and pack replaces no files: choose another --out, or remove it")
    data = _open(recipe, asked)
    names = _names(recipe, data)
    try:
        with made_whole(asked.out) as temporary:
            for split, source in data.there.items():
                name = names[split]
                if asked.to == "arrays":
                    _write_arrays(temporary / name, source, asked)
                elif asked.to == "imagefolder":
                    _write_folder(temporary / name, source, asked)
                else:
                    WRITERS[asked.to](temporary, name, source.classes, _records(source, asked))
            os.sync()
    except OSError as error:
        raise DataError(
            f"{asked.out} cannot be written: {error.strerror or error}. Free space there, or choose another folder"
        ) from error
    return (
        f"data.source={asked.to}",
        f"data.path={asked.out}",
        *(f"data.{split}_split={name}" for split, name in names.items()),
    )


def _names(recipe: Recipe, data: Data) -> dict[str, str]:
    """Return the names of the splits that are written: their own, unless one is a slice such as `train[:90%]`, or a pattern."""
    own = {
        split: getattr(recipe.sections.data, f"{split}_split") or _usual_name(split, source)
        for split, source in data.there.items()
    }
    is_plain = all(name.isidentifier() for name in own.values()) and len(set(own.values())) == len(own)
    return own if is_plain else {split: split for split in own}


def _usual_name(split: str, source: Source) -> str:
    """Return what a split is called that the recipe does not name: as its folder is, if that is one of its usual names."""
    reader = reader_of(source)
    name = reader.folder.name if isinstance(reader, FileReader) else split
    return name if name in VALIDATION_NAMES else split


def _open(recipe: Recipe, asked: Packing) -> Data:
    if asked.to != "arrays":
        return open_stored(recipe.sections)
    if asked.shrinking is not None:
        raise RecipeError(
            "--max-side is for formats that hold files; for arrays set data.image_size=N, the size of all pictures"
        )
    augment = replace(recipe.sections.augment, resized_crop_min_area=None)
    return OPEN[recipe.sections.data.source](located(replace(recipe.sections, augment=augment)))


def _write_arrays(folder: Path, source: Source, asked: Packing) -> None:
    shape = (len(source), source.channels, *source.image_size)
    labels = np.zeros(len(source), np.int64)

    def fetch(piece: range) -> tuple[np.ndarray, np.ndarray]:
        indices = np.arange(piece.start, piece.stop)
        batch = source.fetch(indices, None)
        return batch["images"].numpy(), batch["labels"].numpy()

    def chunks() -> Iterator[np.ndarray]:
        done = 0
        step = min(1000, pictures_in_a_chunk(shape))
        with progress("packing", len(source), "pictures") as advance:
            for images, targets in in_order(fetch, len(source), piece=step, processes=asked.processes):
                labels[done : done + len(images)] = targets
                done += len(images)
                advance(len(images))
                yield images

    write_split(folder, Unstored(shape, chunks(), labels, source.classes))


def _write_folder(folder: Path, source: Source, asked: Packing) -> None:
    reader = reader_of(source)
    for name in source.classes:
        (folder / _file_name(name)).mkdir(parents=True)
    for index, (content, label) in enumerate(stored_files(source, asked)):
        if isinstance(reader, FileReader):
            place = folder / reader.files.path(index)
            place.parent.mkdir(parents=True, exist_ok=True)
        else:
            place = folder / _file_name(source.classes[label]) / f"{index:08d}.{extension_of(content)}"
        place.write_bytes(content)


def _records(source: Source, asked: Packing) -> Iterator[Record]:
    reader = reader_of(source)
    for index, (content, label) in enumerate(stored_files(source, asked)):
        key = str(Path(reader.files.path(index)).with_suffix("")) if isinstance(reader, FileReader) else f"{index:08d}"
        yield Record(key, content, extension_of(content), label)


def _file_name(class_name: str) -> str:
    return class_name.replace(os.sep, "_")


def stored_files(source: Source, asked: Packing) -> Iterator[tuple[bytes, int]]:
    """Yield each sample's picture file, shrunk where that is asked for, and label; pixels become a PNG. Raises DataError."""
    reader, shrinking = reader_of(source), asked.shrinking

    def read(piece: range) -> list[tuple[bytes, int]]:
        samples = []
        for index in piece:
            content, label = _stored(reader, index)
            samples.append((shrunk(content, shrinking, name=f"sample {index}") if shrinking else content, label))
        return samples

    with progress("packing", len(source), "pictures") as advance:
        for samples in in_order(read, len(source), piece=_PIECE, processes=asked.processes):
            yield from samples
            advance(len(samples))


def _stored(reader: Reader, index: int) -> tuple[bytes, int]:
    file = reader.file(index)
    if file is not None and reader.labels is not None:
        return file, int(reader.labels[index])
    ((picture, label),) = reader([index])
    if len(picture) not in (1, 3):
        raise DataError(
            f"sample {index} has {len(picture)} channels, which no picture format stores without loss: use --to arrays"
        )
    pixels = picture.permute(1, 2, 0).numpy()
    content = io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(picture) == 1 else pixels).save(content, "PNG")
    return content.getvalue(), label


def shrunk(content: bytes, shrinking: Shrinking, *, name: str) -> bytes:
    """Return a picture's file with its side brought down to the limit; the same bytes where it is small enough already.

    The format stays. Colours become what training would decode: RGB or grayscale, without transparency. Raises DataError.
    """
    try:
        with Image.open(io.BytesIO(content)) as picture:
            side = (max if shrinking.longer else min)(picture.size)
            if side <= shrinking.max_side:
                return content
            width, height = (max(1, round(length * shrinking.max_side / side)) for length in picture.size)
            kind = picture.format if picture.format in _KEPT_FORMATS else "PNG"
            picture.draft(None, (_DRAFT_MARGIN * width, _DRAFT_MARGIN * height))
            if picture.mode == "P" and "transparency" in picture.info:
                plain = picture.convert("RGBA").convert("RGB")
            else:
                plain = picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB")
            written = io.BytesIO()
            plain.resize((width, height), Image.Resampling.LANCZOS).save(written, kind, quality=shrinking.quality)
            return written.getvalue()
    except Exception as error:  # each of Pillow's decoders has its own
        raise DataError(f"{name} cannot be read as an image ({type(error).__name__}: {error}); replace or remove it") from error


def extension_of(content: bytes) -> str:
    """Return the usual extension, without the dot, of a picture's file: jpg, png, ... Raises DataError if it is none."""
    kind = format_of(content)
    if kind is None:
        raise DataError("a file is not a picture: `samerun data inspect --all` lists all unreadable files")
    return {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
