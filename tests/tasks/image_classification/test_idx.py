"""The idx files of MNIST and Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sources import check_contract, damage, everything, recipe, write_idx, write_mnist
from torchvision import datasets

from app.errors import DataError
from app.tasks.image_classification.data import standard_sets as idx
from app.tasks.image_classification.data.open import open_data


@pytest.mark.parametrize(("inside", "compress"), [(".", True), ("MNIST/raw", False)])
def test_mnist_equals_torchvisions_reading(tmp_path: Path, inside: str, compress: bool) -> None:
    write_mnist(tmp_path / inside, compress=compress)
    write_mnist(tmp_path / "plain/MNIST/raw")
    for source, is_train in zip(open_data(recipe("mnist", tmp_path)).values(), (True, False), strict=True):
        reference = datasets.MNIST(tmp_path / "plain", train=is_train)
        check_contract(source)
        images, labels = everything(source)
        assert torch.equal(images[:, 0], reference.data)
        assert torch.equal(labels, reference.targets)


def test_the_usual_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(idx.DEBIAN, "fashion_mnist", str(tmp_path / "debian"))
    for size, place in enumerate(("debian", "data/FashionMNIST/raw", "data"), 3):
        write_mnist(tmp_path / place, train_size=size, compress=size == 3)
        train = open_data(recipe("fashion_mnist"))["train"]
        assert (len(train), train.classes) == (size, tuple(datasets.FashionMNIST.classes))
    for place in ("data", "data/FashionMNIST/raw", "debian"):
        next((tmp_path / place).glob("t10k-labels-idx1-ubyte*")).unlink()
    found = rf"data, data/FashionMNIST/raw, {tmp_path}/debian\. Set data\.path .*data\.download=true"
    with pytest.raises(DataError, match=rf"t10k-labels-idx1-ubyte; .* Looked in: {found}"):
        open_data(recipe("fashion_mnist"))
    with pytest.raises(DataError, match=r"Looked in: \S*elsewhere, \S*elsewhere/FashionMNIST/raw\. "):
        open_data(recipe("fashion_mnist", tmp_path / "elsewhere"))  # a given path is the only place


@pytest.mark.parametrize(("name", "kind"), [*zip(idx.IDX_FILES, ("truncated", "longer", "empty", "text"), strict=True)])
def test_a_damaged_idx_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    write_mnist(tmp_path)
    damage(tmp_path / name, kind)
    with pytest.raises(DataError, match=rf"{name} (is not an idx file|holds \d+ bytes of data, but)"):
        open_data(recipe("mnist", tmp_path))


@pytest.mark.parametrize(
    ("sizes", "change", "text"),
    [
        (
            {},
            lambda root: write_idx(root, "train-labels-idx1-ubyte", np.zeros(29)),
            r"holds 30 images, but \S+ holds 29 labels",
        ),
        (
            {},
            lambda root: write_idx(root, "t10k-labels-idx1-ubyte", np.array([0, 1, 9, 10, 255, 0, 0])),
            r"^sample 3 of the test split of \S+ has label 10, but labels must be in 0\.\.9",
        ),
        ({"test_size": 0}, lambda _: None, r"the test split of .* has no samples"),
        (
            {"compress": True},
            lambda root: damage(root / "train-images-idx3-ubyte.gz", "truncated"),
            r"cannot be read to its end",
        ),
    ],
)
def test_files_that_do_not_agree_are_named(tmp_path: Path, sizes: dict, change, text: str) -> None:
    write_mnist(tmp_path, **sizes)
    change(tmp_path)
    with pytest.raises(DataError, match=text):
        open_data(recipe("mnist", tmp_path))
