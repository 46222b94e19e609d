"""Splits and copies that are made once, by one of several processes, whole or not at all, and never held in memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sources import check_contract, everything, recipe, write_black

from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import arrays
from app.tasks.image_classification.data.arrays import Unstored, keep, open_split, write_split
from app.tasks.image_classification.data.open import _files, open_data, staged
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


def test_one_process_makes_it_while_the_others_wait(tmp_path: Path) -> None:
    answers, log = FORK.Queue(), tmp_path / "log"

    def build() -> Unstored:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return unstored()

    def keep_in_a_process() -> None:
        split = keep(["x"], 1, build)
        answers.put((split.pixels.array.copy(), split.labels.copy()))

    processes = [FORK.Process(target=keep_in_a_process) for _ in range(4)]
    for process in processes:
        process.start()
    for images, labels in [answers.get(timeout=60) for _ in processes]:
        np.testing.assert_array_equal(images, PIXELS)
        np.testing.assert_array_equal(labels, LABELS)
    for process in processes:
        process.join()
    assert len(log.read_text().splitlines()) == 1
    keep(["y"], 1, build)
    assert len(log.read_text().splitlines()) == 2, "of other files another is made"


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


def test_a_damaged_split_and_a_place_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(["x"], 1, unstored)
    (images,) = (tmp_path / "cache/splits").glob("*/images.npy")
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{images.parent} has changed .*; remove this folder, and it is made again"):
        keep(["x"], 1, unstored)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"file, the cache .*, cannot be used \(File exists\); set SAMERUN_CACHE"):
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


def grown_mib(asked: Sections) -> float:
    """By how much the memory of a forked process grows at the end (proc(5), RssAnon) that looks at all images."""
    answers = FORK.Queue()

    def own_mib() -> float:
        found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) / 1024 if found else 0

    def look() -> None:
        before, source = own_mib(), open_data(asked)["train"]
        for start in range(0, len(source), 128):
            source.fetch(np.arange(start, min(start + 128, len(source))), None)
        answers.put(own_mib() - before)

    process = FORK.Process(target=look)
    process.start()
    process.join()
    return answers.get(timeout=60)


@pytest.mark.parametrize("compress", [False, True])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, compress: bool) -> None:
    asked = write_black(tmp_path, 100_000, compress=compress)
    open_data(asked)
    assert 100_000 * 28 * 28 / 2**20 > 70
    assert grown_mib(asked) < 8


# Copies on the node's disk


def copied(path: Path | str, to: Path | str) -> Sections:
    return recipe("mnist", path, stage_to=str(to))  # type: ignore[arg-type]


def copies(folder: Path) -> list[Path]:
    return [path for path in (folder / f"samerun-{os.geteuid()}").iterdir() if path.suffix != ".lock"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_black(tmp_path / "data", 200, compress=True)
    return tmp_path / "data"


def test_the_copy_is_read_and_of_other_files_there_is_another(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = copied(data, tmp_path / "disk")
    before, after = open_data(recipe("mnist", data)), open_data(asked)
    assert capfd.readouterr().err.count("copying") == 1
    (copy,) = copies(tmp_path / "disk")
    assert [split.fingerprint for split in after.values()] == [split.fingerprint for split in before.values()]
    assert staged(asked).data.path == str(copy / "data")
    assert "copying" not in capfd.readouterr().err, "a later run finds it"
    os.utime(data / "train-labels-idx1-ubyte.gz", (0, 0))
    staged(asked)
    assert len(copies(tmp_path / "disk")) == 2
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    assert Path(str(staged(copied(tmp_path / "rows.parquet", tmp_path / "disk")).data.path)).read_bytes() == b"rows"


def test_a_copy_that_fails_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list(_files(data))
    monkeypatch.setattr("app.tasks.image_classification.data.open._files", lambda source: [*files, ("gone", 1, 1)])
    with pytest.raises(DataError, match=r"cannot be copied to data\.stage_to=\S+disk: No such file"):
        staged(copied(data, tmp_path / "disk"))
    assert copies(tmp_path / "disk") == []


def test_variables_are_filled_in(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_data(copied("~/data", "${JOB_DISK}/here"))["train"]) == 200
    assert len(copies(tmp_path / "disk/here")) == 1
    with pytest.raises(RecipeError, match=r"^data\.path is \$NO_SUCH/x, and the environment variable NO_SUCH"):
        open_data(copied("$NO_SUCH/x", tmp_path))
    with pytest.raises(DataError, match=r"elsewhere is not a file or folder here"):
        open_data(copied(tmp_path / "elsewhere", tmp_path / "disk"))
    with pytest.raises(RecipeError, match=r"data\.stage_to is x, but data\.path"):
        open_data(Sections(data=DataRecipe(stage_to="x")))
