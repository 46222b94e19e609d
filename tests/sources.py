"""What every source must do, for the tests of each kind."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from app.data.draws import HostDraws
from app.tasks.image_classification.data.images import Images
from app.tasks.image_classification.sections import DataRecipe, Sections


def recipe(source: str, path: Path | None = None, **keys) -> Sections:
    return Sections(data=DataRecipe(source=source, path=None if path is None else str(path), **keys))


def everything(source: Images) -> tuple[Tensor, Tensor]:
    """All images and labels of the first epoch."""
    return fetched(source, np.arange(len(source)))


def fetched(source: Images, indices: np.ndarray, samples: np.ndarray | None = None, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images and labels of samples with these numbers, those of the first epoch unless they are given."""
    images, labels = source.fetch(indices, HostDraws(seed, indices if samples is None else samples)).values()
    return images, labels


class Batches(Dataset):
    """A source as a DataLoader's workers see it."""

    def __init__(self, source: Images) -> None:
        self.source = source

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return fetched(self.source, np.array(indices))


def check_workers_and_pickling(source: Images) -> None:
    """Forked workers and a pickled copy must fetch what this process does."""
    images, labels = everything(source)
    batches = [list(range(start, min(start + 4, len(source)))) for start in range(0, len(source), 4)]
    loader = DataLoader(
        Batches(source), batch_sampler=batches, collate_fn=lambda batch: batch, num_workers=1, multiprocessing_context="fork"
    )
    fetched = list(loader)
    assert torch.equal(torch.cat([batch[0] for batch in fetched]), images)
    assert torch.equal(torch.cat([batch[1] for batch in fetched]), labels)
    copy = pickle.loads(pickle.dumps(source))
    assert torch.equal(everything(copy)[0], images)
    assert copy.fingerprint == source.fingerprint


def check_contract(source: Images) -> None:
    images, labels = everything(source)
    assert images.dtype == torch.uint8
    assert images.shape == (len(source), source.channels, *source.image_size)
    assert images.is_contiguous()
    assert labels.dtype == torch.int64
    assert labels.shape == (len(source),)
    assert source.facts == {"classes": list(source.classes), "channels": source.channels, "image_size": [*source.image_size]}
    assert 0 <= int(labels.min()) <= int(labels.max()) < len(source.classes)
    picked = np.array([len(source) - 1, 0, 0])
    some, some_labels = fetched(source, picked)
    assert torch.equal(some, images[picked])
    assert torch.equal(some_labels, labels[picked])


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
    """Writes MNIST with so many black images to train and 128 to test; plain files take no room on a disk."""
    for name, shape in (("train-images-idx3", (size, 28, 28)), ("t10k-images-idx3", (128, 28, 28)),
                        ("train-labels-idx1", (size,)), ("t10k-labels-idx1", (128,))):  # fmt: skip
        if compress:
            write_idx(folder, f"{name}-ubyte", np.zeros(shape, np.uint8), compress=True)
            continue
        path = write_idx(folder, f"{name}-ubyte", np.zeros(shape, np.uint8)[:0])
        header = struct.pack(f">I{len(shape)}I", 0x800 | len(shape), *shape)
        path.write_bytes(header)
        os.truncate(path, len(header) + int(np.prod(shape)))
    return recipe("mnist", folder)


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:-1], "longer": content + b"x", "empty": b"", "text": b"<html>not found"}[kind])
