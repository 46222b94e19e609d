"""What the `datasets` library opens, against its own rows; never on the network."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from image_sources import check_contract, check_workers_and_pickling, everything, write_folder
from image_sources import recipe as recipe_of
from PIL import Image
from torchvision.transforms.v2 import functional as F

from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.images import Data
from app.tasks.image_classification.data.open import download_data, open_data
from app.tasks.image_classification.sections import DataRecipe, Sections

datasets = pytest.importorskip("datasets", reason="needs datasets")
from datasets import Array3D, ClassLabel, Dataset, DatasetDict, Features, Value  # noqa: E402

NAMES = ["ant", "bee", "cat"]
IMAGES = Features({"image": datasets.Image(), "label": ClassLabel(names=NAMES)})


@pytest.fixture(autouse=True)
def own_cache_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def recipe(path: Path | str, **keys) -> Sections:
    return recipe_of("huggingface", path, **keys)


def opened(path: Path | str, **keys) -> Data:
    return open_data(recipe(path, **keys))


def pixels(size: int, *, shape: tuple[int, ...] = (6, 5, 3)) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, (size, *shape)).astype(np.uint8)


def images(size: int = 9, *, shape: tuple[int, ...] = (6, 5, 3)) -> Dataset:
    files = [Image.fromarray(array) for array in pixels(size, shape=shape)]
    return Dataset.from_dict({"image": files, "label": [index % 3 for index in range(size)]}, features=IMAGES)


def table(train: dict, test: dict | None = None, features: Features | None = None) -> DatasetDict:
    splits = {"train": train, "test": train if test is None else test}
    return DatasetDict({name: Dataset.from_dict(columns, features=features) for name, columns in splits.items()})


def save(folder: Path, splits: DatasetDict | None = None) -> Path:
    (splits or DatasetDict(train=images(9), test=images(4))).save_to_disk(folder)
    return folder


def as_parquet(folder: Path) -> Path:
    folder.mkdir()
    images(9).to_parquet(folder / "train-00000-of-00001.parquet")
    images(4).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def reference(rows: Dataset) -> torch.Tensor:
    return torch.stack([F.pil_to_tensor(row["image"]) for row in rows])


# Every kind of file


@pytest.mark.parametrize("write", [save, as_parquet])
def test_rows_are_those_of_the_library(tmp_path: Path, write) -> None:
    path = write(tmp_path / "rows")
    found = opened(path)
    for source, name, size in zip(found.values(), ("train", "test"), (9, 4), strict=True):
        rows = datasets.load_from_disk(path / name) if write is save else datasets.load_dataset(str(path), split=name)
        check_contract(source)
        assert (len(source), source.channels, source.image_size, source.classes) == (size, 3, (6, 5), tuple(NAMES))
        assert torch.equal(everything(source)[0], reference(rows))
        assert everything(source)[1].tolist() == rows["label"]
    assert not found["train"].workers, "so little data is kept in memory"


def test_a_damaged_image_file_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "rows")
    file = path / "train/ant/1.png"
    file.write_bytes(file.read_bytes()[:60])
    named = rf"^{file} \(sample 1 of the train split of {path}\) cannot be read as an image"
    train = opened(path, image_size=6, crop=0.5)["train"]
    assert train.classes == tuple(NAMES)
    with pytest.raises(DataError, match=named):
        everything(train)


def test_one_file_can_hold_both_splits_under_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images(10).rename_columns({"image": "img", "label": "fine"}).to_parquet(tmp_path / "all.parquet")
    monkeypatch.chdir(tmp_path)
    keys = {"train_split": "train[:70%]", "test_split": "train[70%:]", "image_column": "img", "label_column": "fine"}
    train, test = opened("all.parquet", **keys).values()
    assert torch.equal(torch.cat([everything(train)[0], everything(test)[0]]), reference(images(10)))
    assert (len(train), len(test)) == (7, 3)


# Kinds of images


def test_all_gray_images_stay_gray_and_mixed_ones_become_rgb(tmp_path: Path) -> None:
    gray = images(7, shape=(6, 5))
    train = opened(save(tmp_path / "gray", DatasetDict(train=gray, test=gray)))["train"]
    assert train.channels == 1
    assert torch.equal(everything(train)[0], reference(gray))
    mixed = datasets.concatenate_datasets([gray, images(2)])
    train = opened(save(tmp_path / "mixed", DatasetDict(train=mixed, test=gray)))["train"]
    assert train.channels == 3
    assert torch.equal(everything(train)[0][:7], reference(gray).expand(-1, 3, -1, -1))


def test_arrays_keep_their_channels(tmp_path: Path) -> None:
    values = pixels(8, shape=(3, 4, 6))
    features = Features({"image": Array3D((3, 4, 6), "uint8"), "label": Value("int64")})
    train = opened(save(tmp_path / "rows", table({"image": values, "label": [0, 1] * 4}, features=features)))["train"]
    check_contract(train)
    np.testing.assert_array_equal(everything(train)[0].numpy(), values)


def test_encoded_bytes_are_images_too(tmp_path: Path) -> None:
    original = images(4)
    rows = original.cast_column("image", datasets.Image(decode=False))
    encoded = {"image": [row["image"]["bytes"] for row in rows], "label": original["label"]}
    train = opened(save(tmp_path / "rows", table(encoded)))["train"]
    assert torch.equal(everything(train)[0], reference(original))


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_large_data_is_decoded_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "rows")
    in_memory = opened(path)["train"]
    monkeypatch.setattr(arrays, "DECODED_ONCE_BYTES", 9 * 6 * 5 * 3 - 1)
    source, test = opened(path).values()
    assert (source.workers, test.workers) == (True, False)
    assert source.fingerprint == in_memory.fingerprint
    assert torch.equal(everything(source)[0], everything(in_memory)[0])
    check_workers_and_pickling(source)


# Kinds of labels


def test_strings_are_numbered_by_the_training_split_and_integers_name_themselves(tmp_path: Path) -> None:
    rows = table({"image": list(pixels(4)), "label": ["b", "a", "c", "a"]}, {"image": list(pixels(2)), "label": ["c", "a"]})
    train, test = opened(save(tmp_path / "rows", rows)).values()
    assert train.classes == test.classes == ("a", "b", "c")
    assert everything(train)[1].tolist() == [1, 0, 2, 0]
    assert everything(test)[1].tolist() == [2, 0]
    rows = table({"image": list(pixels(3)), "label": [0, 2, 1]})
    assert opened(save(tmp_path / "integers", rows))["train"].classes == ("0", "1", "2")


def labeled(*labels: object, test: list | None = None) -> DatasetDict:
    four = list(pixels(4))
    return table({"image": four, "label": list(labels)}, None if test is None else {"image": four, "label": test})


def imaged(*values: object) -> DatasetDict:
    return table({"image": list(values), "label": [index % 2 for index in range(len(values))]})


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        (labeled(0, 1, -1, 0), r"^sample 2 of the train split of \S+ has label -1, but labels .* in 0\.\.1 \(1 of 4 are not\)"),
        (labeled(*"abaa", test=[*"azaa"]), r"^the test split of \S+ has the labels z, which no training sample has"),
        (labeled(0, None, 1, None), r"^sample 1 of the train split of \S+ has no label \(2 of 4 have none\)"),
        (labeled(0.5, 1, 1, 0), r"^data\.label_column=label: .* holds double in that column; labels must be"),
        (labeled(0, 1, 10**9, 0), r"^data\.label_column=label: .* holds 1000000000; labels must be 0 to"),
        (table({"image": [], "label": []}, features=IMAGES), r"^data\.path=.* cannot be opened: a split has no samples$"),
        (imaged("a"), r"^data\.image_column=image: .* holds string in that column, not images"),
        (imaged(*pixels(2), None), r"^sample 2 of the train split of \S+ has no image; remove it\. `samerun data check` lists"),
        (
            table({"image": [{"size": 3}], "label": [0]}),
            r"^sample 0 of .* has no image: none is in bytes or path of",
        ),
        (imaged([[1, 256], [3, 4]]), r"^sample 0 of .* is an array of int64 \[1, 2, 2\] with 1\.\.256; store"),
    ],
)
def test_what_is_wrong_with_the_rows_is_named(tmp_path: Path, splits: DatasetDict, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        opened(save(tmp_path / "rows", splits))


# What is not there


def with_configurations(folder: Path) -> Path:
    """Write a folder as the hub has them, with two configurations of 9 and 4 images."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for config, size in (("large", 9), ("small", 4)):
        lines.append(f"- config_name: {config}\n  data_files:")
        for split in ("train", "test"):
            images(size).to_parquet(folder / f"{config}-{split}.parquet")
            lines.append(f"  - split: {split}\n    path: {config}-{split}.parquet")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def without_splits(folder: Path) -> Path:
    images().save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    ("write", "keys", "sentence"),
    [
        (save, {"label_column": "fine"}, r"^data\.label_column=fine: the train split of \S+ has the columns image, label"),
        (save, {"test_split": "val"}, r"^data\.test_split=val: \S+ has the splits test, train; use one of these$"),
        (as_parquet, {"test_split": "val"}, r"data\.test_split=val cannot be opened: Unknown split .val.\. Should be one of"),
        (without_splits, {}, r"rows is a Dataset without splits; save a DatasetDict with a split train$"),
        (save, {"hub_revision": "a" * 40}, r"rows is a local path, which has no data\.hub_config or data\.hub_revision"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path, write, keys: dict, sentence: str) -> None:
    with pytest.raises((DataError, RecipeError), match=sentence):
        opened(write(tmp_path / "rows"), **keys)


# The hub


def test_an_unknown_name_is_one_sentence_without_the_network() -> None:
    before = (datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity())
    with pytest.raises(DataError, match=r"^data\.path=someone/something is not a file or folder here, nor a data set in"):
        opened("someone/something")
    assert (datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity()) == before


def in_the_cache(folder: Path, commit: str, *, config: str | None = None) -> None:
    """Put a folder into the library's cache as a commit of the hub's someone/Something."""
    datasets.load_dataset(str(folder), config)
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    (version,) = cache.glob(f"{folder.name}/{config or 'default'}/*")
    (made,) = (place for place in version.iterdir() if place.is_dir())
    target = cache / "someone___something" / version.relative_to(cache / folder.name) / commit
    target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(target)


def test_a_revision_is_read_and_not_what_was_cached_last(tmp_path: Path) -> None:
    older, newer, unknown = "a" * 40, "b" * 40, "c" * 40
    for size, commit in ((9, older), (4, newer)):
        folder = tmp_path / str(size) / "something"
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            images(size).to_parquet(folder / f"{split}.parquet")
        in_the_cache(folder, commit)
    found = {commit: opened("someone/Something", hub_revision=commit)["train"] for commit in (older, newer)}
    assert {commit: len(train) for commit, train in found.items()} == {older: 9, newer: 4}
    last = opened("someone/Something")["train"]
    assert (len(last), last.fingerprint == found[newer].fingerprint) == (4, False), "the revision is in the fingerprint"
    with pytest.raises(DataError, match=rf"hub_revision={unknown} is not in the cache .* set data\.download=true$"):
        opened("someone/Something", hub_revision=unknown)


def test_a_revision_of_several_configurations(tmp_path: Path) -> None:
    path, commit = with_configurations(tmp_path / "something"), "a" * 40
    assert [len(opened(path, hub_config=config)["train"]) for config in ("large", "small")] == [9, 4]
    for config in ("large", "small"):
        in_the_cache(path, commit, config=config)
    assert len(opened("someone/something", hub_revision=commit, hub_config="small")["test"]) == 4
    with pytest.raises(DataError, match=r"has several configurations: set data\.hub_config to one of large, small$"):
        opened("someone/something", hub_revision=commit)
    (problem,) = Sections(data=DataRecipe(hub_config="large")).contradictions()
    assert problem == 'data.hub_config is "large" and data.source is "digits": hub_config is for data.source=huggingface'
    (problem,) = recipe("someone/something", hub_revision="main").contradictions()
    assert 'data.hub_revision is "main": it must be a commit, all 40 hexadecimal digits' in problem


def test_a_download_names_both_and_what_is_here_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setenv("https_proxy", "http://localhost:1")  # through which the hub may be reached
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: calls.append((*args, keys["revision"])))
    commit = "a" * 40
    download_data(recipe("allenai/c4", hub_config="en", hub_revision=commit, download=True))
    download_data(recipe(save(tmp_path / "rows"), download=True))
    download_data(recipe("someone/something"))
    assert calls == [("allenai/c4", "en", commit)]
