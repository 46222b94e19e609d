"""Splits and copies that are made once, by one of several processes, whole or not at all, and never held in memory."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from image_sources import FORK, check_contract, everything, recipe, write_black

from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.arrays import Unstored, keep, open_split, write_split
from app.tasks.image_classification.data.open import open_data, staged

SHAPE = (40, 3, 6, 5)
PIXELS = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
LABELS = np.arange(40) % 4

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_cache_for_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arrays, "SMALL_BYTES", 0)


def unstored(chunks: Iterator[np.ndarray] | None = None) -> Unstored:
    return Unstored(SHAPE, chunks or iter([PIXELS[:15], PIXELS[15:]]), LABELS, ("a", "b", "c", "d"))


def test_one_process_makes_it_while_the_others_wait() -> None:
    answers, builds = FORK.Queue(), FORK.Queue()

    def build() -> Unstored:
        builds.put(1)
        return unstored()

    processes = [FORK.Process(target=lambda: answers.put(keep(["x"], 1, build).pixels.array.copy())) for _ in range(4)]
    for process in processes:
        process.start()
    for images in [answers.get(timeout=60) for _ in processes]:
        np.testing.assert_array_equal(images, PIXELS)
    for process in processes:
        process.join()
    keep(["y"], 1, build)  # of other files another is made
    assert [builds.get(timeout=60) for _ in range(2)] == [1, 1]
    assert builds.empty()


def test_a_process_that_is_killed_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    reached = FORK.Event()

    def half_then_wait() -> Iterator[np.ndarray]:
        yield PIXELS[:15]
        reached.set()
        time.sleep(600)

    killed = FORK.Process(target=lambda: keep(["x"], 1, lambda: unstored(half_then_wait())))
    killed.start()
    assert reached.wait(60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    (left,) = (tmp_path / "cache/splits").glob(".*.tmp")
    np.testing.assert_array_equal(keep(["x"], 1, unstored).pixels.array, PIXELS)
    assert not left.exists()


def test_a_damaged_split_is_named(tmp_path: Path) -> None:
    keep(["x"], 1, unstored)
    (images,) = (tmp_path / "cache/splits").glob("*/images.npy")
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{images.parent} has changed .*; remove this folder, and it is made again"):
        keep(["x"], 1, unstored)


def test_a_packed_split_is_a_source(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_split(tmp_path / name, unstored())
    split = open_split(tmp_path / "train")
    assert len(pickle.dumps(split.pixels)) < 1000 < PIXELS.nbytes
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(split.pixels)).array, PIXELS)
    opened = open_data(recipe("arrays", tmp_path))["train"]
    check_contract(opened)
    assert torch.equal(everything(opened)[0], torch.from_numpy(PIXELS))
    for _ in range(2):
        assert open_data(recipe("arrays", tmp_path, image_size=4))["train"].image_size == (4, 4)
    assert len(list((tmp_path / "cache/splits").glob("*/images.npy"))) == 2, "each split is resized once"
    (tmp_path / "test/labels.npy").unlink()
    with pytest.raises(DataError, match=r"test is not a complete split of arrays .*pack it again"):
        open_data(recipe("arrays", tmp_path))


def anonymous_mib() -> float:
    """Return the memory of this process that no file holds (proc(5), RssAnon)."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 2**20


@pytest.mark.parametrize("compress", [False, True])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, compress: bool) -> None:
    sections, answers = write_black(tmp_path, 100_000, compress=compress), FORK.Queue()  # 75 MiB
    open_data(sections)

    def look() -> None:
        before, source = anonymous_mib(), open_data(sections)["train"]
        for start in range(0, len(source), 128):
            source.fetch(np.arange(start, min(start + 128, len(source))), None)
        answers.put(anonymous_mib() - before)

    process = FORK.Process(target=look)
    process.start()
    process.join()
    assert answers.get(timeout=60) < 8


# Copies on the node's disk


def copies(folder: Path) -> list[Path]:
    return [path for path in (folder / f"samerun-{os.geteuid()}").iterdir() if path.suffix != ".lock"]


def test_the_copy_is_read_and_of_other_files_there_is_another(tmp_path: Path) -> None:
    data, disk = tmp_path / "data", tmp_path / "disk"
    write_black(data, 200, compress=True)
    sections = recipe("mnist", data, stage_to=str(disk))
    before, after = open_data(recipe("mnist", data)), open_data(sections)
    (copy,) = copies(disk)
    assert [split.fingerprint for split in after.values()] == [split.fingerprint for split in before.values()]
    assert staged(sections).data.path == str(copy / "data")
    assert copies(disk) == [copy], "a later run finds it"
    os.utime(data / "train-labels-idx1-ubyte.gz", (0, 0))
    staged(sections)
    assert len(copies(disk)) == 2
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    file = staged(recipe("huggingface", tmp_path / "rows.parquet", stage_to=str(disk))).data.path
    assert Path(str(file)).read_bytes() == b"rows"


def test_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("HOME", str(tmp_path))
    write_black(tmp_path / "data", 200, compress=True)
    assert len(open_data(recipe("mnist", "~/data", stage_to="${JOB_DISK}/here"))["train"]) == 200
    assert len(copies(tmp_path / "disk/here")) == 1
    with pytest.raises(RecipeError, match=r"^data\.path is \$NO_SUCH/x, and the environment variable NO_SUCH"):
        staged(recipe("mnist", "$NO_SUCH/x"))
    with pytest.raises(DataError, match=r"elsewhere is not a file or folder here, so it cannot be copied"):
        staged(recipe("mnist", tmp_path / "elsewhere", stage_to="x"))
    (tmp_path / "data/loop").symlink_to("loop")
    with pytest.raises(DataError, match=r"data/loop cannot be read \(Too many levels of symbolic links\); remove it"):
        staged(recipe("mnist", tmp_path / "data", stage_to="x"))
    with pytest.raises(RecipeError, match=r"data\.stage_to is x, but data\.path"):
        staged(recipe("digits", stage_to="x"))
