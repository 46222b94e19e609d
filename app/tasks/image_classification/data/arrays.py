"""Splits whose images have one size and are looked up, not decoded: arrays in memory or in files that all processes share.

`fetch` is one look-up for the whole batch: 5-10 us for 128 of 60,000 images of 28x28. A split on disk is a folder:

    images.npy    uint8 [N, C, H, W]
    labels.npy    int64 [N]
    split.json    the names of the classes, and the fingerprint of both arrays

Opened, the files are mapped: the system reads what is looked at, once for all processes, and takes the memory back when it
needs it.

Unpacked, decoded or resized splits are made once on a machine and then shared, as are the indexes of shards: below
$SAMERUN_CACHE, $XDG_CACHE_HOME/samerun or ~/.cache/samerun. Each is named by a hash of what it was made of: of other files, or
of files that changed, another one is made. Nothing is removed: `rm -r` any of it at any time, it is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.data.data_files import reading
from app.data.draws import HostDraws
from app.data.preprocessing import cache_folder, one_process_per_node, progress
from app.data.samples import CHECK
from app.errors import DataError
from app.files import other_libraries
from app.files.atomic_files import made_whole, remove_remains, sync
from app.files.text_files import parsed
from app.tasks.image_classification.data.decoding import Framing
from app.tasks.image_classification.data.images import (
    Data,
    Images,
    NoSplitError,
    StoredImage,
    check_labels,
    data_path,
    each_split,
    fingerprint,
    same_classes,
)
from app.tasks.image_classification.sections import Sections

IMAGES, LABELS, ABOUT = "images.npy", "labels.npy", "split.json"
FORMAT = 1
"""Version of this layout, in split.json."""
CHUNK_BYTES = 4 << 20
"""Images that are read, resized or written at a time, which bounds the memory for building a split of any size."""
SMALL_BYTES = 8 << 20
"""Less than this is not worth a file: each process holds it in memory, in addition to the 200 MB that torch takes."""
DECODED_ONCE_BYTES = 256 << 20
"""A split whose images take at most this many bytes is decoded once on a machine and kept: MNIST and CIFAR are (47 and 154 MB;
it takes some seconds), ImageNet is not."""


class Mapped:
    """An array, in memory or mapped from an .npy file; pickled, a mapped one is its path, not its content."""

    def __init__(self, array: np.ndarray, path: Path | None = None) -> None:
        self.array = array
        self.path = path

    @classmethod
    def from_npy(cls, path: Path) -> Mapped:
        """Return the array in an .npy file. Raises as `numpy.load`."""
        # A plain view: NumPy's memmap runs Python code at each look-up, for some microseconds.
        return cls(np.asarray(other_libraries.array(path)), path)

    def __reduce__(self) -> tuple[Callable[..., Mapped], tuple[Any, ...]]:
        return (Mapped, (self.array,)) if self.path is None else (Mapped.from_npy, (self.path,))


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayImages(Images):
    """Images of one size in an array: batches are looked up."""

    workers: ClassVar[bool] = False
    is_array: ClassVar[bool] = True
    pixels: Mapped
    """uint8 [N, C, H, W]."""

    def fetch(self, indices: np.ndarray, draw: HostDraws | None) -> dict[str, Tensor]:  # noqa: ARG002  nothing is random
        """Return images and labels, as `Images.fetch` describes."""
        assert self.labels is not None
        # NumPy's look-up stays in this thread: torch's waits for its pool, for a millisecond when other processes are busy.
        images, labels = self.pixels.array.take(indices, axis=0), self.labels.take(indices).astype(np.int64)
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}


def in_array(pixels: Mapped, labels: np.ndarray, classes: Sequence[str], where: str = "") -> ArrayImages:
    """Return a split in an array, uint8 [N, C, H, W], with integer labels [N].

    The fingerprint is of the shape, the classes, all labels, and the pixels of some images.
    """
    array, shape = pixels.array, pixels.array.shape
    start = str(shape).encode()
    return ArrayImages(
        read=functools.partial(_read, pixels),
        size=len(array),
        labels=labels,
        classes=tuple(classes),
        where=where,
        channels=int(shape[1]),
        image_size=(int(shape[2]), int(shape[3])),
        fingerprint=fingerprint(classes, len(array), lambda index: start + array[index].tobytes(), listing=[labels]),
        pixels=pixels,
    )


def _read(pixels: Mapped, indices: Sequence[int]) -> Iterator[StoredImage]:
    for index in indices:
        yield StoredImage(torch.from_numpy(pixels.array[index].copy()), f"sample {index}")


def framed(images: ArrayImages, *, recipe: Sections, training: bool, made_of: Sequence[object]) -> Images:
    """Return a split as the recipe asks for it, its labels checked; `made_of` tells it from any other (`decoded_once`).

    Raises DataError if a label belongs to no class, or there are no samples.
    """
    assert images.labels is not None
    check_labels(images.labels, len(images.classes), where=images.where)
    framing = Framing.of(recipe, training=training)
    size = framing.size_of(images.image_size)
    if size == images.image_size and framing.resize_size is None and framing.min_area is None:
        return images
    unchanged = {field.name: getattr(images, field.name) for field in fields(Images)}
    return Images(**{**unchanged, "image_size": size, "framing": framing, "made_of": tuple(made_of)})


def decoded_once(images: Images) -> Images:
    """Return images that are not too many as arrays, decoded, resized to their size and kept; others unchanged.

    Those that are cropped at random stay as they are.
    Raises DataError if an image cannot be read, or the arrays cannot be kept.
    """
    labels, shape, framing = images.labels, (len(images), images.channels, *images.image_size), images.framing
    size_bytes = int(np.prod(shape, dtype=np.int64))
    if images.made_of is None or labels is None or framing.min_area is not None or size_bytes > DECODED_ONCE_BYTES:
        return images

    def chunks() -> Iterator[np.ndarray]:
        step = chunk_rows(shape)
        with progress("decoding the images once", shape[0], "images") as advance:
            for start in range(0, shape[0], step):
                indices = np.arange(start, min(start + step, shape[0]))
                try:
                    yield images.fetch(indices, None)["images"].numpy()
                except DataError as error:
                    raise DataError(f"{error}. {CHECK}") from error
                advance(len(indices))

    made_of = [*images.made_of, images.fingerprint, images.channels, framing.image_size, framing.resize_size]
    made_of += [framing.interpolation] * (framing.interpolation != "bilinear")
    kept = keep(made_of, size_bytes, lambda: Unstored(shape, chunks(), labels, images.classes))
    return replace(kept, where=images.where, fingerprint=images.fingerprint)


class Unstored(NamedTuple):
    """A split that is being read or made, chunk by chunk."""

    shape: tuple[int, ...]
    """[N, C, H, W] of all images."""
    chunks: Iterable[np.ndarray]
    """The images in order, in chunks uint8 [n, C, H, W]."""
    labels: np.ndarray
    classes: Sequence[str]


def chunk_rows(shape: tuple[int, ...]) -> int:
    """Return how many images of a split [N, C, H, W] make about CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES // max(1, int(np.prod(shape[1:], dtype=np.int64))))


def write_split(folder: Path, split: Unstored) -> None:
    """Write a split into `folder`, which is made if it does not exist. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / IMAGES).open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False, "shape": split.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in split.chunks:
            assert chunk.dtype == np.uint8, chunk.dtype
            file.write(np.ascontiguousarray(chunk).data)
    np.save(folder / LABELS, split.labels.astype(np.int64))
    written = in_array(Mapped.from_npy(folder / IMAGES), other_libraries.array(folder / LABELS), split.classes)
    about = {"format": FORMAT, "fingerprint": written.fingerprint, "classes": list(split.classes)}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    for name in (IMAGES, LABELS, ABOUT):
        sync(folder / name)


def open_split(folder: Path, remedy: str = "pack it again, or correct data.path") -> ArrayImages:
    """Return the split in a folder, mapped. Raises DataError if a file is missing or has changed."""
    try:
        about = parsed((folder / ABOUT).read_bytes())
        labels = np.asarray(other_libraries.array(folder / LABELS))
        images = in_array(Mapped.from_npy(folder / IMAGES), labels, about["classes"], str(folder))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder} is not a complete split of arrays ({error}); {remedy}") from error
    if images.fingerprint != about["fingerprint"]:
        raise DataError(f"{folder} has changed since it was written (its fingerprint differs); {remedy}")
    return images


def keep(made_of: Sequence[object], size_bytes: int, read: Callable[[], Unstored]) -> ArrayImages:
    """Return the split that `read` reads or makes: in memory if it is small, else from the cache, as `cached` keeps it.

    `size_bytes` is about what the images take. Raises DataError if the split cannot be read, or not be written to the cache.
    """
    if size_bytes <= SMALL_BYTES:
        small = read()
        array = np.concatenate([np.empty((0, *small.shape[1:]), np.uint8), *small.chunks])
        return in_array(Mapped(array), small.labels, small.classes)
    folder = cached("splits", made_of, lambda temporary: write_split(temporary, read()))
    return open_split(folder, "remove this folder, and it is made again")


def cached(kind: str, made_of: Sequence[object], make: Callable[[Path], None]) -> Path:
    """Return a folder of this user's cache that `make` has filled: once on a machine.

    `made_of` is all that decides what `make` writes, as JSON has it (see `stamps`). Raises DataError if the cache cannot be
    used, and what `make` raises.
    """
    name = hashlib.sha256(json.dumps([FORMAT, *made_of], default=str).encode()).hexdigest()[:32]
    try:
        folder = cache_folder(kind) / name
        made_once(folder, make)
    except OSError as error:
        cache = f"{error.filename or '$SAMERUN_CACHE'}, the cache for unpacked data, cannot be used"
        raise DataError(f"{cache} ({error.strerror or error}); set SAMERUN_CACHE to a writable folder") from error
    return folder


def made_once(folder: Path, make: Callable[[Path], None]) -> None:
    """Have one process of the node fill `folder` while the others wait, unless it exists: whole or not at all. Raises OSError.

    `make` is given an empty folder, which then gets the name.
    """
    if folder.exists():  # without the lock: the disk may be read-only
        return
    with one_process_per_node(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():
            return
        remove_remains(folder)
        # Where there are no locks, another process may have been first.
        with suppress(FileExistsError), made_whole(folder) as temporary:
            make(temporary)


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return what tells that files are still the same without reading them: path, size in bytes, time of change in ns."""
    found = []
    for file in files:
        with reading(file, "replace the file"):
            status = file.stat()
        found.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    return found


def open_arrays(recipe: Sections) -> Data:
    """Open what `samerun data pack --to arrays` wrote: data.path/<split>."""
    root = data_path(recipe)

    def opened(name: str, _key: str) -> ArrayImages:
        if not (root / name).is_dir():
            raise NoSplitError(f"{root / name} is missing, so this is not a complete split of arrays: pack it again")
        return open_split(root / name)

    splits = each_split(recipe.data, opened)
    same_classes({images.where: images.classes for images in splits.values()})
    return {
        split: framed(images, recipe=recipe, training=split == "train", made_of=stamps(sorted(Path(images.where).iterdir())))
        for split, images in splits.items()
    }
