"""Write the pages of docs/look-up/ from the code that they tell of: `python docs/generate.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from app import errors
from app.recipe import recipe_file, recipe_keys
from launch import cli

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
_MADE = "<!-- Made by docs/generate.py: change the code that it tells of. -->\n\n"
_TASKS = ("image_classification", "causal_lm")
VARIABLES = {
    "SAMERUN_ARGS": "PBS's job script: the arguments of `samerun launch`, one text.",
    "SAMERUN_CACHE": "Where lists of files and unpacked data are kept. Default: in `$XDG_CACHE_HOME` or `~/.cache`.",
    "SAMERUN_END_TIME": "When the job ends, in Unix seconds; the run saves and stops before it. Where no scheduler says it.",
    "SAMERUN_HOSTS": "Machines without a scheduler: their names, comma-separated, in the order of the node ranks.",
    "SAMERUN_HOST_SUFFIX": "What makes of a host's name its name in the fast network (JUWELS: `i`).",
    "SAMERUN_MEETING_KEY": "A secret that the nodes of a job share: strangers who call at its port are turned away.",
    "SAMERUN_NODE_RANK": "Machines without a scheduler: which of SAMERUN_HOSTS this one is, from 0. What starts them sets it.",
    "SAMERUN_PORT": "The port at which the nodes meet, on the first of them.",
    "SAMERUN_STARTER": "What starts the other hosts of a job: `ssh`, or one that docs/clusters.md names.",
}
"""The variables that a user may set."""
_OWN = {"ATTEMPT", "FIRST_JOB", "LAUNCHER", "REQUEUES", "START_TIME", "SUBMIT_TIME", "THREADS"}
"""What the launcher tells its own processes."""


def pages() -> dict[str, str]:
    """Return the text of each page, by its name in docs/look-up/."""
    found = {"recipe-keys": _recipe_keys(), "commands": _commands(), "presets": _presets(), "exit-codes": _exit_codes()}
    found["environment"] = _environment()
    return {f"{name}.md": _MADE + "\n".join(lines).rstrip() + "\n" for name, lines in found.items()}


def _recipe_keys() -> Iterator[str]:
    yield "# Recipe keys\n"
    yield "Each key can stand in a recipe's YAML file, or as `key=value` after the options of a command, which wins."
    yield "`samerun train --print-recipe` shows every value and where it came from.\n"
    common = {key for key, _ in set.intersection(*(set(recipe_keys.meanings(task).items()) for task in _TASKS))}
    yield from _keys("Every task", _TASKS[0], lambda key: key in common)
    for task in _TASKS:
        yield from _keys(f"Task `{task}`", task, lambda key: key not in common)


def _keys(title: str, task: str, is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """The keys of a task, as `samerun train --help` shows them."""
    yield f"## {title}\n\n| key | default | value | meaning |\n|---|---|---|---|"
    shown = re.findall(r"^  (\S+?)=(.*?)  \((.*)\)\n +(.*)$", recipe_file.reference(task), re.MULTILINE)
    assert [key for key, *_ in shown] == list(recipe_keys.kinds(task))
    for key, default, value, meaning in shown:
        if is_wanted(key):
            yield f"| `{key}` | `{default}` | {_cell(value)} | {_cell(meaning)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _commands() -> Iterator[str]:
    yield "# Commands\n\nWhat `samerun COMMAND --help` prints.\n"
    for title, group in cli._GROUPS.items():
        yield f"## To {title}\n" if title != "before something large" else "## Before something large\n"
        for name, (*_, purpose) in group.items():
            yield f"### samerun {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n\n```text\n{help_of(name)}\n```\n"


def help_of(command: str) -> str:
    """Return what the command's help says, without the recipe's keys."""
    told = subprocess.run(
        [sys.executable, "-m", "launch.cli", command, "--help"],
        env={**os.environ, "COLUMNS": "110", "PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1"},
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.partition("\nrecipe keys,")[0].rstrip()


def _presets() -> Iterator[str]:
    yield "# Presets\n\nFiles of `accelerate_configs/`; `samerun presets NAME` prints one, with a reason beside each key.\n"
    yield "| preset | how processes cooperate |\n|---|---|"
    for file in sorted((REPOSITORY / "accelerate_configs").glob("*.yaml")):
        comment = re.match(r"(?:#[^\n]*\n)+", file.read_text())
        assert comment, f"{file} does not begin with what it is for"
        yield f"| `{file.stem}` | {_cell(comment.group().replace('#', ' '))} |"


def _exit_codes() -> Iterator[str]:
    yield "# Exit codes\n\n| code | error | when |\n|---|---|---|"
    yield "| 0 |  | all went well |"
    kinds = [it for it in vars(errors).values() if isinstance(it, type) and issubclass(it, errors.SamerunError)]
    for kind in sorted(kinds, key=lambda it: it.exit_code):
        yield f"| {kind.exit_code} | `{kind.__name__}` | {_cell((kind.__doc__ or '').partition(chr(10) * 2)[0])} |"
    yield f"| {errors.STOPPED} |  | The run was stopped before its last step, with a checkpoint to go on from. |"


def _environment() -> Iterator[str]:
    files = [it for room in ("app", "launch") for it in (REPOSITORY / room).rglob("*") if it.suffix in (".py", ".sh", ".pbs")]
    read = {name for file in files for name in re.findall(r"SAMERUN_[A-Z_]*[A-Z]", file.read_text())}
    assert read == VARIABLES.keys() | {f"SAMERUN_{name}" for name in _OWN}, read
    yield "# Environment variables\n"
    yield "Those of schedulers, MPI and libraries are read as they are. `samerun launch --explain` prints every value and where"
    yield "it came from. A user may set these:\n"
    yield "| variable | meaning |\n|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items())


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (DOCS / "look-up" / name).write_text(text)


if __name__ == "__main__":
    main()
