"""WebDataset, HDF5, LMDB and TFRecord: the same samples as an image folder, whoever wrote them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import image_sources
import numpy as np
import pytest
import torch
from image_sources import CLASSES, FORMATS, check_contract, check_same, everything, fetched, opened, pack, records, write_folder

from app.tasks.image_classification.data.images import FINGERPRINT_SAMPLES
from app.tasks.image_classification.data.pack import write_webdataset
from app.tasks.image_classification.data.shards import MOST_OPEN_FILES

# The same samples


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_container_is_the_image_folder(image_folder: Path, containers: dict[str, Path], source: str) -> None:
    data = opened(source, containers[source], crop=0.3)
    for expected, found in zip(opened("imagefolder", image_folder, crop=0.3).values(), data.values(), strict=True):
        check_contract(found)
        assert found.workers
        assert found.classes == expected.classes == CLASSES
        indices, samples = np.arange(9)[::-1].copy(), np.arange(9)[::-1] + 18
        for one, other in zip(fetched(expected, indices, samples), fetched(found, indices, samples), strict=True):
            assert torch.equal(one, other)
        image_sources.check_workers_and_pickling(found)


@pytest.mark.parametrize("source", FORMATS)
def test_a_file_that_was_replaced_is_read_anew(image_folder: Path, tmp_path: Path, source: str) -> None:
    before, _ = everything(opened(source, pack(image_folder, tmp_path / "packed", source))["train"])
    shutil.rmtree(tmp_path / "packed")
    expected = opened("imagefolder", write_folder(tmp_path / "images", mode="L"))
    check_same(opened(source, pack(tmp_path / "images", tmp_path / "packed", source)), expected)
    assert not torch.equal(before, everything(expected["train"])[0])


def test_all_containers_of_the_same_images_have_one_fingerprint(containers: dict[str, Path]) -> None:
    prints = [[split.fingerprint for split in opened(source, containers[source]).values()] for source in FORMATS]
    assert prints.count(prints[0]) == 4


def test_gray_images_stay_gray_where_the_recipe_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", mode="L")
    pack(tmp_path / "images", tmp_path / "packed", "webdataset")
    for color, channels in (("auto", 3), ("gray", 1)):
        found = opened("webdataset", tmp_path / "packed", color=color)
        assert found["train"].channels == channels
        check_same(found, opened("imagefolder", tmp_path / "images", color=color))


@pytest.mark.parametrize("source", FORMATS)
def test_class_names_of_any_letters_come_back(tmp_path: Path, source: str) -> None:
    """As folders have them: `\\udcff` is how Python spells a byte that is not UTF-8."""
    names = ("0:a", " b ", "c\u00e9\udcff", "")
    for split in ("train", "test"):
        image_sources.write(source, tmp_path, split, names, [(image_sources.IMAGE, 3)] * 2)
    train = opened(source, tmp_path)["train"]
    assert train.classes == names
    assert everything(train)[1].tolist() == [3, 3]


def test_shards_are_read_in_the_order_of_their_numbers(image_folder: Path, containers: dict[str, Path], tmp_path: Path) -> None:
    samples = list(records(image_folder / "train")) * 20
    write_webdataset(tmp_path, "train", CLASSES, samples, shard_bytes=1)  # one sample a shard: more than are kept open
    assert len(list(tmp_path.glob("train-*.tar"))) == len(samples) == 180 > MOST_OPEN_FILES
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    train = opened("webdataset", tmp_path, test_split="train")["train"]
    expected = everything(opened("webdataset", containers["webdataset"])["train"])
    for one, other in zip(everything(train), expected, strict=True):
        assert torch.equal(one, torch.cat([other] * 20))
    # The other split had its fingerprint taken, and both have an index.
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_OPEN_FILES + FINGERPRINT_SAMPLES + 4  # noqa: PTH208


# Written by others, read by others


def test_shards_of_webdataset_are_read(image_folder: Path, tmp_path: Path) -> None:
    import webdataset  # libraries are imported where they are used: a Python without them collects these tests, too

    (tmp_path / "test").mkdir()
    for split, pattern in (("train", "pets-train-%06d.tar"), ("test", "test/%05d.tar")):
        with webdataset.ShardWriter(str(tmp_path / pattern), maxcount=4, verbose=0) as writer:
            for number, (content, label) in enumerate(records(image_folder / split)):
                key = f"{split}/{label}.x/{number}"  # a dot in the folder is none of the extension
                writer.write({"__key__": key, "jpg": content, "cls": label, "json": {"a": 1}})
    assert len(list(tmp_path.glob("*.tar"))) == len(list(tmp_path.glob("test/*.tar"))) == 3
    expected = opened("imagefolder", image_folder)
    for name in ("train", "*-train-*.tar"):
        found = opened("webdataset", tmp_path, train_split=name)
        assert found["train"].classes == ("0", "1", "2")
        check_same(found, expected)


def test_webdataset_reads_our_shards(image_folder: Path, containers: dict[str, Path]) -> None:
    import webdataset

    with (containers["webdataset"] / "train-000000.tar").open("rb") as shard:
        members = webdataset.tariterators.tar_file_expander([{"url": shard.name, "stream": shard}])
        samples = list(webdataset.tariterators.group_by_keys(members))
    found = [(sample["jpg"] if "jpg" in sample else sample["png"], int(sample["cls"])) for sample in samples]
    assert found == list(records(image_folder / "train"))


@pytest.mark.parametrize(
    ("name", "image", "label"),
    [
        ("{}-0000{}-of-00002", "image/encoded", "image/class/label"),  # as ImageNet's
        ("pets-{}.tfrecord-0000{}-of-00002", "image", "label"),  # as TensorFlow Datasets'
    ],
)
def test_tfrecords_of_others_are_read(image_folder: Path, tmp_path: Path, name: str, image: str, label: str) -> None:
    for split in ("train", "test"):
        samples = list(records(image_folder / split))
        for number, part in enumerate((samples[:4], samples[4:])):
            image_sources.write_examples(tmp_path / name.format(split, number), part, image=image, label=label)
    check_same(opened("tfrecord", tmp_path), opened("imagefolder", image_folder))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_hdf5_of_pixels_is_read(tmp_path: Path, layout: str) -> None:
    import h5py

    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)
    stored = {"NHWC": pixels.transpose(0, 2, 3, 1), "NHW": pixels[:, 0]}.get(layout, pixels)
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"{split}.hdf5", "w") as file:
            file.create_dataset("image", data=stored)
            file.create_dataset("kind", data=np.array([[0], [2], [1], [0], [2]], np.int32))
    train, *_ = opened("hdf5", tmp_path, image_size=None, label_column="kind").values()
    check_contract(train)
    images, labels = everything(train)
    assert torch.equal(images, torch.from_numpy(pixels[:, :1] if layout == "NHW" else pixels))
    assert labels.tolist() == [0, 2, 1, 0, 2]
    assert train.classes == ("0", "1", "2")


def test_lmdb_of_others_is_read(image_folder: Path, tmp_path: Path) -> None:
    image_sources.write_database(tmp_path / "train.lmdb", list(records(image_folder / "train")))
    image_sources.write_database(tmp_path / "test", list(records(image_folder / "test")), subdir=False)
    check_same(opened("lmdb", tmp_path), opened("imagefolder", image_folder))
