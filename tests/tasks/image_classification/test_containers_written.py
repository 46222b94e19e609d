"""Names of classes, shards, and the index of their samples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import CLASSES, FORMATS, PICTURE, opened, pack, records, refused, write
from processes import clean_environment
from sources import everything

from app.data.preprocessing import one_process_per_node
from app.errors import DataError
from app.tasks.image_classification.data.images import FINGERPRINT_SAMPLES
from app.tasks.image_classification.data.pack import write_webdataset
from app.tasks.image_classification.data.shards import MOST_OPEN_FILES

# Writing


@pytest.mark.parametrize("source", FORMATS)
def test_names_of_any_letters_come_back(tmp_path: Path, source: str) -> None:
    """As folders have them: `\\udcff` is how Python spells a byte that is no UTF-8."""
    names = ("0:a", " b ", "c\u00e9\udcff", "")
    for split in ("train", "test"):
        write(source, tmp_path, split, names, [(PICTURE, 3)] * 2)
    train, *_ = opened(source, tmp_path)
    assert train.classes == names
    assert everything(train)[1].tolist() == [3, 3]


def test_shards_are_numbered_and_read_in_order(pictures: Path, packed: dict[str, Path], tmp_path: Path) -> None:
    samples = list(records(pictures / "train")) * 20
    write_webdataset(tmp_path, "train", CLASSES, samples, shard_bytes=1)  # one sample a shard: more shards than are kept open
    assert len(samples) > MOST_OPEN_FILES
    assert {path.name for path in tmp_path.glob("train-*")} == {f"train-{index:06d}.tar" for index in range(180)}
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    train, *_ = opened("webdataset", tmp_path, test_split="train")
    for one, other in zip(everything(train), everything(opened("webdataset", packed["webdataset"]).train), strict=True):
        assert torch.equal(one, torch.cat([other] * 20))
    # The other split had its fingerprint taken, and both have an index.
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_OPEN_FILES + FINGERPRINT_SAMPLES + 4  # noqa: PTH208
    (tmp_path / "train-000007.tar").unlink()
    sentence = rf"^{tmp_path} lacks 1 of 180 shards of data\.train_split=train: train-000007\.tar; copy"
    refused("webdataset", tmp_path, sentence)


# The index

INDEXING = """
import sys
from pathlib import Path
from app.tasks.image_classification.data.shards import indexed

def read(path):
    print("reads", flush=True)
    yield 0, 1, 0

print(indexed([Path(sys.argv[1])], "kind", read).rows.place[0])
"""


def indexing(shard: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INDEXING, str(shard)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())


def test_processes_make_an_index_once(tmp_path: Path) -> None:
    shard, lock = tmp_path / "train.tar", tmp_path / ".samerun.lock"
    shard.write_bytes(b"x")
    with one_process_per_node(lock):
        started = [indexing(shard) for _ in range(3)]
        while len(re.findall(rf"-> FLOCK .*:{lock.stat().st_ino} ", Path("/proc/locks").read_text())) < 3:
            assert all(process.poll() is None for process in started)
    outputs = [process.communicate()[0] for process in started]
    assert sorted(output.count("reads") for output in outputs) == [0, 0, 1]
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_the_index_is_made_again_when_a_shard_has_changed(pictures: Path, tmp_path: Path) -> None:
    pack(pictures, tmp_path, "webdataset")
    shard = tmp_path / "train-000000.tar"

    def indexes() -> set[int]:
        opened("webdataset", tmp_path)
        return {path.stat().st_ino for path in tmp_path.glob(".samerun-index-*")}

    first = indexes()
    assert len(first) == 2
    assert indexes() == first
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        label = tar.getmember("00000000.cls")
    content[label.offset_data : label.offset_data + 1] = b"2"
    shard.write_bytes(content)  # as long as before
    assert len(indexes() & first) == 1
    assert len(indexes()) == 2
    assert opened("webdataset", tmp_path).train.fetch(np.array([0]), None)["labels"].item() == 2


def test_where_the_data_cannot_be_written_the_index_is_kept_in_the_cache(
    packed: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("data", "cache"):
        monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
        shutil.copytree(packed["tfrecord"], tmp_path / place / "packed", ignore=shutil.ignore_patterns(".*"))
    path = tmp_path / "data" / "packed"
    (path / ".samerun.lock").mkdir()  # stands in the way even of a superuser
    train, *_ = opened("tfrecord", path)
    assert not list(path.glob(".samerun-index-*"))
    indexes = list((tmp_path / "cache").rglob(".samerun-index-*"))
    assert [index.stat().st_size for index in indexes] == [128 + 9 * 32] * 2
    assert len(train) == 9
    monkeypatch.setenv("SAMERUN_CACHE", str(path / "labels.txt"))
    shutil.rmtree(tmp_path / "cache" / "indexes")
    with pytest.raises(
        DataError, match=rf"the index of {path} cannot be written to {path} \(Is a directory\) nor in .*SAMERUN_CACHE"
    ):
        opened("tfrecord", path)
