"""`samerun recipes`, `samerun presets` and `samerun script`: list the shipped files, or print one; `samerun new`: copy the
template of a project."""

from __future__ import annotations

import sys
from pathlib import Path

from app.errors import UsageError
from app.options import Parser
from app.recipe import recipe_file
from launch import preset

_HERE = Path(__file__).parent
_SUFFIX = ".template"
"""Suffix that keeps tools for Samerun's own code away from the template's files."""


def recipes(argv: list[str]) -> int:
    """List the recipes, or print one."""
    return _show(argv, "recipe", recipe_file.SHIPPED, "*.yaml")


def presets(argv: list[str]) -> int:
    """List the presets, or print one."""
    return _show(argv, "preset", preset.SHIPPED, "*.yaml")


def script(argv: list[str]) -> int:
    """List the job scripts, or print one."""
    return _show(argv, "script", _HERE, "*.sh", "*.pbs")


def _show(argv: list[str], kind: str, folder: Path, *patterns: str) -> int:
    command = f"samerun {kind}" if kind == "script" else f"samerun {kind}s"
    parser = Parser(prog=command, description=f"List the shipped {kind}s, or print one.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"the {kind} to print, for example to copy and change it")
    name = parser.parse_all(argv).name
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    files = {path.name if kind == "script" else path.stem: path for path in paths}
    if name is None:
        width = max(map(len, files))
        for shown, path in files.items():
            description = next(line for line in path.read_text().splitlines() if not line.startswith("#!")).lstrip("# ")
            sys.stdout.write(f"{shown:{width}}  {description}\n")
        return 0
    found = next((path for shown, path in files.items() if name in (shown, path.name)), None)
    if found is None:
        raise UsageError(f"unknown {kind} {name!r}: `{command}` lists all")
    sys.stdout.write(found.read_text())
    return 0


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
        for file in sorted((_HERE / "template").glob(f"*{_SUFFIX}")):
            (folder / file.name.removesuffix(_SUFFIX)).write_text(file.read_text())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    sys.stdout.write(
        f"{folder}: task.py, recipe.yaml, job.sh, test_task.py, README.md. Try it:\n"
        f"    cd {folder}\n"
        "    samerun launch --recipe recipe.yaml\n"
    )
    return 0
