"""Things in the place of files, a pipe that would be waited for among them, and names that are no text: one sentence each."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import train

from app.checkpoints import manifest
from app.environment import launched
from app.errors import CheckpointError, PresetError, RecipeError, RunFolderError, SamerunError, TopologyError
from app.files import atomic_files
from app.files.lines import Lines
from app.files.paths import read_regular
from app.recipe import recipe_file
from app.reports import past_run
from app.runs import run_folder
from launch import preset
from launch.schedulers import detect
from launch.start import run_checks

READERS: dict[str, tuple[Callable[[Path], object], type[SamerunError]]] = {
    "recipe.yaml": (lambda path: recipe_file.load(str(path)), RecipeError),
    "preset.yaml": (lambda path: preset.load(str(path)), PresetError),
    "manifest.json": (lambda path: manifest.read(path.parent), CheckpointError),
    "state.json": (lambda path: atomic_files.check_stamp(path, atomic_files.Stamp(0, "")), CheckpointError),
    "metrics.jsonl": (lambda path: list(Lines(path)), RunFolderError),
    "run.json": (run_folder.read_json, RunFolderError),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_a_files_place_is_said_and_not_waited_for(tmp_path: Path, name: str) -> None:
    read, error = READERS[name]
    os.mkfifo(tmp_path / name)
    with pytest.raises(error, match=rf"{tmp_path / name}.*(it is not a text file|cannot be read: it is a pipe, not a file)"):
        read(tmp_path / name)


def test_other_things_in_a_files_place(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a device, not a file"):
        read_regular(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"x"


def test_a_run_folder_full_of_pipes_is_reported_as_far_as_it_goes(digits_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(digits_run, folder)
    names = [run_folder.RECIPE, run_folder.RUN, run_folder.METRICS, run_folder.RESULT, run_folder.OUTCOME, run_folder.LEDGER]
    for name in names:
        (folder / name).unlink()
        os.mkfifo(folder / name)
    complaints = past_run.read(folder).complaints
    assert [name for name in names if not any(f"{folder / name} cannot be read" in line for line in complaints)] == []


@pytest.mark.multiproc
def test_a_folder_where_a_file_will_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "result.json"
    folder.mkdir(parents=True)
    finished = train("cpu", tmp_path / "run", "--recipe", "digits", "train.steps=3")
    assert finished.returncode == RunFolderError.exit_code
    assert f"RunFolderError: {folder} is a folder, and the run writes a file of that name" in finished.output
    assert "step 3/3" not in finished.output
    assert list((tmp_path / "run").iterdir()) == [folder]


def test_a_name_that_is_no_text_is_refused_by_all(tmp_path: Path, digits_run: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xff")
    with pytest.raises(RunFolderError, match=r"r\\xff', is not UTF-8"):
        run_folder.choose(str(folder), "digits", may_exist=True)
    assert not folder.exists()
    (problem,) = run_checks.unwritable([folder])
    assert re.match(r"--run-dir is b'.*r\\xff', .* not UTF-8: choose another", problem)
    shutil.copytree(digits_run, folder)
    with pytest.raises(RunFolderError, match="is not UTF-8"):
        past_run.read(folder)


@pytest.mark.parametrize("may_exist", [True, False])
def test_a_name_that_is_too_long_is_refused_in_a_sentence(may_exist: bool, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"the run folder .*rrr cannot be written: File name too long"):
        run_folder.choose(str(tmp_path / ("r" * 300)), "digits", may_exist=may_exist)


@pytest.mark.parametrize("threads", ["abc", "", "0", "-1", "4,2", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused_by_launcher_and_training(threads: str) -> None:
    for refuse in (detect.find, launched.read):
        with pytest.raises(TopologyError, match=rf"OMP_NUM_THREADS is '{threads}': it must be a whole number from 1 on"):
            refuse({"OMP_NUM_THREADS": threads})
