"""`samerun data pack`: converts a recipe's data to another format, and shrinks its images.

Samples keep their order, labels and classes, so that each keeps its number. All is written under a temporary name and renamed
at the end. Libraries are imported where they are used.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from app.data.data_files import first_line, new_folder
from app.data.preprocessing import in_order, progress
from app.errors import DataError, RecipeError
from app.files.other_libraries import extra
from app.recipe.schema import Recipe
from app.tasks.image_classification.data import containers
from app.tasks.image_classification.data.arrays import Unstored, chunk_rows, write_split
from app.tasks.image_classification.data.decoding import IMAGE_SUFFIXES, as_pillow, converted, is_gray, is_large, opened
from app.tasks.image_classification.data.images import Images
from app.tasks.image_classification.data.open import located, not_read, open_stored, open_undecoded
from app.tasks.image_classification.data.shards import TAR_CLASSES, TAR_LABEL

SHARD_BYTES = 1 << 30
"""Approximate size of a shard: large enough to read efficiently, and a thousandth of a large data set."""
_BATCH = 128
"""Samples in memory before they are written."""
_HDF5_CHUNK = 64
"""Rows per chunk; reading one row reads its whole chunk."""
_LMDB_BYTES = 1 << 40
"""Largest size of a database; it reserves address space only."""
_PIECE = 32
# Decoders of JPEG can halve the sides on the way, which saves most of the time for large photographs; from twice the wanted
# size the resampling filter still decides what is kept.
_DRAFT_MARGIN = 2
# What is shrunk stays in its format where that is one of these, and becomes PNG, which loses nothing, otherwise.
_KEPT_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
_QUALITY = 90
"""Quality of shrunk JPEG and WebP files, 1..100."""
Sample = tuple[bytes, int]
"""An image file and its label."""


def pack(recipe: Recipe, to: str, out: Path, *, max_side: int | None, processes: int) -> tuple[list[str], list[str]]:
    """Write all splits of a recipe's data; return the recipe values that read them, `key=value` each, and what was not read.

    Images whose shorter side has more than `max_side` pixels are shrunk to it.
    Raises DataError if the folder already exists, cannot be written, or the data cannot be read, RecipeError if images are to
    become arrays, and no size is given for them.
    """
    with new_folder(out) as temporary:
        if to == "arrays":
            if max_side is not None:
                raise RecipeError("--max-side is for formats that hold files; for arrays set data.image_size=N")
            augment = replace(recipe.sections.augment, resized_crop_min_area=None)
            data = open_undecoded(located(replace(recipe.sections, augment=augment)))
        else:
            data = open_stored(recipe.sections)
        for split, source in data.items():
            if to == "arrays":
                _write_arrays(temporary / split, source, processes)
            else:
                WRITERS[to](temporary, split, source.classes, stored_files(source, max_side, processes))
        os.sync()
    splits = [f"data.{split}_split={split}" for split in data]
    return [f"data.source={'huggingface' if to == 'parquet' else to}", f"data.path={out}", *splits], not_read(data)


def _write_arrays(folder: Path, source: Images, processes: int) -> None:
    shape = (len(source), source.channels, *source.image_size)
    labels = source.labels
    if labels is None:
        labels = np.array([label for _, label in source.images(range(len(source)))])

    def fetch(piece: range) -> np.ndarray:
        return source.fetch(np.arange(piece.start, piece.stop), None)["images"].numpy()

    def chunks() -> Iterator[np.ndarray]:
        with progress("packing", len(source), "images") as advance:
            for images in in_order(fetch, len(source), piece=chunk_rows(shape), processes=processes):
                advance(len(images))
                yield images

    write_split(folder, Unstored(shape, chunks(), labels, source.classes))


def write_webdataset(
    folder: Path, split: str, classes: Sequence[str], samples: Iterable[Sample], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `split-000000.tar` and so on; keys of the samples are their numbers."""

    def numbered() -> Iterator[tuple[int, int, Sample]]:
        shard, size_bytes = 0, 0
        for index, sample in enumerate(samples):
            if size_bytes >= shard_bytes:
                shard, size_bytes = shard + 1, 0
            size_bytes += len(sample[0])
            yield shard, index, sample

    def add(name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))

    for shard, group in itertools.groupby(numbered(), lambda entry: entry[0]):
        with tarfile.open(folder / f"{split}-{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            add(TAR_CLASSES, json.dumps(list(classes)).encode())
            for _, index, (content, label) in group:
                with opened(content, f"sample {index}") as image:
                    kind = image.format or ""
                extension = {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
                if f".{extension}" not in IMAGE_SUFFIXES:
                    known = ", ".join(IMAGE_SUFFIXES)
                    raise DataError(f"sample {index} is a {kind} file; WebDataset's images are {known}: use another --to")
                add(f"{index:08d}.{extension}", content)
                add(f"{index:08d}.{TAR_LABEL}", str(label).encode())


def write_parquet(folder: Path, split: str, classes: Sequence[str], samples: Iterable[Sample]) -> None:
    """Write `split.parquet`, as the `datasets` library does: columns `image` and `label`."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))})
    with pyarrow.parquet.ParquetWriter(folder / f"{split}.parquet", features.arrow_schema) as file:
        for rows in _batches(samples):
            columns = [[{"bytes": content, "path": None} for content, _ in rows], [label for _, label in rows]]
            file.write_table(pyarrow.table(columns, schema=features.arrow_schema))


def write_hdf5(folder: Path, split: str, classes: Sequence[str], samples: Iterable[Sample]) -> None:
    """Write `split.h5`."""
    with extra("writing HDF5"):
        import h5py
    with h5py.File(folder / f"{split}.h5", "w") as file:
        file.create_dataset(containers.HDF5_CLASSES, data=[os.fsencode(name) for name in classes], dtype=h5py.string_dtype())
        images, labels = (
            file.create_dataset(name, (0,), kind, maxshape=(None,), chunks=(_HDF5_CHUNK,))
            for name, kind in ((containers.HDF5_IMAGES, h5py.vlen_dtype(np.uint8)), (containers.HDF5_LABELS, np.int64))
        )
        for rows in _batches(samples):
            size = len(labels)
            images.resize(size + len(rows), axis=0)
            labels.resize(size + len(rows), axis=0)
            for number, (content, _) in enumerate(rows, size):  # together, files of one size would be taken for a matrix
                images[number] = np.frombuffer(content, np.uint8)
            labels[size:] = [label for _, label in rows]


def write_lmdb(folder: Path, split: str, classes: Sequence[str], samples: Iterable[Sample]) -> None:
    """Write the folder `split.lmdb`."""
    with extra("writing LMDB"):
        import lmdb
    labels: list[int] = []
    try:
        with lmdb.open(str(folder / f"{split}.lmdb"), map_size=_LMDB_BYTES, lock=False) as environment:
            for rows in _batches(samples):
                with environment.begin(write=True) as transaction:
                    for content, label in rows:
                        transaction.put(containers.lmdb_key(len(labels)), content, append=True)
                        labels.append(label)
            with environment.begin(write=True) as transaction:
                transaction.put(containers.LMDB_LABELS, np.array(labels, containers.LMDB_LABEL_TYPE).tobytes())
                transaction.put(containers.LMDB_LENGTH, str(len(labels)).encode())
                transaction.put(containers.LMDB_CLASSES, json.dumps(list(classes)).encode())
    except lmdb.Error as error:  # such as a full disk
        raise OSError(first_line(error)) from error


WRITERS: dict[str, Callable[[Path, str, Sequence[str], Iterable[Sample]], None]] = {
    "webdataset": write_webdataset,
    "parquet": write_parquet,
    "hdf5": write_hdf5,
    "lmdb": write_lmdb,
}
"""Functions that write a split into a folder, given its name, classes and samples, by the value of --to."""


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while rows := list(itertools.islice(iterator, _BATCH)):
        yield rows


def stored_files(source: Images, max_side: int | None, processes: int) -> Iterator[Sample]:
    """Yield each sample's image file, shrunk to `max_side`, and label; pixels become a PNG. Raises DataError."""

    def read(piece: range) -> list[Sample]:
        return [_sample(source, index, max_side) for index in piece]

    with progress("packing", len(source), "images") as advance:
        for samples in in_order(read, len(source), piece=_PIECE, processes=processes):
            yield from samples
            advance(len(samples))


def _sample(source: Images, index: int, max_side: int | None) -> Sample:
    stored = source.stored(index)
    if isinstance(content := stored.value, bytes):
        assert source.labels is not None
        label = int(source.labels[index])
    else:
        ((image, label),) = source.images([index])
        if len(image) not in (1, 3):
            raise DataError(f"sample {index} has {len(image)} channels, which image files do not store: use --to arrays")
        written = io.BytesIO()
        as_pillow(image).save(written, "PNG")
        content = written.getvalue()
    return shrunk(content, max_side, name=stored.name), label


def shrunk(content: bytes, max_side: int | None, *, name: str) -> bytes:
    """Return an image file with its shorter side shrunk to `max_side` pixels; the same bytes if it is small enough, or None.

    The format stays. Colours become what training would decode: RGB or grayscale, without transparency. Raises DataError.
    """
    with opened(content, name) as image:
        side = min(image.size)
        if max_side is None or side <= max_side:
            return content
        width, height = (max(1, round(length * max_side / side)) for length in image.size)
        kind = image.format if image.format in _KEPT_FORMATS else "PNG"
        least = 1 + is_large(image)
        draft = (min(_DRAFT_MARGIN * width, image.width // least), min(_DRAFT_MARGIN * height, image.height // least))
        image.draft(None, draft)
        plain = converted(image, "L" if is_gray(image) else "RGB")
        written = io.BytesIO()
        plain.resize((width, height), Image.Resampling.LANCZOS).save(written, kind, quality=_QUALITY)
        return written.getvalue()
