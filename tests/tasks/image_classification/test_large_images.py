"""Images that would take gigabytes are decoded smaller or refused, and whatever Pillow raises is a sentence."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

from app.errors import DataError
from app.tasks.image_classification.data import decoding
from app.tools.data_command import main

KEYS = ["data.image_size=16", "augment.resized_crop_min_area=null", "data.resize_size=null"]
SAID = "12000x8000 pixels: above 64 megapixels only baseline JPEG files are decoded"


def png(width: int, height: int) -> bytes:
    """A black PNG file."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes((width + 1) * height), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def jpeg_file(*, progressive: bool) -> bytes:
    """An image whose left half is black, and whose right half is white."""
    file, image = io.BytesIO(), Image.new("L", (12000, 8000))
    image.paste(255, (6000, 0, 12000, 8000))
    image.save(file, "JPEG", progressive=progressive)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            (tmp_path / "pictures" / split / name).mkdir(parents=True)
            (tmp_path / "pictures" / split / name / "0.png").write_bytes(png(20, 24))
    return tmp_path / "pictures"


def test_a_large_png_is_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = folder / "train/ant/large.png"
    large.write_bytes(png(12000, 8000))
    assert main(["check", str(folder), *KEYS, "--workers", "1"]) == DataError.exit_code
    assert f"unreadable: train/ant/large.png: {large} has {SAID}" in capsys.readouterr().out


def test_a_large_jpeg_is_decoded_at_half_its_sides_by_pillow(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(content: bytes, **_: object) -> None:
        raise AssertionError("torchcodec must not decode it")

    monkeypatch.setattr(decoding, "torchcodec", lambda: refuse)
    (folder / "train/ant/large.jpg").write_bytes(jpeg_file(progressive=False))
    assert main(["inspect", str(folder), "--json", "--workers", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)["train"]
    assert (facts["width_px"]["max"], facts["height_px"]["max"]) == (12000, 8000)
    assert main(["pack", str(folder), "--to", "webdataset", "--out", str(tmp_path / "out"), "--max-side", "7000"]) == 0
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar, Image.open(tar.extractfile("00000001.jpg")) as packed:
        assert packed.size == (10500, 7000)
    (folder / "train/ant/large.jpg").write_bytes(jpeg_file(progressive=True))
    assert main(["inspect", str(folder), "--workers", "1"]) == DataError.exit_code
    assert f"unreadable in train: {folder}/train/ant/large.jpg has {SAID}" in capsys.readouterr().out


def test_what_pillow_raises_where_a_file_is_only_looked_at_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(png(20, 24)[:20] + b"\0\0")  # no OSError in Pillow
    assert main(["inspect", str(tmp_path), "--workers", "1"]) == DataError.exit_code
    assert f"{tmp_path}/train/ant/0.png cannot be read as an image (" in capsys.readouterr().out
