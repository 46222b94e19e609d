"""Data sets with a known name: digits, MNIST, CIFAR, made-up images, and what is common to all sources."""

from __future__ import annotations

import hashlib
import pickle
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from image_sources import check_contract, everything, recipe, truncate, write_idx, write_mnist
from torchvision import datasets
from torchvision.transforms.v2 import functional as F

from app.errors import DataError, RecipeError
from app.recipe import recipe_file
from app.tasks.image_classification.data import standard_sets
from app.tasks.image_classification.data.open import OPEN, download_data, open_data
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe

REPOSITORY = Path(__file__).parents[3]


# Digits


def test_digits_are_those_of_scikit_learn() -> None:
    """The hash is of `sklearn.datasets.load_digits()`: its images, then its targets, as uint8."""
    with np.load(REPOSITORY / "app/tasks/image_classification/data/digits.npz") as file:
        images, labels = file["images"], file["labels"]
    original = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == original
    for source, rows in zip(
        open_data(recipe("digits")).values(), (np.arange(1797) % 5 != 4, np.arange(1797) % 5 == 4), strict=True
    ):
        check_contract(source)
        assert (source.channels, source.image_size, source.classes, source.workers) == (1, (8, 8), tuple("0123456789"), False)
        opened, opened_labels = everything(source)
        np.testing.assert_array_equal(opened[:, 0].numpy(), np.floor(images[rows] / 16 * 255))
        np.testing.assert_array_equal(opened_labels.numpy(), labels[rows])


def test_arrays_are_resized_once_as_torchvision_would() -> None:
    stored, _ = everything(open_data(recipe("digits"))["train"])
    cropped, _ = everything(open_data(recipe("digits", image_size=12, resize_size=15))["train"])
    assert torch.equal(cropped, F.center_crop(F.resize(stored, [15, 15], antialias=True), [12, 12]))


def test_arrays_can_be_cropped_at_random() -> None:
    cropped, plain = open_data(recipe("digits", image_size=8, crop=0.3)), open_data(recipe("digits"))
    assert [split.workers for split in cropped.values()] == [True, False]
    are_equal = [torch.equal(everything(cropped[split])[0], everything(plain[split])[0]) for split in plain]
    assert are_equal == [False, True]
    assert torch.equal(everything(cropped["train"])[1], everything(plain["train"])[1])
    assert cropped["train"].fingerprint == plain["train"].fingerprint


# MNIST


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
    monkeypatch.setitem(standard_sets.DEBIAN, "fashion_mnist", str(tmp_path / "debian"))
    for size, place in enumerate(("debian", "data/FashionMNIST/raw", "data"), 3):
        write_mnist(tmp_path / place, train_size=size, compress=size == 3)
        train = open_data(recipe("fashion_mnist"))["train"]
        assert (len(train), train.classes) == (size, tuple(datasets.FashionMNIST.classes))
    with pytest.raises(DataError, match=r"no folder contains all four .* in: \S*elsewhere, \S*elsewhere/FashionMNIST/raw\. "):
        open_data(recipe("fashion_mnist", tmp_path / "elsewhere"))  # a given path is the only place


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train-images-idx3-ubyte", None, r"train-images-idx3-ubyte holds \d+ bytes of data, but its header states"),
        ("t10k-labels-idx1-ubyte", np.zeros((7, 1)), r"t10k-labels-idx1-ubyte is not an idx file with 1 dimension"),
        ("train-labels-idx1-ubyte", np.zeros(29), r"holds 30 images, but \S+ holds 29 labels"),
        ("t10k-labels-idx1-ubyte", np.array([0, 1, 9, 10, 255, 0, 0]),
         r"^sample 3 of the test split of \S+ has label 10, but labels must be in 0\.\.9 \(2 of 7 are not\)"),
        ("train-images-idx3-ubyte.gz", None, r"cannot be read \("),
    ],
)  # fmt: skip
def test_damaged_idx_files_are_named(tmp_path: Path, name: str, content: np.ndarray | None, sentence: str) -> None:
    write_mnist(tmp_path, compress=name.endswith(".gz"))
    if content is None:
        truncate(tmp_path / name)
    else:
        write_idx(tmp_path, name, content)
    with pytest.raises(DataError, match=sentence):
        open_data(recipe("mnist", tmp_path))


# Downloads


def test_downloads_are_asked_for_and_a_failed_one_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    download_data(recipe("mnist", tmp_path / "not-asked"))
    assert not (tmp_path / "not-asked").exists()
    write_mnist(tmp_path / "here")
    download_data(recipe("mnist", tmp_path / "here", download=True))  # nothing is missing
    for source in ("fashion_mnist", "cifar10"):
        with pytest.raises(DataError, match=rf"^data\.source={source} cannot be downloaded into {tmp_path}: .+\. Without"):
            download_data(recipe(source, tmp_path, download=True))


# CIFAR


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: type[datasets.CIFAR10]) -> None:
    """Write a small copy of the python version, and tell torchvision its checksums."""
    folder, random = root / kind.base_folder, np.random.default_rng(0)
    folder.mkdir(parents=True)

    def write(name: str, content: dict[str, object]) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch() -> dict[str, object]:
        labels = random.integers(0, 10, 6).tolist()
        label_key = "labels" if kind is datasets.CIFAR10 else "fine_labels"
        return {"data": random.integers(0, 256, (6, 3072)).astype(np.uint8), label_key: labels}

    monkeypatch.setattr(kind, "train_list", [write(name, batch()) for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [write(name, batch()) for name, _ in kind.test_list])
    count = 10 if kind is datasets.CIFAR10 else 100
    name, md5 = write(kind.meta["filename"], {kind.meta["key"]: [f"class {label}" for label in range(count)]})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "filename": name, "md5": md5})


@pytest.mark.parametrize(("name", "kind"), [("cifar10", datasets.CIFAR10), ("cifar100", datasets.CIFAR100)])
def test_cifar_equals_torchvisions_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type) -> None:
    write_cifar(tmp_path, monkeypatch, kind)
    for path in (tmp_path, tmp_path / kind.base_folder):
        for source, is_train in zip(open_data(recipe(name, path)).values(), (True, False), strict=True):
            reference = kind(tmp_path, train=is_train)
            check_contract(source)
            images, labels = everything(source)
            assert torch.equal(images, torch.stack([F.pil_to_tensor(image) for image, _ in reference]))
            assert labels.tolist() == reference.targets
            assert source.classes == tuple(reference.classes)
    download_data(recipe(name, tmp_path, download=True))
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(".")  # the default folder
    assert len(open_data(recipe(name))["train"]) == len(kind.train_list) * 6


def test_missing_or_damaged_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = r"^data\.source=cifar10: \S+cifar-10-batches-py is missing or damaged\. Unpack cifar-10-python\.tar\.gz .*=true$"
    with pytest.raises(DataError, match=sentence):
        open_data(recipe("cifar10", tmp_path))
    write_cifar(tmp_path, monkeypatch, datasets.CIFAR10)
    truncate(tmp_path / "cifar-10-batches-py/data_batch_3")
    with pytest.raises(DataError, match=sentence):
        open_data(recipe("cifar10", tmp_path))


# Made-up data


def test_fake_data_equals_torchvisions() -> None:
    keys = {"image_size": 9, "fake_train_samples": 11, "fake_test_samples": 5, "fake_classes": 4, "fake_channels": 3}
    train, test = open_data(recipe("fakedata", **keys)).values()
    for source, offset in ((train, 0), (test, 11)):
        reference = datasets.FakeData(len(source), (3, 9, 9), 4, random_offset=offset)
        check_contract(source)
        images, labels = everything(source)
        assert torch.equal(images, torch.stack([F.pil_to_tensor(reference[index][0]) for index in range(len(source))]))
        assert labels.tolist() == [reference[index][1] for index in range(len(source))]
    assert train.workers
    assert train.fingerprint != test.fingerprint
    before = torch.get_rng_state()
    train.fetch(np.arange(3), None)
    assert torch.equal(torch.get_rng_state(), before)


# What all share


@pytest.mark.parametrize("source", ["arrays", "huggingface", "imagefolder", "webdataset", "hdf5", "lmdb", "tfrecord"])
def test_a_source_without_its_path_is_refused(source: str) -> None:
    with pytest.raises(RecipeError, match=rf"^data\.source={source} needs data\.path: the file or folder with all splits"):
        open_data(recipe(source))


def test_the_fingerprint_is_of_the_data_alone(tmp_path: Path) -> None:
    write_mnist(tmp_path / "here")
    write_mnist(tmp_path / "there", compress=True)
    here, there = (open_data(recipe("mnist", tmp_path / name)) for name in ("here", "there"))
    assert [source.fingerprint for source in here.values()] == [source.fingerprint for source in there.values()]
    assert open_data(recipe("mnist", tmp_path / "here", image_size=20))["train"].fingerprint == here["train"].fingerprint
    # A run resumes only on data with the fingerprint it began with: changing how it is made breaks every saved run.
    assert (
        open_data(recipe("digits"))["train"].fingerprint == "d118e20b4255d954ec0116139752093315cf7857423996f3c2aa254224574f39"
    )


def test_the_guide_names_every_kind_and_only_keys_and_commands_that_exist() -> None:
    guide = "\n".join((REPOSITORY / f"docs/{page}.md").read_text() for page in ("data", "data-formats", "data-tools"))
    assert set(OPEN) == set(get_args(get_type_hints(DataRecipe)["source"]))
    for kind in OPEN:
        assert f"`{kind}`" in guide
    keys = re.findall(r"\b(data|augment)\.(\w+)", re.sub(r"\(?(?:docs/)?data\.md|app/data/", "", guide))
    sections = {"data": DataRecipe(), "augment": AugmentRecipe()}
    assert len(keys) > 30
    for section, key in keys:
        assert hasattr(sections[section], key), f"{section}.{key}"
    commands = re.findall(r"samerun launch --recipe (\S+) (.+)", guide)
    assert len(commands) == 5
    for name, overrides in commands:
        assert recipe_file.load(name, overrides.split()).recipe.sections.data.source in OPEN
