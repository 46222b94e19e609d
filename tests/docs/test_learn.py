"""The pages of docs/learn/ run as they stand: each command, and each line that it is said to print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "learn").glob("*.md"))


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


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    told = commands(page.read_text())
    assert len(told) > 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
    for command, expected in told:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert_printed(expected, done.stdout)
