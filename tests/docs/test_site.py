"""docs/ builds as a site without broken links, and the generated pages are up to date."""

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

from app.recipe import json_schema, recipe_file

DOCS = REPOSITORY / "docs"
MOST_WORDS = 1600
MOST_WORDS_ALTOGETHER = 31_300


def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    """Sphinx warns of a broken link, and of a page that is in no toctree."""
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
    assert "train a recipe, on this machine" in (tmp_path / "site" / "look-up" / "commands.html").read_text()
    front_page = (tmp_path / "site" / "index.html").read_text()
    assert 'href="../' not in front_page
    assert re.search(r'href="https://[\w./-]+/blob/main/README.md"', front_page)


def test_no_page_that_is_read_from_its_beginning_is_long() -> None:
    pages = {page: len(page.read_text().split()) for page in (*DOCS.glob("*.md"), *DOCS.glob("learn/*.md"))}
    assert len(pages) > 20
    assert {page.name: words for page, words in pages.items() if words > MOST_WORDS} == {}
    looked_up = sum(len(page.read_text().split()) for page in DOCS.glob("look-up/*.md"))
    assert sum(pages.values()) + looked_up <= MOST_WORDS_ALTOGETHER


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_there(generate: ModuleType) -> None:
    for name, text in generate.pages().items():
        assert (DOCS / "look-up" / name).read_text() == text, f"{name}: run python docs/generate.py"
    assert (REPOSITORY / "CONTRIBUTING.md").read_text() == generate.contributing(), "run python docs/generate.py"
    assert (recipe_file.SHIPPED / json_schema.FILE).read_text() == json_schema.text(), "run python docs/generate.py"
