"""docs/ is a site whose links lead somewhere, and whose pages to look things up in are what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from processes import REPOSITORY

DOCS = REPOSITORY / "docs"
MOST_WORDS = 1500


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    """Of Sphinx: a link that leads nowhere is one, and so is a page that no list names."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-d",
        str(tmp_path / "read"),
        str(DOCS),
    ]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    built = subprocess.run([*command, str(tmp_path / "site")], env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "samerun launch" in (tmp_path / "site" / "look-up" / "commands.html").read_text()
    elsewhere = (tmp_path / "site" / "your-own-task.html").read_text()
    assert 'href="../' not in elsewhere


def test_no_page_that_is_read_from_its_beginning_is_long() -> None:
    pages = {page: len(page.read_text().split()) for page in (*DOCS.glob("*.md"), *DOCS.glob("learn/*.md"))}
    assert len(pages) > 20
    assert {page.name: words for page, words in pages.items() if words > MOST_WORDS} == {}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_there(generate: ModuleType) -> None:
    """Word by word, but for the lines of argparse's usage, which each version of Python breaks elsewhere."""
    for name, text in generate.pages().items():
        assert _words((DOCS / "look-up" / name).read_text()) == _words(text), f"{name}: run python docs/generate.py"
    assert (REPOSITORY / "CONTRIBUTING.md").read_text() == generate.contributing(), "run python docs/generate.py"


def _words(page: str) -> list[str]:
    return re.sub(r"^usage:.*?\n\n", "", page, flags=re.DOTALL | re.MULTILINE).split()
