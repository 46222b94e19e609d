"""`samerun data`: what it says of data is so, and what it packs is the same data."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from image_sources import FORK, check_same, everything, write_black, write_folder
from PIL import Image

from app.data.preprocessing import in_order
from app.errors import DataError, RecipeError
from app.tasks.image_classification.data.command import FORMATS, main, recipe_of
from app.tasks.image_classification.data.open import open_data

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
WHOLE = ["data.image_size=null", "data.resize_size=null", "augment.resized_crop_min_area=null"]
"""Images as they are stored."""


def files_in(folder: Path, split: str) -> list[tuple[str, bytes]]:
    """Return the images of a split in a folder of tar files, by name."""
    with tarfile.open(folder / f"{split}-000000.tar") as tar:
        return [(m.name, tar.extractfile(m).read()) for m in tar.getmembers() if m.name.endswith(("jpg", "png"))]


def test_only_large_images_are_shrunk_and_all_keep_their_place(image_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    assert main(["pack", str(image_folder), "--to", "webdataset", "--out", str(out), "--max-side", "30", "--workers", "2"]) == 0
    before = sorted((image_folder / "train").rglob("*.*"))
    for path, (name, content) in zip(before, files_in(out, "train"), strict=True):
        with Image.open(io.BytesIO(content)) as image, Image.open(path) as original:
            assert image.format == original.format == {"jpg": "JPEG", "png": "PNG"}[name[-3:]]
            if min(original.size) <= 30:
                assert content == path.read_bytes()
                continue
            assert (original.size, image.size) == ((31, 47), (30, 45))
            small = np.asarray(original.resize(image.size, Image.Resampling.LANCZOS), np.float32)
            assert np.abs(np.asarray(image, np.float32) - small).mean() < 6, "it is another image"
    recipe = recipe_of([str(out), "data.image_size=16", "augment.resized_crop_min_area=null"])
    assert everything(open_data(recipe.sections)["train"])[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_pack_holds_the_same_samples(
    image_folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["data.image_size=16", "data.resize_size=20", "augment.resized_crop_min_area=null"]
    out, packing = str(tmp_path / "out"), size[:2] if kind == "arrays" else []
    assert main(["pack", str(image_folder), *packing, "--to", kind, "--out", out, "--workers", "1"]) == 0
    keys = capsys.readouterr().out.split(" with ")[1].split()
    assert recipe_of([str(out)]).sections.data.source == {"parquet": "huggingface"}.get(kind, kind)
    packed = open_data(recipe_of(["imagefolder", *keys, *(WHOLE if kind == "arrays" else size)]).sections)
    before = open_data(recipe_of([str(image_folder), *size]).sections)
    check_same(packed, before)
    assert all(packed[split].classes == before[split].classes for split in before)


def test_pixels_become_images_and_arrays_keep_their_fingerprint(tmp_path: Path) -> None:
    for kind in ("arrays", "webdataset"):
        main(["pack", "digits", "--to", kind, "--out", str(tmp_path / kind), "--workers", "1"])
    before, after = (open_data(recipe_of([name, *WHOLE]).sections) for name in ("digits", str(tmp_path / "arrays")))
    assert [split.fingerprint for split in before.values()] == [split.fingerprint for split in after.values()]
    images, _ = everything(before["test"])
    files = files_in(tmp_path / "webdataset", "test")
    assert len(files) == len(images)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(files[7][1]))), images[7, 0].numpy())


def test_a_failed_pack_leaves_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    with pytest.raises(RecipeError, match=r"--max-side is for formats that hold files"):
        main(["pack", str(folder), "--to", "arrays", "--max-side", "9", "--out", str(tmp_path / "new")])
    (folder / "train/cat/0.jpg").write_bytes(b"no image")
    for words in (["hdf5", "--max-side", "9"], ["webdataset"]):
        with pytest.raises(DataError, match=rf"^{folder}/train/cat/0\.jpg cannot be read as an image"):
            main(["pack", str(folder), "--out", str(tmp_path / "new"), "--to", *words])
    assert [path.name for path in tmp_path.iterdir()] == ["images"]


def test_a_pack_that_is_killed_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    write_black(tmp_path / "idx", 300_000)
    # So many that it is still at work when it is killed: all are read by two processes and written by one.
    command = ["pack", str(tmp_path / "idx"), *WHOLE, "--to", "arrays", "--out", str(tmp_path / "out"), "--workers", "2"]
    packing = FORK.Process(target=main, args=(command,))
    packing.start()
    readers: list[psutil.Process] = []
    while len(readers) < 2 or not list(tmp_path.glob(".out.*.tmp/train/images.npy")):
        assert packing.is_alive()
        readers = psutil.Process(packing.pid).children()
        time.sleep(0.001)
    packing.kill()
    packing.join()
    _, alive = psutil.wait_procs(readers, timeout=20)
    assert not alive, "the processes it started end with it"
    assert not (tmp_path / "out").exists()


def test_inspect_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "images")
    (folder / "train/bee/3.png").write_bytes(b"no image")
    assert main(["inspect", str(folder), "--all", "--json", "--workers", "2"]) == DataError.exit_code
    facts = json.loads(capsys.readouterr().out)
    train, test = facts["train"], facts["test"]
    assert (train["samples"], test["samples"], train["classes"], "validation" in facts) == (10, 9, 3, False)
    assert train["samples_by_class"] == {"ant": 3, "bee": 4, "cat": 3}
    assert train["stored_as"] == {"JPEG": 6, "PNG": 3}
    assert (train["width_px"]["min"], train["width_px"]["max"], train["height_px"]["max"]) == (25, 40, 60)
    (text,) = train["unreadable"]
    assert "bee/3.png cannot be read" in text
    whole = [np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3) / 255 for path in (folder / "test").rglob("*.*")]
    mean = np.mean([pixels.mean(0) for pixels in whole], 0)
    std = np.sqrt(np.mean([(pixels**2).mean(0) for pixels in whole], 0) - mean**2)
    np.testing.assert_allclose(test["mean"], mean, atol=2e-4)
    np.testing.assert_allclose(test["std"], std, atol=2e-4)
    assert train["fingerprint"] == open_data(recipe_of([str(folder)]).sections)["train"].fingerprint
    (folder / "train/bee/3.png").rename(folder / "train/bee/3\n.png")
    assert main(["inspect", str(folder), "--all"]) == DataError.exit_code
    assert rf"{folder}/train/bee/3\n.png cannot be read" in capsys.readouterr().out
    (folder / "train/bee/3\n.png").unlink()
    for path in (folder, folder / "train"):  # class folders alone are a training split
        assert main(["inspect", str(path)]) == 0
        assert f"data.source=imagefolder data.path={path}\n" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"train/bee contains images, and no class folders: put each .*/bee/<class>/"):
        main(["inspect", str(folder / "train/bee")])


def die_at_5(piece: range) -> list[int]:
    if 5 in piece and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return list(piece)


def test_several_processes_give_results_in_order_and_a_killed_one_is_reported() -> None:
    assert list(itertools.chain(*in_order(list, 50, piece=3, processes=3))) == list(range(50))
    with pytest.raises(DataError, match="one of 2 processes was killed"):
        list(in_order(die_at_5, 50, piece=3, processes=2))
