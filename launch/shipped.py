"""`samerun recipes`, `samerun presets` and `samerun script`: list the shipped files, or print one."""

from __future__ import annotations

import sys
from pathlib import Path

from app.errors import UsageError
from app.options.command_line import Parser
from app.recipe import recipe_file
from launch import preset

_HERE = Path(__file__).parent


def recipes(argv: list[str]) -> int:
    """List the recipes, or print one."""
    return _show(argv, "recipe", recipe_file.SHIPPED, "*.yaml")


def presets(argv: list[str]) -> int:
    """List the presets, or print one."""
    return _show(argv, "preset", preset.SHIPPED, "*.yaml")


def script(argv: list[str]) -> int:
    """List the job scripts, or print one."""
    return _show(argv, "script", _HERE, "*.sh", "*.pbs")


def _show(argv: list[str], what: str, folder: Path, *patterns: str) -> int:
    command = f"samerun {what}" if what == "script" else f"samerun {what}s"
    parser = Parser(prog=command, description=f"List the shipped {what}s, or print one.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"the {what} to print, for example to copy and change it")
    name = parser.parse_all(argv).name
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    names = [path.name if what == "script" else path.stem for path in files]
    if name is None:
        width = max(map(len, names))
        lines = [f"{one:{width}}  {_first_line(path)}" for one, path in zip(names, files, strict=True)]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    found = next((path for one, path in zip(names, files, strict=True) if name in (one, path.name)), None)
    if found is None:
        raise UsageError(f"unknown {what} {name!r}: `{command}` lists all")
    sys.stdout.write(found.read_text())
    return 0


def _first_line(path: Path) -> str:
    """The first line of the comment at the top of a file."""
    return next(line for line in path.read_text().splitlines() if not line.startswith("#!")).lstrip("# ")
