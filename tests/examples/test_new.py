"""`samerun new` writes a folder that works at once, from an installed wheel as well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installation import run_installed
from processes import REPOSITORY, Started, clean_environment, read, train

from app.errors import UsageError
from launch.shipped import new

WRITTEN = {"task.py", "recipe.yaml", "job.sh", "test_task.py", "README.md", ".vscode"}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="exists and is not an empty folder: choose another name"):
            new([str(place)])
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "file"}
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        new([str(tmp_path / "file" / "below")])


@pytest.mark.multiproc
def test_what_it_writes_trains_and_learns(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "my-task"
    new([str(folder)])
    assert {path.name for path in folder.iterdir()} == WRITTEN
    train("deepspeed_zero3", tmp_path / "run", "--recipe", str(folder / "recipe.yaml"), "model.width=16", processes=2).check()
    assert read(tmp_path / "run" / "result.json")["test_loss"] < 0.005  # 0.037 is the variance of what is learnt
    (line,) = [line for line in (folder / "job.sh").read_text().splitlines() if line.startswith("exec ")]
    assert line == 'exec samerun launch --recipe recipe.yaml "$@"'


@pytest.mark.multiproc
def test_what_vs_code_starts_trains(tmp_path: Path) -> None:
    new([str(tmp_path / "new")])
    debugged, tested, attached = json.loads((tmp_path / "new" / ".vscode" / "launch.json").read_text())["configurations"]
    command = [sys.executable, "-m", debugged["module"], *debugged["args"]]
    Started([*command, "--run-dir", "run", "train.steps=2"], cwd=tmp_path / "new").wait().check()
    assert read(tmp_path / "new" / "run" / "result.json")["steps"] == 2
    assert (tmp_path / "new" / tested["args"][-1]).exists()
    assert attached["connect"] == {"host": "127.0.0.1", "port": 5678}


@pytest.mark.multiproc
@pytest.mark.long
@pytest.mark.parametrize(("hang_timeout_s", "code"), [(0, 0), (5, 12)])
def test_a_debugger_may_pause_a_run_for_longer_than_the_watchdog_waits(tmp_path: Path, hang_timeout_s: int, code: int) -> None:
    new([str(tmp_path / "new")])
    script = "b task.py:40, len(batch['inputs']) == 32\nc\nc\nc\n!import time; time.sleep(14)\np 'awake'\ncl 1\nc\nq\n"
    command = [sys.executable, "-m", "pdb", "-m", "app.train", "--recipe", "recipe.yaml", "--workers", "0", "train.steps=6"]
    command += ["--hang-timeout", str(hang_timeout_s)]
    where = {"cwd": tmp_path / "new", "env": clean_environment()}
    ended = subprocess.run(command, input=script, capture_output=True, text=True, check=False, **where)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ("'awake'" in ended.stdout, "HangError" in ended.stderr) == (code == 0, code == 12)


def test_the_job_script_asks_for_what_ours_asks_for(tmp_path: Path) -> None:
    new([str(tmp_path / "new")])
    asked = [
        {line for line in script.read_text().splitlines() if line.startswith("#SBATCH") and "--nodes" not in line}
        for script in (tmp_path / "new" / "job.sh", REPOSITORY / "launch" / "multinode.sh")
    ]
    assert asked[0] == asked[1]
    assert len(asked[0]) >= 7


@pytest.mark.multiproc
@pytest.mark.slow
def test_outside_the_repository_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    run_installed(installed, ["samerun", "new", "my-task"], tmp_path).check()
    folder = tmp_path / "my-task"
    run_installed(installed, ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"], folder).check()
    for preset in ("cpu", "fsdp2"):
        processes = () if preset == "cpu" else ("--processes", "2")
        command = ["samerun", "launch", "--recipe=recipe.yaml", f"--preset={preset}", *processes, f"--run-dir=runs/{preset}"]
        run_installed(installed, [*command, "--trackers", "none"], folder).check()
    compared = run_installed(installed, ["samerun", "compare", "runs/cpu", "runs/fsdp2"], folder).check()
    assert "The same run" in compared.output
