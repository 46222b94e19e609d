"""Image data sets for the tests: nine small images a split in every format, idx files, and what every source must do."""

from __future__ import annotations

import gzip
import io
import multiprocessing
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder

from app.data.draws import HostDraws
from app.errors import DataError
from app.tasks.image_classification.data.images import Data, Images
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.data.pack import WRITERS, Sample
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections

FORMATS = ["hdf5", "lmdb", "tfrecord", "webdataset"]
CLASSES = ("ant", "bee", "cat")
SIZES = [(40, 30), (31, 47), (25, 60)]  # width, height in pixels
FORK = multiprocessing.get_context("fork")

# Opening, and what every source must do


def recipe(source: str, path: Path | str | None = None, *, crop: float | None = None, **keys) -> Sections:
    data = DataRecipe(source=source, path=None if path is None else str(path), **keys)
    return Sections(data=data, augment=AugmentRecipe(resized_crop_min_area=crop))


def opened(source: str, path: Path, **keys) -> Data:
    return open_data(recipe(source, path, **{"image_size": 24, **keys}))


def refused(source: str, path: Path, sentence: str, **keys) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        everything(opened(source, path, **keys)["train"])
    assert "\n" not in str(caught.value)


def fetched(source: Images, indices: np.ndarray, samples: np.ndarray | None = None, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images and labels of samples with these numbers, which are those of the first epoch unless given."""
    images, labels = source.fetch(indices, HostDraws(seed, indices if samples is None else samples)).values()
    return images, labels


def everything(source: Images) -> tuple[Tensor, Tensor]:
    """Return all images and labels of the first epoch."""
    return fetched(source, np.arange(len(source)))


def check_same(found: Data, expected: Data) -> None:
    """All splits of both have the same images and labels."""
    for one, other in zip(found.values(), expected.values(), strict=True):
        assert [torch.equal(*pair) for pair in zip(everything(one), everything(other), strict=True)] == [True, True]


def check_workers_and_pickling(source: Images) -> None:
    """A forked worker and a pickled copy must fetch what this process does."""
    expected, answers = everything(source), FORK.Queue()
    worker = FORK.Process(target=lambda: answers.put([part.numpy() for part in everything(source)]))
    worker.start()
    copy = pickle.loads(pickle.dumps(source))
    for images, labels in (map(torch.from_numpy, answers.get(timeout=60)), everything(copy)):
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    worker.join()
    assert copy.fingerprint == source.fingerprint


def check_contract(source: Images) -> None:
    images, labels = everything(source)
    assert (images.dtype, labels.dtype, labels.shape) == (torch.uint8, torch.int64, (len(source),))
    assert images.shape == (len(source), source.channels, *source.image_size)
    assert images.is_contiguous()
    assert source.facts == {"classes": list(source.classes), "channels": source.channels, "image_size": [*source.image_size]}
    assert 0 <= int(labels.min()) <= int(labels.max()) < len(source.classes)
    picked = np.array([len(source) - 1, 0, 0])
    some, some_labels = fetched(source, picked)
    assert torch.equal(some, images[picked])
    assert torch.equal(some_labels, labels[picked])


# Image files, folders and containers


def file_of(width: int, height: int, *, seed: int, kind: str = "JPEG", mode: str = "RGB", **options) -> bytes:
    """Return the file of a smooth image, which JPEG keeps."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(content, kind, **options)
    return content.getvalue()


IMAGE = file_of(8, 8, seed=1)


def write_folder(root: Path, *, mode: str = "RGB") -> Path:
    """Write nine images a split: JPEG and PNG, of several sizes."""
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number, size in enumerate(SIZES):
                kind, extension = (("JPEG", "jpg"), ("PNG", "png"))[number % 2]
                content = file_of(*size, seed=10 * label + number + len(split), kind=kind, mode=mode)
                (root / split / name / f"{number}.{extension}").write_bytes(content)
    return root


def records(folder: Path) -> Iterator[Sample]:
    """Yield a split of an image folder, in its order."""
    for name, label in ImageFolder(str(folder)).samples:
        yield Path(name).read_bytes(), label


def pack(image_folder: Path, target: Path, source: str) -> Path:
    for split in ("train", "test"):
        write(source, target, split, CLASSES, list(records(image_folder / split)))
    return target


def write(source: str, target: Path, split: str, classes: Sequence[str], samples: list[Sample]) -> None:
    """Write a split in one of FORMATS."""
    target.mkdir(parents=True, exist_ok=True)
    if source != "tfrecord":
        WRITERS[source](target, split, classes, samples)
        return
    write_examples(target / f"{split}-00000-of-00001.tfrecord", samples, image="image/encoded", label="image/class/label")
    text = "".join(f"{number}:{name}\n" for number, name in enumerate(classes))
    (target / "labels.txt").write_text(text, encoding="utf-8", errors="surrogateescape")


def write_examples(path: Path, samples: list[Sample], *, image: str, label: str) -> None:
    from tfrecord.writer import TFRecordWriter  # here, as other tests do not need it

    writer = TFRecordWriter(str(path))
    for content, number in samples:
        writer.write({image: (content, "byte"), label: (number, "int"), "height": (3.5, "float")})
    writer.close()


def write_database(path: Path, samples: list[Sample], *, subdir: bool = True, **also: bytes) -> None:
    import lmdb  # here, as other tests do not need it

    with lmdb.open(str(path), map_size=1 << 24, subdir=subdir) as environment, environment.begin(write=True) as transaction:
        labels = np.array([label for _, label in samples], "<i8")
        values = {b"__labels__": labels.tobytes(), b"__len__": str(len(samples)).encode()}
        values |= {b"%08d" % index: content for index, (content, _) in enumerate(samples)}
        for key, value in (values | {name.encode(): value for name, value in also.items()}).items():
            transaction.put(key, value)


# MNIST


def write_idx(folder: Path, name: str, array: np.ndarray, *, compress: bool = False) -> Path:
    header = struct.pack(f">I{array.ndim}I", 0x800 | array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path = folder / (name + ".gz" if compress else name)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if compress else content)
    return path


def write_mnist(folder: Path, *, compress: bool = False, train_size: int = 30, test_size: int = 7) -> None:
    random = np.random.default_rng(train_size)
    for prefix, size in (("train", train_size), ("t10k", test_size)):
        write_idx(folder, f"{prefix}-images-idx3-ubyte", random.integers(0, 256, (size, 28, 28)), compress=compress)
        write_idx(folder, f"{prefix}-labels-idx1-ubyte", random.integers(0, 10, size), compress=compress)


def write_black(folder: Path, size: int, *, compress: bool = False) -> Sections:
    """Write MNIST with this many black training images, and 128 to test; plain files take no room on a disk."""
    for name, shape in (("train-images-idx3", (size, 28, 28)), ("t10k-images-idx3", (128, 28, 28)),
                        ("train-labels-idx1", (size,)), ("t10k-labels-idx1", (128,))):  # fmt: skip
        path = write_idx(folder, f"{name}-ubyte", np.zeros(shape if compress else (0, *shape[1:]), np.uint8), compress=compress)
        if not compress:
            header = struct.pack(f">I{len(shape)}I", 0x800 | len(shape), *shape)
            path.write_bytes(header)
            os.truncate(path, len(header) + int(np.prod(shape)))
    return recipe("mnist", folder)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
