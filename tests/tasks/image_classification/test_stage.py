"""Data on the node's own disk: copied once, by one of several real processes, whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from processes import train
from sources import everything, write_black

from app.errors import DataError, RecipeError
from app.tasks.image_classification.data import stage
from app.tasks.image_classification.data.open import open_data
from app.tasks.image_classification.data.stage import staged
from app.tasks.image_classification.sections import DataRecipe, Sections

FORK = multiprocessing.get_context("fork")


def recipe(path: Path | str, to: Path | str) -> Sections:
    return Sections(data=DataRecipe(source="mnist", path=str(path), stage_to=str(to)))


def copies(folder: Path) -> list[Path]:
    return [path for path in own_folder(folder).iterdir() if not path.name.startswith(".")]


def own_folder(folder: Path) -> Path:
    return folder / f"samerun-{os.geteuid()}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_black(tmp_path / "data", 200, compress=True)
    return tmp_path / "data"


@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_one_process_copies_and_all_read_the_copy(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = recipe(data, tmp_path / "disk")
    before = open_data(Sections(data=DataRecipe(source="mnist", path=str(data))))
    processes = [FORK.Process(target=staged, args=(asked,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert capfd.readouterr().err.count("copying") == 1
    (copy,) = copies(tmp_path / "disk")
    after = open_data(asked)
    assert "copying" not in capfd.readouterr().err, "a later run finds it"
    assert [split.fingerprint for split in after.there.values()] == [split.fingerprint for split in before.there.values()]
    assert torch.equal(everything(after.train)[0], everything(before.train)[0])
    os.utime(data / "train-labels-idx1-ubyte.gz", (0, 0))
    staged(asked)
    assert len(copies(tmp_path / "disk")) == 2, "of other files there is another copy"
    assert copy.exists()


def test_a_file_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"rows")
    path = Path(staged(recipe(tmp_path / "rows.parquet", tmp_path / "disk")).data.path or "")
    assert (path.name, path.read_bytes()) == ("rows.parquet", b"rows")


def test_too_little_room_is_said_before_anything_is_copied(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"takes 0\.00 GB, and data\.stage_to=\S+disk has 0\.00 GB free"):
        staged(recipe(data, tmp_path / "disk"))
    assert copies(tmp_path / "disk") == []


def test_what_fails_half_way_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(data, tmp_path / "disk")
    files = list(stage._files(data))
    monkeypatch.setattr(stage, "_files", lambda source: [*files, stage._File("gone", 1, 1)])
    with pytest.raises(DataError, match=r"cannot be copied to data\.stage_to=\S+disk: No such file"):
        staged(asked)
    assert [path.name for path in own_folder(tmp_path / "disk").iterdir() if path.suffix != ".lock"] == []


def test_variables_are_filled_in(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_data(recipe("~/data", "${JOB_DISK}/here")).train) == 200
    assert len(copies(tmp_path / "disk/here")) == 1
    with pytest.raises(RecipeError, match=r"^data\.path is \$NO_SUCH/x, and the environment variable NO_SUCH"):
        open_data(recipe("$NO_SUCH/x", tmp_path))
    with pytest.raises(DataError, match=r"elsewhere is not a file or folder here"):
        open_data(recipe(tmp_path / "elsewhere", tmp_path / "disk"))
    with pytest.raises(RecipeError, match=r"data\.stage_to is x, but data\.path"):
        open_data(Sections(data=DataRecipe(stage_to="x")))


def test_a_training_of_two_processes_reads_the_copy(data: Path, tmp_path: Path) -> None:
    keys = [
        "data.source=mnist",
        f"data.path={data}",
        f"data.stage_to={tmp_path / 'disk'}",
        "train.steps=1",
        "train.global_batch_size=8",
    ]
    finished = train("multi_gpu", tmp_path / "run", *keys, processes=2).check()
    assert finished.output.count("copying") == 1
    assert len(copies(tmp_path / "disk")) == 1
