"""Nine small pictures a split, written as an image folder and in every container."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sources import everything
from torchvision.datasets import ImageFolder

from app.errors import DataError
from app.tasks.image_classification.data.images import Data
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.data.pack import WRITERS, Sample
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections

FORMATS = ["hdf5", "lmdb", "tfrecord", "webdataset"]
CLASSES = ("ant", "bee", "cat")
SIZES = [(40, 30), (31, 47), (25, 60)]  # width, height in pixels


def file_of(width: int, height: int, *, seed: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(content, kind)
    return content.getvalue()


PICTURE = file_of(8, 8, seed=1)


def write_folder(root: Path, *, mode: str = "RGB") -> None:
    """Nine pictures a split: JPEG and PNG, of several sizes."""
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number, size in enumerate(SIZES):
                kind, extension = (("JPEG", "jpg"), ("PNG", "png"))[number % 2]
                content = file_of(*size, seed=10 * label + number + len(split), kind=kind, mode=mode)
                (root / split / name / f"{number}.{extension}").write_bytes(content)


def records(folder: Path) -> Iterator[Sample]:
    """A split of an image folder, in its order."""
    for name, label in ImageFolder(str(folder)).samples:
        yield Path(name).read_bytes(), label


def pack(pictures: Path, target: Path, source: str) -> Path:
    for split in ("train", "test"):
        write(source, target, split, CLASSES, list(records(pictures / split)))
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


def opened(source: str, path: Path | None, *, crop: float | None = None, **keys) -> Data:
    data = DataRecipe(source=source, path=None if path is None else str(path), **{"image_size": 24, **keys})
    return open_data(Sections(data=data, augment=AugmentRecipe(resized_crop_min_area=crop)))


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


def check_same(found: Data, expected: Data) -> None:
    """All splits of both have the same images and labels."""
    for one, other in zip(found.values(), expected.values(), strict=True):
        assert [torch.equal(*pair) for pair in zip(everything(one), everything(other), strict=True)] == [True, True]


def refused(source: str, path: Path, sentence: str, **keys) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        everything(opened(source, path, **keys)["train"])
    assert "\n" not in str(caught.value)
