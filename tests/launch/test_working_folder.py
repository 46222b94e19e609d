"""Whatever a user's working folder holds, what Samerun starts is Samerun."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from installation import run_installed
from processes import REPOSITORY, Finished, Started, read

from launch.run_module import program

# Names of ours, of what we use, and of Python's own library, which are likely names of a user's files.
THEIRS = ("app", "launch", "accelerate", "datasets", "torch", "yaml", "random", "types", "utils")
TWO_STEPS = ("--recipe", "digits", "train.steps=2", "--trackers", "none", "--run-dir", "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in THEIRS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user has a file of this name')")
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the user has a folder of this name')")
    (tmp_path / "accelerate_configs").mkdir()
    return tmp_path


@pytest.mark.multiproc
def test_a_run_is_ours(folder: Path) -> None:
    finished = started(folder, "--preset", "cpu", *TWO_STEPS)
    assert read(folder / "run" / "result.json")["steps"] == 2
    assert others_lines(finished.output) == []


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["multi_gpu", *(pytest.param(name, marks=pytest.mark.long) for name in ("deepspeed_zero2", "fsdp2"))]
)
def test_each_line_of_a_start_is_ours(preset: str, tmp_path: Path) -> None:
    """No warning of a library that nobody can act upon, in a home without settings."""
    finished = started(tmp_path, "--preset", preset, "--processes", "2", *TWO_STEPS, HOME=str(tmp_path))
    assert others_lines(finished.output) == []


def started(folder: Path, *words: str, **environment: str) -> Finished:
    return Started([*program("launch.cli"), "launch", *words], env=environment, cwd=folder).wait().check()


def others_lines(output: str) -> list[str]:
    """The lines of a run that are not the launcher's own, nor the application's, which begin with the time."""
    return [line for line in output.splitlines() if not re.match(r"samerun: |\d\d:\d\d:\d\d ", line)]


def test_an_app_of_the_users_on_the_pythonpath_is_not_taken_for_ours(tmp_path: Path) -> None:
    """An empty entry, as in PYTHONPATH=$PYTHONPATH:/more, is the working folder."""
    (tmp_path / "app.py").write_text("raise SystemExit('the user has a file of this name')")
    environment = {"PYTHONPATH": f":{REPOSITORY}"}
    samerun = [sys.executable, "-c", "import sys; from launch.cli import main; sys.exit(main())"]  # as the installed one
    for command in ([*samerun, "launch", "--dry-run", "--preset", "cpu"], [*program("app.train"), "--print-recipe"]):
        Started(command, env=environment, cwd=tmp_path).wait().check()


def test_no_module_of_the_launcher_hides_one_of_python() -> None:
    """Python looks beside a script first, for what the script imports before it can say otherwise."""
    modules = {path.stem for path in (REPOSITORY / "launch").glob("*.py")}
    assert "run_module" in modules
    assert modules & sys.stdlib_module_names == set()


@pytest.mark.multiproc
def test_the_job_scripts_of_a_wheel_train(installed: Path, folder: Path) -> None:
    for name in ("local.sh", "multinode.sh", "multinode.pbs", "mpirun.sh"):
        printed = run_installed(installed, ["samerun", "scripts", name], folder).check().output
        assert printed == (REPOSITORY / "launch" / name).read_text()
        (folder / name).write_text(printed)
    run_installed(installed, ["sh", "local.sh", "--preset", "cpu", *TWO_STEPS], folder).check()
    assert read(folder / "run" / "result.json")["steps"] == 2


@pytest.mark.multiproc
@pytest.mark.long
def test_the_doctor_of_a_wheel_is_ours(installed: Path, folder: Path) -> None:
    run_installed(installed, ["samerun", "doctor", "--processes", "2"], folder).check()
