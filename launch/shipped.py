"""`samerun recipes`, `samerun presets` and `samerun scripts`: list the shipped files, or print one; `samerun new`: copy the
template of a project."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from app import tasks
from app.errors import UsageError, did_you_mean
from app.options import Parser, wrapped
from app.recipe import recipe_file
from launch import preset

_HERE = Path(__file__).parent
_SUFFIX = ".template"
"""Suffix that keeps tools for Samerun's own code away from the template's files."""


def recipes(argv: list[str]) -> int:
    """List the recipes, or print one, or the keys of recipes."""
    return _show(argv, "recipe", recipe_file.SHIPPED, "*.yaml")


def presets(argv: list[str]) -> int:
    """List the presets, or print one."""
    return _show(argv, "preset", preset.SHIPPED, "*.yaml")


def scripts(argv: list[str]) -> int:
    """List the job scripts, or print one."""
    return _show(argv, "script", _HERE, "*.sh", "*.pbs")


def _show(argv: list[str], kind: str, folder: Path, *patterns: str) -> int:
    parser = Parser(f"{kind}s", f"List the shipped {kind}s, or print one.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{kind} to print, for example to copy and change it")
    if kind == "recipe":
        parser.add_argument("--keys", nargs="?", const="*", metavar="PATTERN", help="print the keys of recipes, or those "
            "with PATTERN in their name or meaning: of all tasks, or of the task of NAME, which can be a path")  # fmt: skip
    options = parser.parse_all(argv)
    if getattr(options, "keys", None) is not None:
        return _print_keys(options.name, options.keys)
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    files = {path.name if kind == "script" else path.stem: path for path in paths}
    if options.name is None:
        width = max(map(len, files))
        for shown, path in files.items():
            description = next(line for line in path.read_text().splitlines() if not line.startswith("#!")).lstrip("# ")
            text = wrapped(f"{'':{width}}  {description}", 120)[width:] if sys.stdout.isatty() else f"  {description}"
            sys.stdout.write(f"{shown:{width}}{text}\n")
        return 0
    found = next((path for shown, path in files.items() if options.name in (shown, path.name)), None)
    if found is None:
        hint = did_you_mean(options.name, files, then=f"`samerun {kind}s` lists all", cutoff=0.5)
        raise UsageError(f"{options.name}: unknown {kind}; {hint}")
    sys.stdout.write(found.read_text())
    return 0


def _print_keys(recipe: str | None, pattern: str) -> int:
    """Print the recipe keys of a recipe's task, or of all tasks, each meaning once. Raises UsageError if none fits."""
    known: set[tuple[str, str]] = set()
    for task in [recipe_file.load(recipe).recipe.task] if recipe else tasks.SHIPPED:
        if text := recipe_file.reference(task, pattern.strip("*"), known=known):
            sys.stdout.write(f"Recipe keys of the task {task}{' that are not listed above' if known else ''}:\n")
            sys.stdout.write(f"{wrapped(text)}\n\n")
            known |= recipe_file.meanings(task).items()
    if not known:
        raise UsageError(f"--keys {pattern}: no key has this in its name or meaning; `samerun recipes --keys` lists all")
    return 0


def new(argv: list[str]) -> int:
    """Write the folder. Raises UsageError if there is something in it, or it cannot be written."""
    parser = Parser("new", "Create a project folder: task.py (your own network on your own data), recipe.yaml, a job script, a "
        "test and a README. It runs unchanged.")  # fmt: skip
    parser.add_argument("folder", metavar="PATH", help="folder to create; it must be new or empty")
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
        f"    cd {shlex.quote(str(folder))}\n"
        "    samerun launch --recipe recipe.yaml\n"
    )
    return 0
