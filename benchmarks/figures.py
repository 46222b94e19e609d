"""What the windows of `python -m benchmarks` say: medians, quartiles and ratios, as a table, as CSV and as JSON.

A ratio is the hand-written fused loop's time divided by the program's, both of the same round: 1.00 is the reference, above is
faster. A program's own cost is the difference of the same two. How many times as long as Samerun it takes is of the same round
too. Standard library; rich for the table.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

REFERENCE = "hand-written, fused"
"""The program that all others are compared with: a loop over tensors in memory with the fused AdamW."""
OURS, AUGMENTED = "samerun", " + augmentation"
"""Samerun's name, and what is added to that of a program that changes its images at random."""
LINEAR = "linear"
"""A model of one matrix: so small that a step costs what the program around it costs."""
REPORT, WINDOWS = "bench.json", "bench.csv"
_MS = 1e3
"""In microseconds, of which windows and reports are made: tables are in milliseconds."""


@dataclass(frozen=True)
class Group:
    """Programs that were compared with each other."""

    model: str
    threads: int
    """Threads of each process."""
    processes: int

    def __str__(self) -> str:
        return f"{self.model}, {_counted(self.processes, 'process')} of {_counted(self.threads, 'thread')}"


@dataclass(frozen=True)
class Turn:
    """One window of one program, in one round."""

    group: Group
    program: str
    round: int
    steps: int
    cpu_us_per_step: float
    wall_us_per_step: float


@dataclass(frozen=True)
class Spread:
    """The middle of some figures, and between what half of them lies."""

    median: float
    low: float
    """Their first quartile."""
    high: float
    """Their third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of one figure or more."""
        low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(median, low, high)

    def text(self, form: str, *, unit: float = 1.0) -> str:
        """Write it, with each figure in this form and in this unit."""
        median, low, high = self.median / unit, self.low / unit, self.high / unit
        return f"{median:{form}} ({low:{form}} to {high:{form}})"


@dataclass(frozen=True)
class Result:
    """What all rounds say of a program."""

    group: Group
    program: str
    cpu_us: Spread
    """CPU time of a step, of one process, in us."""
    wall_us: Spread
    ratio: Spread
    """Share of the reference's speed, by CPU time."""
    own_us: Spread
    """CPU time of a step beyond the reference's, in us."""
    times_ours: Spread
    """CPU time of a step, divided by that of Samerun: of Samerun with augmentation, where the program has it."""


def results(rows: Sequence[Turn]) -> list[Result]:
    """Return the result of each program of each group, in the order in which they first came."""
    found: dict[tuple[Group, str], dict[int, Turn]] = {}
    for row in rows:
        found.setdefault((row.group, row.program), {})[row.round] = row
    return [
        _result(rounds, found[group, REFERENCE], found[group, OURS + AUGMENTED * program.endswith(AUGMENTED)])
        for (group, program), rounds in found.items()
    ]


def _result(rounds: Mapping[int, Turn], references: Mapping[int, Turn], ours: Mapping[int, Turn]) -> Result:
    pairs = [(row.cpu_us_per_step, references[number].cpu_us_per_step) for number, row in rounds.items()]
    first = next(iter(rounds.values()))
    return Result(
        first.group,
        first.program,
        cpu_us=Spread.of([own for own, _ in pairs]),
        wall_us=Spread.of([row.wall_us_per_step for row in rounds.values()]),
        ratio=Spread.of([reference / own for own, reference in pairs]),
        own_us=Spread.of([own - reference for own, reference in pairs]),
        times_ours=Spread.of([row.cpu_us_per_step / ours[number].cpu_us_per_step for number, row in rounds.items()]),
    )


def table(group: Group, of_group: Sequence[Result], batch: int) -> Table:
    """Return the table of a group's results, in batches of `batch` samples over all processes.

    For the linear model it says what the loop around it costs, for others how they compare with Samerun.
    """
    is_linear = group.model == LINEAR
    fifth = "own ms a step" if is_linear else f"times {OURS}'s\n(quartiles)"
    made = Table(title=str(group), title_justify="left")
    made.add_column("program", no_wrap=True)
    for heading in ("CPU ms a step\n(quartiles)", "of the reference\n(quartiles)", fifth, "wall ms\na step", "samples/s"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in of_group:
        made.add_row(
            result.program,
            result.cpu_us.text(",.3f", unit=_MS),
            result.ratio.text(".3f"),
            f"{result.own_us.median / _MS:+,.3f}" if is_linear else result.times_ours.text(".2f"),
            f"{result.wall_us.median / _MS:,.3f}",
            f"{1e6 * batch / result.wall_us.median:,.0f}",
        )
    return made


def write(folder: Path, about: Mapping[str, Any], rows: Sequence[Turn], found: Iterable[Result]) -> None:
    """Write bench.csv, a line for each window, and bench.json: `about`, the results and the CPU us a step of each round."""
    with (folder / WINDOWS).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("model", "threads", "processes", "program", "round", "steps", "cpu_us_per_step", "wall_us_per_step"))
        for row in rows:
            place = (row.group.model, row.group.threads, row.group.processes, row.program, row.round, row.steps)
            writer.writerow((*place, f"{row.cpu_us_per_step:.2f}", f"{row.wall_us_per_step:.2f}"))
    by_group: dict[str, dict[str, Any]] = {}
    for result in found:
        times = [row.cpu_us_per_step for row in rows if (row.group, row.program) == (result.group, result.program)]
        by_group.setdefault(str(result.group), {})[result.program] = {
            "cpu_us_per_step": vars(result.cpu_us),
            "wall_us_per_step": vars(result.wall_us),
            "share_of_reference": vars(result.ratio),
            "own_us_per_step": vars(result.own_us),
            "times_samerun": vars(result.times_ours),
            "cpu_us_per_step_of_rounds": times,
        }
    (folder / REPORT).write_text(json.dumps({**about, "results": by_group}, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part and are installed."""
    packages = ("torch", "torchvision", "accelerate", "deepspeed", "lightning", "transformers", "timm", "safetensors")
    return {name: version(name) for name in packages if importlib.util.find_spec(name)}


def _counted(number: int, what: str) -> str:
    plural = {"process": "processes"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else plural}"
