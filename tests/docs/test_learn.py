"""The pages of docs/learn/ run as they stand: each command, and each line that it is said to print."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_lab
from processes import REPOSITORY, Started

PAGES = sorted((REPOSITORY / "docs" / "learn").glob("*.md"))
SLURM = REPOSITORY / "docs" / "learn" / "slurm.md"
_NO_LAB = slurm_lab.why_not()


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the page's `console` blocks, with the lines that follow it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def assert_printed(expected: list[str], output: str) -> None:
    """`...` in a line is any text, and alone any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"[ ]*\n" for line in expected
    )
    assert re.fullmatch(pattern, output), f"expected\n{chr(10).join(expected)}\n\nprinted\n{output}"


def test_what_is_not_printed_is_seen() -> None:
    assert_printed(["...", "loss 0.1...", "..."], "begin\nloss 0.12\nend\n")
    with pytest.raises(AssertionError):
        assert_printed(["...", "loss 0.1..."], "begin\nloss 0.12\nend\n")
    with pytest.raises(AssertionError):
        assert_printed(["loss 0.2..."], "loss 0.12\n")


def run_page(page: Path, folder: Path, start: Callable[..., Started]) -> None:
    """Write the files whose blocks begin with `# NAME`; then type the commands, one after the other."""
    text = page.read_text()
    for code, name in re.findall(r"^```\w+\n(# (\w+\.\w+)\n.*?)^```$", text, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(code)
    told = commands(text)
    assert len(told) > 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
    for command, expected in told:
        done = start("sh", "-c", f"cd {shlex.quote(str(folder))}\n{command}", env=environment).wait()
        assert done.returncode == 0, f"{command}\n{done.output}"
        assert_printed(expected, done.output)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("page", [page for page in PAGES if page != SLURM], ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, lambda *command, env: Started(list(command), env=env))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.skipif(_NO_LAB is not None, reason=str(_NO_LAB))
def test_the_page_of_a_slurm_job_runs_as_it_stands(tmp_path: Path) -> None:
    """Typed on the head of a cluster, whose first jobs they are."""
    home = tmp_path / "home"
    home.mkdir()
    with slurm_lab.lab(tmp_path / "lab", tmp_path, nodes=2, gpus_per_node=0) as lab:
        run_page(SLURM, home, lab.start)
