"""Splits that are made once, by one of several real processes, whole or not at all, and never held in memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sources import check_contract, everything, write_black

from app.errors import DataError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.arrays import Mapped, Unstored, chunk_rows, keep, open_split, stamps, write_split
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.sections import DataRecipe, Sections

SHAPE = (40, 3, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
LABELS = np.arange(40) % 4
FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_cache_for_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arrays, "SMALL_BYTES", 0)


def unstored(chunks: Iterator[np.ndarray] | None = None) -> Unstored:
    return Unstored(SHAPE, chunks or iter([PIXELS[:15], PIXELS[15:]]), LABELS, ("a", "b", "c", "d"))


def build(log: Path) -> Unstored:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return unstored()


def kept_by_a_process(log: Path, answers) -> None:
    split = keep(["x"], SHAPE, lambda: build(log))
    answers.put((split.pixels.array.copy(), split.labels.copy()))


def test_one_process_makes_it_while_the_others_wait(tmp_path: Path) -> None:
    answers = FORK.Queue()
    processes = [FORK.Process(target=kept_by_a_process, args=(tmp_path / "log", answers)) for _ in range(4)]
    for process in processes:
        process.start()
    for images, labels in [answers.get(timeout=60) for _ in processes]:
        np.testing.assert_array_equal(images, PIXELS)
        np.testing.assert_array_equal(labels, LABELS)
    for process in processes:
        process.join()
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def half_then_wait(reached) -> Iterator[np.ndarray]:
    yield PIXELS[:15]
    reached.set()
    time.sleep(600)


def test_a_process_that_is_killed_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    reached = FORK.Event()
    killed = FORK.Process(target=lambda: keep(["x"], SHAPE, lambda: unstored(half_then_wait(reached))))
    killed.start()
    assert reached.wait(60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    (left,) = (tmp_path / "cache/splits").glob(".*.tmp")
    split = keep(["x"], SHAPE, unstored)
    np.testing.assert_array_equal(split.pixels.array, PIXELS)
    assert not left.exists()


def test_what_is_damaged_is_made_again_and_of_other_files_another_is_made(tmp_path: Path) -> None:
    log = tmp_path / "log"
    keep(["x"], SHAPE, lambda: build(log))
    (images,) = (tmp_path / "cache/splits").glob("*/images.npy")
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    np.testing.assert_array_equal(keep(["x"], SHAPE, lambda: build(log)).pixels.array, PIXELS)
    assert len(log.read_text().splitlines()) == 2
    keep(["y"], SHAPE, lambda: build(log))
    keep(["y"], SHAPE, lambda: build(log))
    assert len(log.read_text().splitlines()) == 3


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    before = stamps([tmp_path / "file"])
    os.utime(tmp_path / "file", (0, 0))
    assert stamps([tmp_path / "file"]) != before
    with pytest.raises(DataError, match=r"other cannot be read \(No such file"):
        stamps([tmp_path / "other"])


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"file/splits, the cache for unpacked data, cannot be used \(Not a directory\); set SAMERUN_CACHE"
    ):
        keep(["x"], SHAPE, unstored)


def test_a_mapped_split_is_pickled_as_its_place(tmp_path: Path) -> None:
    write_split(tmp_path / "train", unstored())
    split = open_split(tmp_path / "train")
    assert len(pickle.dumps(split.pixels)) < 1000 < PIXELS.nbytes
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(split.pixels)).array, PIXELS)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(Mapped(PIXELS))).array, PIXELS)
    with pytest.raises(DataError, match=r"train cannot be written"):
        write_split(tmp_path / "train", unstored())
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_a_packed_split_is_a_source(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_split(tmp_path / name, unstored())
    data = DataRecipe(source="arrays", path=str(tmp_path))
    train, *_ = open_data(Sections(data=data))
    check_contract(train)
    assert torch.equal(everything(train)[0], torch.from_numpy(PIXELS))
    resized, *_ = open_data(Sections(data=replace(data, image_size=4)))
    again, *_ = open_data(Sections(data=replace(data, image_size=4)))
    assert resized.image_size == (4, 4)
    assert torch.equal(everything(resized)[0], everything(again)[0])
    assert len(list((tmp_path / "cache/splits").glob("*/images.npy"))) == 2, "each split is resized once"
    (tmp_path / "test/labels.npy").unlink()
    with pytest.raises(DataError, match=r"test is not a complete split of arrays .*pack it again"):
        open_data(Sections(data=data))


def test_pictures_of_other_sizes_are_decoded_once(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(array) for array in PIXELS.transpose(0, 2, 3, 1)], "label": LABELS.tolist()},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "rows")
    recipe = Sections(data=DataRecipe(source="huggingface", path=str(tmp_path / "rows")))
    first, *_ = open_data(recipe)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/splits").glob("*/images.npy")}
    second, *_ = open_data(recipe)
    assert made
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    assert torch.equal(everything(second)[0], torch.from_numpy(PIXELS))
    assert first.fingerprint == second.fingerprint


def look_at_all(recipe: Sections) -> None:
    """Open the data and fetch every training sample once."""
    source = open_data(recipe).train
    for start in range(0, len(source), 128):
        source.fetch(np.arange(start, min(start + 128, len(source))), None)


def own_bytes(process: int) -> int:
    """What a process has for itself (proc(5), RssAnon); 0 if it has ended."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def peak_own_bytes(work: Callable[[], None]) -> int:
    """By how much the memory of a forked process that does `work` grows at most, seen from outside."""
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(wait, 1)
        failed = 1
        try:
            work()
            failed = 0
        finally:
            os._exit(failed)
    before = peak = own_bytes(child)
    os.write(go, b"x")
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        peak = max(peak, own_bytes(child))
        time.sleep(0.001)
    os.close(wait)
    os.close(go)
    assert ended[1] == 0
    return peak - before


@pytest.mark.parametrize("compress", [False, True])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, compress: bool) -> None:
    small, large = (write_black(tmp_path / str(size), size, compress=compress) for size in (10_000, 100_000))
    grown = {}
    for name, recipe in (("small", small), ("large", large)):
        for turn in ("first", "later"):
            grown[name, turn] = peak_own_bytes(lambda recipe=recipe: look_at_all(recipe)) / 2**20
    held_mib = 100_000 * 28 * 28 / 2**20
    assert held_mib > 70
    # A few pieces of 4 MiB while it is unpacked, however many there are; what already exists needs none.
    assert grown["large", "first"] < grown["small", "first"] + 8, grown
    assert grown["large", "first"] < 24, grown
    assert grown["large", "later"] < 8, grown


def test_a_chunk_holds_at_least_one_picture() -> None:
    assert chunk_rows((10, 3, 10_000, 10_000)) == 1
