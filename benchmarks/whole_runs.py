"""What a program costs before its steps repeat: CPU seconds until the first one, and of a whole command with its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import contestants
from benchmarks.figures import Spread


@dataclass(frozen=True)
class Program:
    """A program and what it is given."""

    task: dict[str, Any]
    """An `benchmarks.work.Task`, of one epoch."""
    variables: Mapping[str, str]
    """Of the environment, as a preset sets them."""


def first_steps(programs: Mapping[str, Program], *, starts: int, threads: int, log: Path) -> dict[str, list[float]]:
    """Return the CPU seconds from the start of a process to the end of its first step, of so many starts of each in turns.

    Each writes its words to `log`. Raises TrainingError if one fails.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for number in range(starts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            task, variables = programs[name].task, programs[name].variables
            with contestants.start(name, task, threads=threads, log=log, variables=variables) as contestant:
                found[name].append(contestant.take_first_step())
    return found


def epochs(programs: Mapping[str, Program], *, threads: int, log: Path) -> dict[str, float]:
    """Return the CPU seconds of a process that trains an epoch, evaluates and ends. Raises TrainingError if one fails."""
    found = {}
    for name, program in programs.items():
        with contestants.start(name, program.task, threads=threads, log=log, variables=program.variables) as contestant:
            contestant.take_first_step()
            found[name] = contestant.run_to_the_end()
    return found


def table(model: str, first_steps_cpu_s: Mapping[str, Sequence[float]], epochs_cpu_s: Mapping[str, float]) -> Table:
    """Return the table of what was measured; one of both may be empty."""
    made = Table(title=f"{model}, CPU seconds of a process from its start", title_justify="left")
    made.add_column("program", no_wrap=True)
    columns = {
        "to the first step\n(quartiles)": {name: Spread.of(seconds).text(".2f") for name, seconds in first_steps_cpu_s.items()},
        "with an epoch\nand an evaluation": {name: f"{seconds:.1f}" for name, seconds in epochs_cpu_s.items()},
    }
    measured = {heading: cells for heading, cells in columns.items() if cells}
    for heading in measured:
        made.add_column(heading, justify="right", no_wrap=True)
    for name in next(iter(measured.values())):
        made.add_row(name, *(cells[name] for cells in measured.values()))
    return made
