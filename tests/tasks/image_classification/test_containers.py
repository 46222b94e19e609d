"""WebDataset, HDF5, LMDB and TFRecord: the same samples as an image folder, whoever wrote them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import CLASSES, FORMATS, check_same, opened, pack, records, write_database, write_examples, write_folder
from sources import check_contract, check_workers_and_pickling, everything, fetched

# The same samples


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_container_is_the_image_folder(pictures: Path, packed: dict[str, Path], source: str) -> None:
    pairs = zip(
        opened("imagefolder", pictures, crop=0.3).values(), opened(source, packed[source], crop=0.3).values(), strict=True
    )
    for expected, found in pairs:
        check_contract(found)
        assert found.workers
        assert found.classes == expected.classes == CLASSES
        indices, samples = np.arange(9)[::-1].copy(), np.arange(9)[::-1] + 18
        for one, other in zip(fetched(expected, indices, samples), fetched(found, indices, samples), strict=True):
            assert torch.equal(one, other)
        check_workers_and_pickling(found)


@pytest.mark.parametrize("source", FORMATS)
def test_readers_of_one_file_do_not_disturb_each_other(packed: dict[str, Path], source: str) -> None:
    data = opened(source, packed[source], test_split="train")
    again = opened(source, packed[source])["train"]
    expected, _ = everything(data["train"])
    for found in (data["test"], again, pickle.loads(pickle.dumps(data["train"])), data["train"]):
        assert torch.equal(everything(found)[0], expected)


@pytest.mark.parametrize("source", FORMATS)
def test_a_file_that_was_replaced_is_read_anew(pictures: Path, tmp_path: Path, source: str) -> None:
    before, _ = everything(opened(source, pack(pictures, tmp_path / "packed", source))["train"])
    shutil.rmtree(tmp_path / "packed")
    write_folder(tmp_path / "pictures", mode="L")
    expected = opened("imagefolder", tmp_path / "pictures")
    check_same(opened(source, pack(tmp_path / "pictures", tmp_path / "packed", source)), expected)
    assert not torch.equal(before, everything(expected["train"])[0])


def test_all_containers_of_the_same_pictures_have_one_fingerprint(packed: dict[str, Path]) -> None:
    facts = [[split.fingerprint for split in opened(source, packed[source]).values()] for source in FORMATS]
    assert facts.count(facts[0]) == 4


@pytest.mark.parametrize("source", FORMATS)
def test_gray_pictures_stay_gray_where_the_recipe_says_so(tmp_path: Path, source: str) -> None:
    write_folder(tmp_path / "pictures", mode="L")
    pack(tmp_path / "pictures", tmp_path / "packed", source)
    for color, channels in (("auto", 3), ("gray", 1)):
        found = opened(source, tmp_path / "packed", color=color)
        assert found["train"].channels == channels
        check_same(found, opened("imagefolder", tmp_path / "pictures", color=color))


# Written by others, read by others


def test_shards_of_webdataset_are_read(pictures: Path, tmp_path: Path) -> None:
    import webdataset  # libraries are imported where they are used: a Python without them collects these tests, too

    (tmp_path / "test").mkdir()
    for split, pattern in (("train", "pets-train-%06d.tar"), ("test", "test/%05d.tar")):
        with webdataset.ShardWriter(str(tmp_path / pattern), maxcount=4, verbose=0) as writer:
            for number, (content, label) in enumerate(records(pictures / split)):
                key = f"{split}/{label}.x/{number}"  # a dot in the folder is none of the extension
                writer.write({"__key__": key, "jpg": content, "cls": label, "json": {"a": 1}})
    assert len(list(tmp_path.glob("*.tar"))) == len(list(tmp_path.glob("test/*.tar"))) == 3
    expected = opened("imagefolder", pictures)
    for name in ("train", "*-train-*.tar"):
        found = opened("webdataset", tmp_path, train_split=name)
        assert found["train"].classes == ("0", "1", "2")
        check_same(found, expected)


def test_webdataset_reads_our_shards(pictures: Path, packed: dict[str, Path]) -> None:
    import webdataset

    with (packed["webdataset"] / "train-000000.tar").open("rb") as shard:
        members = webdataset.tariterators.tar_file_expander([{"url": shard.name, "stream": shard}])
        samples = list(webdataset.tariterators.group_by_keys(members))
    found = [(sample["jpg"] if "jpg" in sample else sample["png"], int(sample["cls"])) for sample in samples]
    assert found == list(records(pictures / "train"))


@pytest.mark.parametrize(
    ("name", "image", "label"),
    [
        ("{}-0000{}-of-00002", "image/encoded", "image/class/label"),  # as ImageNet's
        ("pets-{}.tfrecord-0000{}-of-00002", "image", "label"),  # as TensorFlow Datasets'
    ],
)
def test_tfrecords_of_others_are_read(pictures: Path, tmp_path: Path, name: str, image: str, label: str) -> None:
    for split in ("train", "test"):
        samples = list(records(pictures / split))
        for number, part in enumerate((samples[:4], samples[4:])):
            write_examples(tmp_path / name.format(split, number), part, image=image, label=label)
    check_same(opened("tfrecord", tmp_path), opened("imagefolder", pictures))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW", "compressed"])
def test_hdf5_of_pixels_is_read(tmp_path: Path, layout: str) -> None:
    import h5py

    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)
    stored = {"NHWC": pixels.transpose(0, 2, 3, 1), "NHW": pixels[:, 0]}.get(layout, pixels)
    for split in ("train", "test"):
        with h5py.File(tmp_path / f"{split}.hdf5", "w") as file:
            file.create_dataset("image", data=stored, compression="gzip" if layout == "compressed" else None)
            file.create_dataset("kind", data=np.array([[0], [2], [1], [0], [2]], np.int32))
    train, *_ = opened("hdf5", tmp_path, image_size=None, label_column="kind").values()
    check_contract(train)
    images, labels = everything(train)
    assert torch.equal(images, torch.from_numpy(pixels[:, :1] if layout == "NHW" else pixels))
    assert labels.tolist() == [0, 2, 1, 0, 2]
    assert train.classes == ("0", "1", "2")


def test_lmdb_of_others_is_read(pictures: Path, tmp_path: Path) -> None:
    write_database(tmp_path / "train.lmdb", list(records(pictures / "train")))
    write_database(tmp_path / "test", list(records(pictures / "test")), subdir=False)
    check_same(opened("lmdb", tmp_path), opened("imagefolder", pictures))
