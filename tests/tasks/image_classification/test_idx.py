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

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("inside", [".", "MNIST/raw"])
def test_mnist_equals_torchvisions_reading(tmp_path: Path, inside: str, compress: bool) -> None:
    write_mnist(tmp_path / inside, compress=compress)
    write_mnist(tmp_path / "plain/MNIST/raw")
    for source, is_train in zip(open_data(recipe("mnist", tmp_path)).there.values(), (True, False), strict=True):
        reference = datasets.MNIST(tmp_path / "plain", train=is_train)
        check_contract(source)
        images, labels = everything(source)
        assert torch.equal(images[:, 0], reference.data)
        assert torch.equal(labels, reference.targets)


def test_fashion_mnist_has_its_own_folder_and_classes(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST/raw", train_size=5)
    write_mnist(tmp_path / "FashionMNIST/raw", train_size=6)
    train, *_ = open_data(recipe("fashion_mnist", tmp_path))
    assert len(train) == 6
    assert train.classes == tuple(datasets.FashionMNIST.classes)


def test_the_usual_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(idx.DEBIAN, "mnist", str(tmp_path / "debian"))
    write_mnist(tmp_path / "debian", train_size=3, compress=True)
    assert len(open_data(recipe("mnist")).train) == 3
    write_mnist(tmp_path / "data/MNIST/raw", train_size=4)
    assert len(open_data(recipe("mnist")).train) == 4
    write_mnist(tmp_path / "data", train_size=5)
    assert len(open_data(recipe("mnist")).train) == 5


def test_missing_files_name_every_place_and_both_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(idx.DEBIAN, "mnist", "no/such/folder")
    write_mnist(tmp_path / "data")
    (tmp_path / "data/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        open_data(recipe("mnist"))
    for part in ("data, data/MNIST/raw, no/such/folder", "data.path", "data.download=true", "t10k-labels-idx1-ubyte"):
        assert part in str(caught.value)
    (tmp_path / "data/t10k-labels-idx1-ubyte").touch()
    with pytest.raises(DataError, match=r"Looked in: \S*elsewhere, \S*elsewhere/MNIST/raw\. "):
        open_data(recipe("mnist", tmp_path / "elsewhere"))  # a given path is the only place


@pytest.mark.parametrize("kind", ["truncated", "longer", "empty", "text"])
@pytest.mark.parametrize("name", idx.IDX_FILES)
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
            r"^sample 3 of the test split of \S+ has label 10, but labels must be in 0\.\.9 \(2 of 7 are not\)",
        ),
        ({"test_size": 0}, lambda _: None, r"the test split of .* has no samples"),
        *(
            ({"compress": True}, lambda root, kind=kind: damage(root / "train-images-idx3-ubyte.gz", kind), text)
            for kind in ("truncated", "text")
            for text in [r"train-images-idx3-ubyte\.gz cannot be read to its end \(.+\): it is truncated or damaged"]
        ),
    ],
)
def test_files_that_do_not_agree_are_named(tmp_path: Path, sizes: dict, change, text: str) -> None:
    write_mnist(tmp_path, **sizes)
    change(tmp_path)
    with pytest.raises(DataError, match=text):
        open_data(recipe("mnist", tmp_path))


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs the package dataset-fashion-mnist")
def test_debians_fashion_mnist_is_found_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, *_, test = open_data(recipe("fashion_mnist"))
    assert (len(train), len(test)) == (60_000, 10_000)
    for source in (train, test):
        _, labels = everything(source)
        assert torch.bincount(labels).tolist() == [len(source) // 10] * 10
    # The mean pixel that the data set's users normalize with: 0.2860.
    assert float(everything(train)[0].float().mean() / 255) == pytest.approx(0.2860, abs=5e-5)
