"""Containers that are damaged, cut or something else: what is wrong, where, and what to do."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_sources import CLASSES, FORMATS, IMAGE, opened, records, refused, write, write_database, write_examples

from app.tasks.image_classification.data import shards


@pytest.fixture
def copied(containers: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a container, without its index, to be damaged."""

    def copy(source: str) -> Path:
        return Path(shutil.copytree(containers[source], tmp_path / source, ignore=shutil.ignore_patterns(".*")))

    return copy


@pytest.mark.parametrize("source", FORMATS)
def test_what_is_missing_is_named(containers: dict[str, Path], tmp_path: Path, source: str) -> None:
    path = containers[source]
    refused(source, path, rf"^{path} contains no .* data\.test_split=val.*; correct data\.path or", test_split="val")
    refused(source, tmp_path / "none", rf"^(data\.path=)?{tmp_path}/none .*; correct data\.path")


@pytest.mark.parametrize("source", [source for source in FORMATS if source != "tfrecord"])  # one list for all splits
def test_splits_of_other_classes_are_refused(image_folder: Path, tmp_path: Path, source: str) -> None:
    for split, classes in (("train", CLASSES), ("test", ("ant", "bee", "dog"))):
        write(source, tmp_path / "train", split, classes, list(records(image_folder / split)))
    refused(source, tmp_path / "train", r"^two splits have different classes: 'cat' only in .*; 'dog' only in")


def training_file(path: Path) -> Path:
    (file,) = (file for file in path.rglob("*") if file.is_file() and "train" in str(file.relative_to(path)))
    return file


@pytest.mark.parametrize("source", FORMATS)
def test_a_container_that_was_cut_is_refused_when_it_is_opened(copied: Callable[[str], Path], source: str) -> None:
    path = copied(source)
    file = training_file(path)
    os.truncate(file, file.stat().st_size - 5000)
    refused(source, path, rf"^(the record at byte \d+ of )?{file} .*(cut|truncated|end of data).*replace")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("webdataset", r"00000000\.jpg of {} \(sample 0\) cannot be read as an image"),
        ("tfrecord", r"the record at byte 0 of {} is damaged or truncated \(its CRC differs\); replace the file"),
        ("hdf5", r"sample 0 of {} cannot be read as an image"),
        ("lmdb", r"record 00000000 of \S+/train\.lmdb cannot be read as an image"),
    ],
)
def test_a_damaged_image_is_named(copied: Callable[[str], Path], image_folder: Path, source: str, sentence: str) -> None:
    path = copied(source)
    file, first = training_file(path), (image_folder / "train/ant/0.jpg").read_bytes()
    change(file, at=file.read_bytes().index(first), to=bytes(len(first) // 2))
    refused(source, path, f"^{sentence.format(file)}")


def test_damage_that_lmdb_finds_is_reported(copied: Callable[[str], Path]) -> None:
    found = copied("lmdb") / "train.lmdb"
    for place in range(8192, 1 << 15, 4096):
        change(found / "data.mdb", at=place, to=bytes(600))
    refused("lmdb", found.parent, rf"^{found} cannot be read \(.*CORRUPTED.*\); replace it\. `samerun data check` lists")


def shard_of(path: Path, *members: tuple[str, bytes]) -> None:
    for split in ("train", "test"):
        with tarfile.open(path / f"{split}.tar", "w") as tar:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def change(path: Path, *, at: int, to: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(to)


AN_IMAGE = ("a.jpg", IMAGE)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ([AN_IMAGE], r"the sample a of {} has the members jpg, but needs exactly one image \(\.jpg, .*\) and one cls"),
        ([AN_IMAGE, ("a.cls", b"ant")], r"a\.cls of {} holds b'ant', not a class number; correct or remove the sample"),
        ([("__classes__", b"ant bee"), AN_IMAGE, ("a.cls", b"1")], r"__classes__ of {} is b'ant bee', not a JSON list"),
        ([("readme", b"")], r"{}: no samples found"),
    ],
)
def test_a_tar_file_that_is_no_shard(tmp_path: Path, members: list[tuple[str, bytes]], sentence: str) -> None:
    shard_of(tmp_path, *members)
    refused("webdataset", tmp_path, "^" + sentence.format(tmp_path / "train.tar"))


def test_damage_in_the_middle_of_a_tar_file_is_not_its_end(tmp_path: Path) -> None:
    shard_of(tmp_path, *[(f"{index}.{kind}", b"1") for index in range(3) for kind in ("jpg", "cls")])
    change(tmp_path / "train.tar", at=2048, to=b"x" * 512)
    refused("webdataset", tmp_path, r"train\.tar cannot be read \(it is damaged or truncated at byte 2048\)")


def test_two_sets_of_shards_are_told_apart_by_a_pattern(containers: dict[str, Path], tmp_path: Path) -> None:
    for name in ("cats-train-000000.tar", "dogs-train-000000.tar"):
        shutil.copy(containers["webdataset"] / "train-000000.tar", tmp_path / name)
    sentence = r"^data\.train_split=train could be any of .*dogs-train-000000\.tar .*; choose one with a pattern"
    refused("webdataset", tmp_path, sentence)
    assert len(opened("webdataset", tmp_path, train_split="cats-*.tar", test_split="dogs-*.tar")["test"]) == 9


def test_tfrecords_that_cannot_be_read(copied: Callable[[str], Path], image_folder: Path) -> None:
    path = copied("tfrecord")
    (shard,) = path.glob("train-*")
    write_examples(shard, list(records(image_folder / "train"))[:1], image="photo", label="kind")
    refused("tfrecord", path, rf"^the record at byte 0 of {shard} has the features height, kind, photo, but needs")
    assert len(opened("tfrecord", path, image_column="photo", label_column="kind", test_split="train")["train"]) == 1
    change(shard, at=0, to=b"\xff")
    refused("tfrecord", path, rf"^the record at byte 0 of {shard} is not a TFRecord \(the CRC of its length is wrong\)")
    content = b"no example"
    length = shards.HEADER.pack(len(content), 0)[:8]
    crcs = [shards.FOOTER.pack(shards.masked_crc(part)) for part in (length, content)]
    shard.write_bytes(length + crcs[0] + content + crcs[1])
    refused("tfrecord", path, rf"^the record at byte 0 of {shard} is not a tf\.train\.Example")
    (path / "labels.txt").write_text("ant\nbee\n")
    refused("tfrecord", path, rf"^{path}/labels\.txt does not list the classes 0, 1, \.\.\. in order", train_split="test")


def test_hdf5_that_cannot_be_read(tmp_path: Path) -> None:
    import h5py  # libraries are imported where they are used: a Python without them collects these tests, too

    for split, name, images in (("other", "x", [1]), ("floats", "images", np.zeros((1, 8, 8), np.float32))):
        with h5py.File(tmp_path / f"{split}.h5", "w") as file:
            file.create_dataset(name, data=images)
            file.create_dataset("labels", data=[0])
    sentence = rf"^{tmp_path}/other\.h5 contains none of the datasets images, image, but labels, x; set data\.image_column"
    refused("hdf5", tmp_path, sentence, train_split="other")
    sentence = r"floats\.h5: /images is float32 \[1, 8, 8\] and /labels is int64 \[1\]; store"
    refused("hdf5", tmp_path, sentence, train_split="floats")


def test_databases_that_cannot_be_read(tmp_path: Path) -> None:
    import lmdb

    wrong, hole = tmp_path / "wrong.lmdb", tmp_path / "hole.lmdb"
    write_database(wrong, [(IMAGE, 0)] * 2, __len__=b"3")
    found = rf"^{wrong} holds 2 images, but its __labels__ have 16 bytes and its __len__ is b'3'; write it as described"
    refused("lmdb", tmp_path, found, train_split="wrong")
    write_database(hole, [(IMAGE, 0)] * 2, another=b"")
    with lmdb.open(str(hole)) as environment, environment.begin(write=True) as transaction:
        transaction.delete(b"00000001")
    refused("lmdb", tmp_path, rf"^record 00000001 of {hole} does not exist", train_split="hole")


@pytest.mark.parametrize(("source", "module"), [("hdf5", "h5py"), ("lmdb", "lmdb"), ("tfrecord", "google_crc32c")])
def test_a_library_that_is_missing_is_named(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, source: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what an import then raises is what it raises without the library
    refused(source, copied(source), r'needs a library that is not installed \(.*\): pip install -e "\.\[formats\]"$')
