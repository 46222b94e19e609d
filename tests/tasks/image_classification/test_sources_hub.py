"""What the `datasets` library opens, against its own rows; never on the network."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sources import check_contract, check_workers_and_pickling, everything
from torchvision.transforms.v2 import functional as F

from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.open import download_data, open_data
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe, Sections

datasets = pytest.importorskip("datasets", reason="reads what the datasets library opens")
from datasets import Array3D, ClassLabel, Dataset, DatasetDict, Features, List, Value  # noqa: E402

NAMES = ["ant", "bee", "cat"]
PICTURES = Features({"image": datasets.Image(), "label": ClassLabel(names=NAMES)})


@pytest.fixture(autouse=True)
def own_cache_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def recipe(path: Path | str | None, *, crop: float | None = None, **keys) -> Sections:
    data = DataRecipe(source="huggingface", path=None if path is None else str(path), **keys)
    return Sections(data=data, augment=AugmentRecipe(resized_crop_min_area=crop))


def pixels(size: int, *, shape: tuple[int, ...] = (6, 5, 3)) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, (size, *shape)).astype(np.uint8)


def pictures(size: int = 9, *, shape: tuple[int, ...] = (6, 5, 3), **columns: list) -> Dataset:
    images = [Image.fromarray(array) for array in pixels(size, shape=shape)]
    return Dataset.from_dict({"image": images, "label": [index % 3 for index in range(size)]}, features=PICTURES)


def table(train: dict, test: dict | None = None, features: Features | None = None) -> DatasetDict:
    splits = {"train": train, "test": train if test is None else test}
    return DatasetDict({name: Dataset.from_dict(columns, features=features) for name, columns in splits.items()})


def save(folder: Path, splits: DatasetDict | None = None) -> Path:
    (splits or DatasetDict(train=pictures(9), test=pictures(4))).save_to_disk(folder)
    return folder


def reference(rows: Dataset) -> tuple[torch.Tensor, list[int]]:
    return torch.stack([F.pil_to_tensor(row["image"]) for row in rows]), [row["label"] for row in rows]


# Every kind of file


def as_parquet(folder: Path) -> Path:
    folder.mkdir()
    pictures(9).to_parquet(folder / "train-00000-of-00001.parquet")
    pictures(4).to_parquet(folder / "test-00000-of-00001.parquet")
    return folder


def as_pictures(folder: Path) -> Path:
    for name, size in (("train", 9), ("test", 4)):
        for index, row in enumerate(pictures(size)):
            file = folder / name / NAMES[row["label"]] / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(file)
    return folder


@pytest.mark.parametrize("write", [save, as_parquet, as_pictures])
def test_rows_are_those_of_the_library(tmp_path: Path, write) -> None:
    path = write(tmp_path / "rows")
    opened = open_data(recipe(path))
    for source, name, size in zip(opened.values(), ("train", "test"), (9, 4), strict=True):
        rows = datasets.load_from_disk(path / name) if write is save else datasets.load_dataset(str(path), split=name)
        check_contract(source)
        assert (len(source), source.channels, source.image_size, source.classes) == (size, 3, (6, 5), tuple(NAMES))
        images, labels = everything(source)
        expected, expected_labels = reference(rows)
        assert torch.equal(images, expected)
        assert labels.tolist() == expected_labels
    assert not opened["train"].workers, "so little data is kept in memory"


def test_one_file_can_hold_both_splits(tmp_path: Path) -> None:
    pictures(10).to_parquet(tmp_path / "all.parquet")
    train, test = open_data(recipe(tmp_path / "all.parquet", train_split="train[:70%]", test_split="train[70%:]")).values()
    expected, _ = reference(pictures(10))
    assert torch.equal(torch.cat([everything(train)[0], everything(test)[0]]), expected)
    assert (len(train), len(test)) == (7, 3)


def test_other_names_of_splits_and_columns_and_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pictures(5).rename_columns({"image": "img", "label": "fine"})
    save(tmp_path / "rows", DatasetDict(learn=rows, check=rows))
    monkeypatch.chdir(tmp_path)
    keys = {"train_split": "learn", "test_split": "check", "image_column": "img", "label_column": "fine"}
    assert len(open_data(recipe("rows", **keys))["train"]) == 5


def test_the_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    here, there = open_data(recipe(save(tmp_path / "a"))), open_data(recipe(as_parquet(tmp_path / "b")))
    assert [source.fingerprint for source in here.values()] == [source.fingerprint for source in there.values()]
    assert here["train"].fingerprint != here["test"].fingerprint


# Kinds of pictures


def test_all_gray_pictures_stay_gray_and_mixed_ones_become_rgb(tmp_path: Path) -> None:
    gray = pictures(7, shape=(6, 5))
    train = open_data(recipe(save(tmp_path / "gray", DatasetDict(train=gray, test=gray))))["train"]
    assert train.channels == 1
    assert torch.equal(everything(train)[0], reference(gray)[0])
    mixed = datasets.concatenate_datasets([gray, pictures(2)])
    train = open_data(recipe(save(tmp_path / "mixed", DatasetDict(train=mixed, test=gray))))["train"]
    assert train.channels == 3
    assert torch.equal(everything(train)[0][:7], reference(gray)[0].expand(-1, 3, -1, -1))


@pytest.mark.parametrize(
    ("stored", "shape", "feature"),
    [
        ("HWC", (4, 6, 3), Array3D((4, 6, 3), "uint8")),
        ("CHW", (3, 4, 6), Array3D((3, 4, 6), "uint8")),
        ("HW", (4, 6), List(List(Value("int64")))),
    ],
)
def test_arrays_keep_their_channels(tmp_path: Path, stored: str, shape: tuple, feature: object) -> None:
    images = pixels(8, shape=shape)
    rows = table({"image": images, "label": [0, 1] * 4}, features=Features({"image": feature, "label": Value("int64")}))
    train = open_data(recipe(save(tmp_path / "rows", rows)))["train"]
    check_contract(train)
    expected = images[:, None] if stored == "HW" else np.moveaxis(images, stored.index("C") + 1, 1)
    np.testing.assert_array_equal(everything(train)[0].numpy(), expected)


def test_encoded_bytes_are_pictures_too(tmp_path: Path) -> None:
    original = pictures(4)
    rows = original.cast_column("image", datasets.Image(decode=False))
    encoded = {"image": [row["image"]["bytes"] for row in rows], "label": original["label"]}
    train = open_data(recipe(save(tmp_path / "rows", table(encoded))))["train"]
    assert torch.equal(everything(train)[0], reference(original)[0])


def test_sizes_may_differ_when_one_is_asked_for(tmp_path: Path) -> None:
    rows = datasets.concatenate_datasets([pictures(3), pictures(2, shape=(9, 7, 3))])
    path = save(tmp_path / "rows", DatasetDict(train=rows, test=rows))
    train, test = open_data(recipe(path, image_size=8, crop=0.5)).values()
    assert train.workers
    assert not test.workers
    images, _ = everything(test)
    for index, row in enumerate(rows):
        resized = F.resize(F.pil_to_tensor(row["image"]), [8], antialias=True)
        assert torch.equal(images[index], F.center_crop(resized, [8, 8]))
    assert not torch.equal(everything(train)[0], images)
    with pytest.raises(DataError, match=r"^sample 3 of the train split of .* is 7x9 pixels .* 5x6 .* set data\.image_size"):
        open_data(recipe(path))


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_large_data_is_decoded_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "rows")
    in_memory = open_data(recipe(path))["train"]
    monkeypatch.setattr(arrays, "DECODED_ONCE_BYTES", 9 * 6 * 5 * 3 - 1)
    source, test = open_data(recipe(path)).values()
    assert source.workers
    assert not test.workers
    assert source.fingerprint == in_memory.fingerprint
    assert torch.equal(everything(source)[0], everything(in_memory)[0])
    check_workers_and_pickling(source)


# Kinds of labels


def test_strings_are_numbered_by_the_training_split_and_integers_name_themselves(tmp_path: Path) -> None:
    rows = table({"image": list(pixels(4)), "label": ["b", "a", "c", "a"]}, {"image": list(pixels(2)), "label": ["c", "a"]})
    train, test = open_data(recipe(save(tmp_path / "rows", rows))).values()
    assert train.classes == test.classes == ("a", "b", "c")
    assert everything(train)[1].tolist() == [1, 0, 2, 0]
    assert everything(test)[1].tolist() == [2, 0]
    rows = table({"image": list(pixels(3)), "label": [0, 2, 1]})
    assert open_data(recipe(save(tmp_path / "integers", rows)))["train"].classes == ("0", "1", "2")


FOUR = list(pixels(4))
WITH_FILES = Features({"image": datasets.Image(), "label": Value("int64")})
NO_IMAGE = r"^sample 2 of the train split of \S+ has no image; remove it\. `samerun data check` lists"


def labeled(*labels: object, test: list | None = None) -> DatasetDict:
    return table({"image": FOUR, "label": list(labels)}, None if test is None else {"image": FOUR, "label": test})


def imaged(*images: object, features: Features | None = None) -> DatasetDict:
    return table({"image": list(images), "label": [index % 2 for index in range(len(images))]}, features=features)


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (labeled(0, 1, -1, 0), r"^sample 2 of the train split of \S+ has label -1, but labels .* in 0\.\.1 \(1 of 4 are not\)"),
        (labeled(0, 1, 1, 0, test=[0, 1, 1, 2]), r"^sample 3 of the test split of \S+ has label 2, but labels .* in 0\.\.1"),
        (
            labeled(*"abaa", test=[*"azaa"]),
            r"^the test split of \S+ has the labels z, which no training sample has",
        ),
        (labeled(0, None, 1, None), r"^sample 1 of the train split of \S+ has no label \(2 of 4 have none\)"),
        (labeled(0.5, 1, 1, 0), r"^data\.label_column=label: .* holds double in that column; labels must be"),
        (labeled(0, 1, 10**9, 0), r"^data\.label_column=label: .* holds 1000000000; labels must be 0 to"),
        (
            DatasetDict(train=pictures(3), test=pictures(3).cast_column("label", ClassLabel(names=["x", "y", "z"]))),
            r"^two splits have different classes: ant, bee, cat only in the train split",
        ),
        (table({"image": [], "label": []}, features=PICTURES), r"^data\.path=.* cannot be opened: a split has no samples$"),
        (imaged("a"), r"^data\.image_column=image: .* holds string in that column, not images"),
        (imaged(*pixels(2), None), NO_IMAGE),
        (imaged(*pictures(2)["image"], None, features=WITH_FILES), NO_IMAGE),
        (imaged([[1, 2], [3]]), r"^sample 0 of .* is an array of object \[2\]; store integers"),
        (imaged([[1, 256], [3, 4]]), r"^sample 0 of .* is an array of int64 \[1, 2, 2\] with 1\.\.256; store"),
        (imaged(*pixels(1, shape=(5, 5, 2))), r"^sample 0 of .* is an array of \w+ \[5, 5, 2\]; store"),
        (
            table({"image": FOUR, "label": [0] * 4}, {"image": list(pixels(2, shape=(6, 5))), "label": [0, 0]}),
            r"^sample 0 of the test split of .* 5x6 pixels with 1 channel",
        ),
    ],
)
def test_what_is_wrong_with_the_rows_is_named(tmp_path: Path, splits: DatasetDict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        open_data(recipe(save(tmp_path / "rows", splits)))


# What is not there, or not readable


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    path = as_pictures(tmp_path / "rows")
    (path / "train/ant/3.png").write_bytes((path / "train/ant/3.png").read_bytes()[:60])
    named = rf"^{path}/train/ant/3\.png \(sample 1 of the train split of {path}\) cannot be read as an image"
    with pytest.raises(DataError, match=named):
        open_data(recipe(path))
    train = open_data(recipe(path, image_size=6, crop=0.5))["train"]
    with pytest.raises(DataError, match=named):
        everything(train)


def with_configurations(folder: Path) -> Path:
    """A folder as the hub has them, with two configurations of 9 and 4 pictures."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:"]
    for config, size in (("large", 9), ("small", 4)):
        lines.append(f"- config_name: {config}\n  data_files:")
        for split in ("train", "test"):
            pictures(size).to_parquet(folder / f"{config}-{split}.parquet")
            lines.append(f"  - split: {split}\n    path: {config}-{split}.parquet")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def as_single(folder: Path) -> Path:
    pictures().save_to_disk(folder)
    return folder


def as_empty_split(folder: Path) -> Path:
    pictures(0).to_parquet(as_parquet(folder) / "test-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize(
    ("write", "keys", "text"),
    [
        (save, {"label_column": "fine"}, r"^data\.label_column=fine: the train split of \S+ has the columns image, label"),
        (save, {"test_split": "val"}, r"^data\.test_split=val: \S+ has the splits test, train; use one of these$"),
        (as_parquet, {"test_split": "val"}, r"data\.test_split=val cannot be opened: Unknown split .val.\. Should be one of"),
        (as_single, {}, r"rows is a Dataset without splits; save a DatasetDict with a split train$"),
        (as_empty_split, {}, r"rows cannot be opened: Instruction .test. corresponds to no data"),
        (with_configurations, {}, r"Config name is missing|pick one among"),
        (with_configurations, {"hub_config": "huge"}, r"'huge' not found"),
        (save, {"hub_revision": "a" * 40}, r"^data\.hub_revision=a{40}: \S+ is a local path, which has none"),
    ],
)
def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path, write, keys: dict, text: str) -> None:
    with pytest.raises((DataError, RecipeError), match=text):
        open_data(recipe(write(tmp_path / "rows"), **keys))


# The hub


def test_an_unknown_name_is_one_sentence_without_the_network() -> None:
    before = (datasets.config.HF_HUB_OFFLINE, datasets.logging.get_verbosity())
    with pytest.raises(
        DataError, match=r"^data\.path=someone/something is not a file or folder here, nor a data set in the cache"
    ):
        open_data(recipe("someone/something"))
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


def test_a_revision_is_what_was_asked_for_and_not_what_was_cached_last(tmp_path: Path) -> None:
    older, newer, unknown = "a" * 40, "b" * 40, "c" * 40
    for size, commit in ((9, older), (4, newer)):
        folder = tmp_path / str(size) / "something"
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            pictures(size).to_parquet(folder / f"{split}.parquet")
        in_the_cache(folder, commit)
    sizes = {commit: len(open_data(recipe("someone/Something", hub_revision=commit))["train"]) for commit in (older, newer)}
    assert sizes == {older: 9, newer: 4}
    with pytest.raises(DataError, match=rf"hub_revision={unknown} is not in the cache .* set data\.download=true$"):
        open_data(recipe("someone/Something", hub_revision=unknown))


def test_a_revision_of_several_configurations(tmp_path: Path) -> None:
    path, commit = with_configurations(tmp_path / "something"), "a" * 40
    assert [len(open_data(recipe(path, hub_config=config))["train"]) for config in ("large", "small")] == [9, 4]
    for config in ("large", "small"):
        in_the_cache(path, commit, config=config)
    assert len(open_data(recipe("someone/something", hub_revision=commit, hub_config="small"))["test"]) == 4
    with pytest.raises(DataError, match=r"has several configurations: set data\.hub_config to one of large, small$"):
        open_data(recipe("someone/something", hub_revision=commit))
    (problem,) = Sections(data=DataRecipe(hub_config="large")).contradictions()
    assert problem == 'data.hub_config is "large" and data.source is "digits": hub_config is for data.source=huggingface'
    (problem,) = recipe("someone/something", hub_revision="main").contradictions()
    assert 'data.hub_revision is "main": it must be a commit, all 40 hexadecimal digits' in problem


def test_configuration_and_revision_are_in_the_fingerprint(tmp_path: Path) -> None:
    folder, first, second = as_parquet(tmp_path / "something"), "a" * 40, "b" * 40
    in_the_cache(folder, first)
    shutil.copytree(tmp_path / f"cache/someone___something/default/0.0.0/{first}",
                    tmp_path / f"cache/someone___something/default/0.0.0/{second}")  # fmt: skip
    plain, one, other = (
        open_data(recipe("someone/something", hub_revision=commit))["train"] for commit in (None, first, second)
    )
    named = open_data(recipe("someone/something", hub_config="default"))["train"]
    assert len({plain.fingerprint, one.fingerprint, other.fingerprint, named.fingerprint}) == 4
    assert plain.fingerprint == open_data(recipe(folder))["train"].fingerprint


def test_a_download_names_both_and_what_is_here_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setenv("https_proxy", "http://localhost:1")  # through which the hub may be reached
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: asked.append((*args, keys["revision"])))
    commit = "a" * 40
    download_data(recipe("allenai/c4", hub_config="en", hub_revision=commit, download=True))
    download_data(recipe(save(tmp_path / "rows"), download=True))
    download_data(recipe("someone/something"))
    assert asked == [("allenai/c4", "en", commit)]
