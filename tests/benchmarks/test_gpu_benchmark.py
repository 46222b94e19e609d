"""`make gpu` where there is no GPU: its dry run, parts that have no time or fail, and the Python that it runs in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import ONE_THREAD, REPOSITORY, Finished, Started

from benchmarks.contest import verdict
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.wheels import _requirements

HAND, WHOLE = "hand-written", "samerun, whole logits"


def dry_run(folder: Path, *arguments: str) -> Finished:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(folder), *arguments]
    return Started(command, env=ONE_THREAD).wait()


def table(report: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line.startswith("| ")]


@pytest.mark.multiproc
@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "programs"),
    [
        (("eager", "small"), {"hand-written, AdamW", "samerun, SGD", "convnet, samerun"}),
        (("sharded",), {"samerun, fsdp2", "samerun, deepspeed_zero3"}),
        (("text_compiled",), {f"{name}, {way}" for name in (HAND, WHOLE) for way in ("eager", "compiled", "checkpointed")}),
        (("text", "text_large", "memory"), {HAND, WHOLE, "samerun", "transformers' Trainer"}),
    ],
)
def test_the_dry_run_gives_the_tables(parts: tuple[str, ...], programs: set[str], tmp_path: Path) -> None:
    finished = dry_run(tmp_path, "--parts", *parts).check()
    report = (tmp_path / "report.md").read_text()
    assert finished.output == report
    assert programs <= {row[0] for row in table(report)}
    rates = [row for row in table(report) if len(row) == 5 and row[2] == "unknown"]
    assert rates
    assert all(float(row[1].split()[0].replace(",", "")) > 0 for row in rates)
    assert sum(len(row) == 6 and "%" in row[3] for row in table(report)) == 10 * ("memory" in parts)
    assert all(words in report for words in ("--dry-run", "torch 2.", "All parts are done."))


@pytest.mark.multiproc
def test_a_part_that_has_no_time_is_ended_with_all_it_started(tmp_path: Path) -> None:
    said: list[str] = []
    before = psutil.Process().children(recursive=True)  # the warm ranks of other tests
    with (tmp_path / "output.txt").open("wb") as output:
        problem = gpu.run("eager", ["--dry-run"], allowed_s=3.0, say=said.append, output=output)
    assert problem == "ENDED: its time is over"
    assert set(psutil.Process().children(recursive=True)) <= set(before)
    left = dry_run(tmp_path, "--parts", "small", "saving", "--minutes", "0.1")
    assert left.returncode == 1
    assert left.output.count("LEFT OUT: no time is left") == 2
    assert "Not done, or not well: small, saving." in left.output


@pytest.mark.multiproc
def test_a_test_that_fails_is_told_and_so_is_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it(figure):\n    figure('3 of 4')\n    assert 3 == 4\n")
    monkeypatch.setitem(gpu.PARTS, "presets", gpu.Part("one", 60, tests=(str(test), "--confcutdir", "/", "-p", "conftest")))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    said: list[str] = []
    with (tmp_path / "output.txt").open("wb") as output:
        problem = gpu.run("presets", [], allowed_s=60.0, say=said.append, output=output)
    assert problem == "Ended with exit code 1, see output.txt"
    assert any("test_it FAILED" in line for line in said)
    assert any("assert 3 == 4" in line for line in said)
    assert "    test_it: 3 of 4" in said


def test_a_goal_says_whether_it_is_met() -> None:
    assert [verdict(">= 0.98", value) for value in (0.98, 0.979)] == [">= 0.98: met", ">= 0.98: NOT MET"]
    assert [verdict("<= 100", value) for value in (100.0, 101.0)] == ["<= 100: met", "<= 100: NOT MET"]
    assert verdict("", 0.5) == ""


@pytest.mark.multiproc
def test_the_environment_has_the_packages_of_its_python_and_the_wheels(tmp_path: Path) -> None:
    """And no others of the wheels than those that it lacks."""
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    for name in ("samerun_test_only", "numpy"):
        _wheel(wheels, name)
    assert _requirements(wheels / "numpy-9-py3-none-any.whl") == {"dill": "<0.4,>=0.3"}
    use = [sys.executable, "-m", "benchmarks.gpu.wheels", "use", str(wheels), "--into", str(environment)]
    said = Started(use).wait().check().output
    assert said == f"{environment}: {sys.executable} and samerun-test-only\n"
    code = "import numpy, samerun_test_only, app; print(numpy.__version__ != '9', samerun_test_only.__version__, app.__file__)"
    python = [str(environment / "bin" / "python"), "-c", code]
    found = subprocess.run(python, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "9", str(REPOSITORY / "app" / "__init__.py")]


def _wheel(folder: Path, name: str) -> None:
    import zipfile

    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-9-py3-none-any.whl", "w") as archive:
        needs = "Requires-Dist: dill<0.4,>=0.3\nRequires-Dist: mypy>=1; extra == 'dev'\n"
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n{needs}"
        archive.writestr(f"{name}/__init__.py", "__version__ = 9\n")
        archive.writestr(f"{name}-9.dist-info/METADATA", about)
        archive.writestr(f"{name}-9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-9.dist-info/RECORD", "")
