"""Runs the pages of docs/learn/ as written: each command, and each output line that they show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import figures
import pytest
import slurm_lab
from processes import REPOSITORY, Started

from app.planning import plan
from app.reports import scale

PAGES = sorted((REPOSITORY / "docs" / "learn").glob("*.md"))
SLURM = REPOSITORY / "docs" / "learn" / "slurm.md"
_NO_LAB = slurm_lab.why_not()


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return each command of the page's `console` blocks, with its output lines."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def assert_printed(expected: list[str], output: str) -> None:
    """Compare output with expected lines: `...` in a line matches any text, a line `...` any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"[ ]*\n" for line in expected
    )
    assert re.fullmatch(pattern, output), f"expected\n{chr(10).join(expected)}\n\nprinted\n{output}"


def test_missing_output_is_an_error() -> None:
    assert_printed(["...", "loss 0.1...", "..."], "begin\nloss 0.12\nend\n")
    with pytest.raises(AssertionError):
        assert_printed(["...", "loss 0.1..."], "begin\nloss 0.12\nend\n")
    with pytest.raises(AssertionError):
        assert_printed(["loss 0.2..."], "loss 0.12\n")


def run_page(page: Path, folder: Path, start: Callable[..., Started]) -> None:
    """Write the files whose blocks begin with `# NAME`, then run the commands in order."""
    text = page.read_text()
    for code, name in re.findall(r"^```\w+\n(# (\w+\.\w+)\n.*?)^```$", text, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(code)
    typed = commands(text)
    assert len(typed) > 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
    for command, expected in typed:
        done = start("sh", "-c", f"cd {shlex.quote(str(folder))}\n{command}", env=environment).wait()
        assert done.returncode == 0, f"{command}\n{done.output}"
        assert_printed(expected, done.output)


LONG = {"lesson", "own-task", "too-big"}
"""Pages of many commands, which other tests run as well."""


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.long] * (page.stem in LONG)) for page in PAGES if page != SLURM],
)
def test_a_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, lambda *command, env: Started(list(command), env=env))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.skipif(_NO_LAB is not None, reason=str(_NO_LAB))
def test_the_slurm_page_runs_as_written(tmp_path: Path) -> None:
    """The commands run on the login node of a cluster, as its first jobs."""
    home = tmp_path / "home"
    home.mkdir()
    with slurm_lab.lab(tmp_path / "lab", tmp_path, nodes=2, gpus_per_node=0) as lab:
        run_page(SLURM, home, lab.start)


def test_commands_of_the_lessons_exercises_are_accepted(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "learn" / "lesson.md").read_text().replace("\\\n", "")
    lines = re.findall(
        r"^samerun .*", "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)), re.MULTILINE
    )
    assert len(lines) > 10
    written = set(re.findall(r"--run-dir (\S+)", text))
    for line in lines:
        _, command, *arguments = shlex.split(line, comments=True)
        if command == "launch":
            dry = [sys.executable, "-m", "launch.cli", "launch", "--dry-run", *arguments]
            done = subprocess.run(dry, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False)
            assert (done.returncode == 0) != ("# refused" in line), line
        elif command in ("plan", "scale"):
            {"plan": plan, "scale": scale}[command]._parser().parse_all(arguments)
        else:
            assert {word for word in arguments if word.startswith("runs/")} <= written, line


def test_the_figures_are_up_to_date() -> None:
    for name, draw in figures.FIGURES.items():
        assert (REPOSITORY / "docs" / name).read_text() == draw(), "run python docs/figures.py"
