"""`samerun new DIR`: creates a project folder with your own task, its recipe, a job script and a test. It runs as it is."""

from __future__ import annotations

import sys
from pathlib import Path

from app.errors import UsageError
from app.options import Parser

_TEMPLATE = Path(__file__).parent / "template"
_SUFFIX = ".template"
"""Suffix that keeps tools for Samerun's own code away from these files."""


def new(argv: list[str]) -> int:
    """Write the folder. Raises UsageError if there is something in it, or it cannot be written."""
    parser = Parser(
        prog="samerun new",
        description="Create a project folder: task.py (your own network on your own data), recipe.yaml, a job script, a test "
        "and a README. It runs as it is.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder to create; it must be new or empty")
    folder = Path(parser.parse_all(argv).folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder: choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(_TEMPLATE.glob(f"*{_SUFFIX}")):
            (folder / file.name.removesuffix(_SUFFIX)).write_text(file.read_text())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    sys.stdout.write(
        f"{folder}: task.py, recipe.yaml, job.sh, test_task.py, README.md. Try it:\n"
        f"    cd {folder}\n"
        "    samerun launch --recipe recipe.yaml\n"
    )
    return 0
