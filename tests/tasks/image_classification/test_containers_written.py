"""Names of classes, shards, and the index of their samples."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import CLASSES, FORMATS, PICTURE, opened, pack, records, write
from sources import everything

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
    train = opened(source, tmp_path)["train"]
    assert train.classes == names
    assert everything(train)[1].tolist() == [3, 3]


def test_shards_are_numbered_and_read_in_order(pictures: Path, packed: dict[str, Path], tmp_path: Path) -> None:
    samples = list(records(pictures / "train")) * 20
    write_webdataset(tmp_path, "train", CLASSES, samples, shard_bytes=1)  # one sample a shard: more shards than are kept open
    assert len(samples) > MOST_OPEN_FILES
    assert {path.name for path in tmp_path.glob("train-*")} == {f"train-{index:06d}.tar" for index in range(180)}
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    train = opened("webdataset", tmp_path, test_split="train")["train"]
    for one, other in zip(everything(train), everything(opened("webdataset", packed["webdataset"])["train"]), strict=True):
        assert torch.equal(one, torch.cat([other] * 20))
    # The other split had its fingerprint taken, and both have an index.
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_OPEN_FILES + FINGERPRINT_SAMPLES + 4  # noqa: PTH208


# The index


def test_the_index_is_made_again_when_a_shard_has_changed(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
    shard = pack(pictures, tmp_path / "packed", "webdataset") / "train-000000.tar"

    def indexes() -> set[int]:
        opened("webdataset", tmp_path / "packed")
        return {path.stat().st_ino for path in (tmp_path / "cache" / "indexes").glob("*/index.npy")}

    first = indexes()
    assert len(first) == 2
    assert indexes() == first
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        label = tar.getmember("00000000.cls")
    content[label.offset_data : label.offset_data + 1] = b"2"
    shard.write_bytes(content)  # as long as before
    assert len(indexes() - first) == 1
    assert opened("webdataset", tmp_path / "packed")["train"].fetch(np.array([0]), None)["labels"].item() == 2
