"""`samerun recipes`, `samerun presets` and `samerun scripts`: list the shipped files, or print one; `samerun new`: copy the
template of a project."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from app import tasks
from app.errors import UsageError, did_you_mean
from app.options import Parser, wrapped
from app.recipe import json_schema, recipe_file
from launch import preset

_HERE = Path(__file__).parent
_SUFFIX = ".template"
"""Suffix that keeps tools for Samerun's own code away from the template's files."""
_SCHEMA_MARK = "# yaml-language-server: $schema="
_SCHEMA_LINE = f"{_SCHEMA_MARK}{json_schema.FILE}"
"""First line of a shipped recipe: the schema for editors is in the recipe's folder."""


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
        parser.add_argument("--schema", action="store_true", help="print the JSON Schema of recipes, which editors use to "
            "complete and check them; NAME, which can be a path, adds the keys of its own task")  # fmt: skip
    options = parser.parse_all(argv)
    if getattr(options, "keys", None) is not None:
        return _print_keys(options.name, options.keys)
    if getattr(options, "schema", False):
        sys.stdout.write(json_schema.text(options.name))
        return 0
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    files = {path.name if kind == "script" else path.stem: path for path in paths}
    if options.name is None:
        width = max(map(len, files))
        for shown, path in files.items():
            comments = (line for line in path.read_text().splitlines() if not line.startswith("#!") and line != _SCHEMA_LINE)
            description = next(comments).lstrip("# ")
            text = wrapped(f"{'':{width}}  {description}", 120)[width:] if sys.stdout.isatty() else f"  {description}"
            sys.stdout.write(f"{shown:{width}}{text}\n")
        return 0
    found = next((path for shown, path in files.items() if options.name in (shown, path.name)), None)
    if found is None:
        hint = did_you_mean(options.name, files, then=f"`samerun {kind}s` lists all", cutoff=0.5)
        raise UsageError(f"{options.name}: unknown {kind}; {hint}")
    schema = folder / json_schema.FILE  # a copy of the recipe can be in any folder
    sys.stdout.write(found.read_text().replace(_SCHEMA_LINE, f"{_SCHEMA_MARK}{schema.absolute().as_uri()}"))
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
        "test, a README and settings for VS Code. It runs unchanged.")  # fmt: skip
    parser.add_argument("folder", metavar="PATH", help="folder to create; it must be new or empty")
    folder = Path(parser.parse_all(argv).folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder: choose another name")
        editor = folder / ".vscode"
        editor.mkdir(parents=True)
        for file in sorted((_HERE / "template").glob(f"*{_SUFFIX}")):
            name = file.name.removesuffix(_SUFFIX)
            (editor if name.endswith(".json") else folder).joinpath(name).write_text(file.read_text())
        (editor / json_schema.FILE).write_text(json_schema.text(str(folder / "recipe.yaml")))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
    sys.stdout.write(
        f"{folder}: task.py, recipe.yaml, job.sh, test_task.py, README.md, .vscode. Try it:\n"
        f"    cd {shlex.quote(str(folder))}\n"
        "    samerun launch --recipe recipe.yaml\n"
    )
    return 0
