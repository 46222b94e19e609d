"""`samerun data COMMAND ...`: inspect and prepare data before a run, with the tools of its task."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from app import tasks
from app.options import Parser
from app.recipe import recipe_file

_PICTURES, _TEXTS = "image_classification", "causal_lm"
# Of each: the task whose tools have it, and what it is for. None: that of the data; empty: it is for all.
_COMMANDS = {
    "inspect": (None, "show what a data set of pictures, or a token folder, contains"),
    "tokenize": (_TEXTS, "tokenize text, or prompts and answers, into a token folder"),
    "check": ("", "read every sample once and list the unreadable ones"),
    "pack": (_PICTURES, "shrink pictures or convert them to another format"),
}


def main(argv: Sequence[str]) -> int:
    """Run `samerun data` with these arguments and return its exit code. Raises SamerunError."""
    if not argv or argv[0] not in _COMMANDS:
        _parser().parse_all(argv or ["--help"])  # ends the program
    if argv[0] != "tokenize":  # every other command takes a recipe by this option, and these as a plain word too
        argv = [word.removeprefix("--recipe=") for word in argv if word != "--recipe"]
    if argv[0] == "check":
        from app.tools import data_check

        return data_check.main(argv[1:])
    task = _COMMANDS[argv[0]][0] or _task_of(argv[1:])
    code: int = importlib.import_module(f"app.tasks.{task}.data.command").main(argv)
    return code


def _task_of(words: Sequence[str]) -> str:
    """Return the task whose data the words name: by a token folder, or by what a recipe says. Raises RecipeError."""
    overrides = [word for word in words if "=" in word and not word.startswith("-") and not Path(word).exists()]
    for word in words:
        path = Path(word)
        if (path / "tokens.json").is_file() or (path.name == "tokens.json" and path.is_file()):
            return _TEXTS
        if word in recipe_file.names() or (path.suffix in (".yaml", ".yml") and path.is_file()):
            task = recipe_file.load(word, overrides).recipe.task
            return task if task in tasks.SHIPPED else _PICTURES
    return _PICTURES


def _parser() -> Parser:
    commands = "\n".join(f"  {name:8}  {text}" for name, (_, text) in _COMMANDS.items())
    parser = Parser(
        prog="samerun data",
        description=__doc__,
        epilog=f"commands:\n{commands}\n\n`samerun data COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="what to do")
    return parser
