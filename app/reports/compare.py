"""`samerun compare RUN RUN`: what differs in recipe, preset, machines, versions and results, and whether it was the same run.

Two runs were the same if their recipes agree in all that decides what is learnt, and if the losses of all lines that cover
the same steps are the same to a tolerance. Reads run folders and nothing else; what cannot be known is said, not guessed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from app import ledger, run_folder
from app.curves import relative_differences
from app.goodput import account
from app.recipe_file import NOT_LEARNT
from app.reports import past_run, plots
from app.reports.past_run import PastRun

Pair = tuple[Any, Any]
_ABSENT = "absent"
_MOST_KEYS = 5  # that a sentence names
_WIDTH = 120  # of the tables where there is no terminal to fit into, in characters
_TOLERANCE = 1e-4  # what rounding alone grows to within 100 steps of a network with ReLU (docs/same-run.md)
_MACHINES = (
    "preset",
    "strategy",
    "mixed_precision",
    "world_size",
    "micro_batch",
    "accumulation",
    "global_batch_size",
    "commit",
)


@dataclass(frozen=True, kw_only=True)
class LossDifferences:
    """How the losses of two runs differ, over the lines that cover the same steps in both."""

    compared_lines: int
    up_to_step: int
    """The last that was compared; 0: none."""
    largest: float
    """Largest |second - first| / |first|."""
    largest_at_step: int
    first_beyond: int | None
    """The step of the first line that differs by more than the tolerance; None: all are within."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two runs, each value as (first, second)."""

    recipe: Mapping[str, Pair] | None
    """By key as on the command line; None if one of them cannot be read."""
    preset: Mapping[str, Pair]
    """By key of preset.yaml, where both runs have one."""
    machines: Mapping[str, Pair]
    """Preset by name, processes, hosts, batch plan, versions, commit."""
    results: Mapping[str, Pair]
    """All of them, as the files name them, those of the last lines; samples_per_s is the median of the lines. None: unknown."""
    losses: LossDifferences
    tolerance: float

    @property
    def learnt(self) -> list[str] | None:
        """The keys in which the recipes differ and that decide what is learnt; None if a recipe cannot be read."""
        return None if self.recipe is None else [key for key in self.recipe if not key.startswith(NOT_LEARNT)]

    @property
    def is_same(self) -> bool | None:
        """Whether it was the same run; None if that cannot be known."""
        if self.learnt or self.losses.first_beyond is not None:
            return False
        return True if self.losses.compared_lines and self.learnt is not None else None

    def __str__(self) -> str:
        """The verdict, in a sentence."""
        same = {True: "The same run", False: "Not the same run", None: "Not known whether it was the same run"}[self.is_same]
        recipes = "the recipes agree in all that is learnt"
        if self.learnt is None:
            recipes = "a recipe cannot be read"
        elif self.learnt:
            more = ", ..." if len(self.learnt) > _MOST_KEYS else ""
            recipes = f"the recipes differ in {', '.join(self.learnt[:_MOST_KEYS])}{more}"
        return f"{same}: {recipes}, and {self._of_losses()}."

    def _of_losses(self) -> str:
        found = self.losses
        if not found.compared_lines:
            return "no line of one covers the same steps as a line of the other, so that losses cannot be compared"
        most = f"the largest difference is {found.largest:.1e} of the loss, at step {found.largest_at_step}"
        if found.first_beyond is None:
            return f"all losses up to step {found.up_to_step} are the same to {self.tolerance:g}: {most}"
        return f"the losses of step {found.first_beyond} are the first to differ by more than {self.tolerance:g}: {most}"


def compare(one: PastRun, other: PastRun, *, tolerance: float) -> Comparison:
    """Compare two runs. `tolerance` is the largest relative difference of losses that are still the same."""
    presets = [_preset(run) for run in (one, other)]
    return Comparison(
        recipe=_different(_flat(one.recipe), _flat(other.recipe)) if one.recipe and other.recipe else None,
        preset=_different(*presets) if all(presets) else {},
        machines=_different(_machines(one), _machines(other)),
        results=_pairs(_results(one), _results(other)),
        losses=_loss_differences(one, other, tolerance=tolerance),
        tolerance=tolerance,
    )


def _loss_differences(one: PastRun, other: PastRun, *, tolerance: float) -> LossDifferences:
    losses = [_losses_by_steps(run) for run in (one, other)]
    common = sorted((steps for steps in losses[0] if steps in losses[1]), key=lambda steps: steps[1])
    differences = relative_differences(*([of_run[steps] for steps in common] for of_run in losses))
    ends = [last for _, last in common]
    at = max(range(len(common)), key=differences.__getitem__, default=None)
    return LossDifferences(
        compared_lines=len(common),
        up_to_step=ends[-1] if ends else 0,
        largest=0.0 if at is None else differences[at],
        largest_at_step=0 if at is None else ends[at],
        first_beyond=next((end for end, found in zip(ends, differences, strict=True) if found > tolerance), None),
    )


def _losses_by_steps(run: PastRun) -> dict[tuple[int, int], float]:
    """The loss of each line, by the steps of which it is the mean: those after the line before, or after a start."""
    starts = [event.from_step for event in ledger.counting(run.events) if isinstance(event, ledger.Start)]
    losses, previous = {}, 0
    for line in run.metrics:
        step = line["step"]
        first = max([previous, *(start for start in starts if start < step)]) + 1
        if isinstance(loss := line.get("loss"), float):
            losses[first, step] = loss
        previous = step
    return losses


def _machines(run: PastRun) -> dict[str, Any]:
    told = {key: run.about[key] for key in _MACHINES if key in run.about}
    ranks = run.about.get("ranks")
    if isinstance(ranks, list):  # of "HOST DEVICE"
        told["hosts"] = ", ".join(dict.fromkeys(str(rank).partition(" ")[0] for rank in ranks))
        told["devices"] = ", ".join(dict.fromkeys(str(rank).partition(" ")[2].partition(":")[0] for rank in ranks))
    starts = [event for event in run.events if isinstance(event, ledger.Start)]
    if starts:
        told |= {"starts": len(starts), "training_samples": starts[-1].training_samples, "total_steps": starts[-1].total_steps}
    return told | _flat({"versions": run.about.get("versions", {})})


def _results(run: PastRun) -> dict[str, Any]:
    last, tested = (lines[-1] if lines else {} for lines in (run.metrics, run.evaluations))
    rates = [line["samples_per_s"] for line in run.metrics if isinstance(line.get("samples_per_s"), float)]
    spent = account(run.events) if run.events and isinstance(run.events[0], ledger.Start) else None
    return {
        "steps": last.get("step"),
        "test_accuracy": tested.get("test_accuracy"),
        "test_loss": tested.get("test_loss"),
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "samples_per_s": statistics.median(rates) if rates else None,
        "compute_s": spent.compute_s if spent else None,
        "wall_s": spent.wall_s if spent else None,
    }


def _preset(run: PastRun) -> dict[str, Any]:
    """What preset.yaml says; empty where there is none: then the command line named no preset."""
    try:
        values = yaml.safe_load((run.folder / run_folder.PRESET).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        _say(f"{run.folder / run_folder.PRESET} cannot be read: {error}.")
        return {}
    return _flat(values) if isinstance(values, dict) else {}


def _flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Nested values by `section.key`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{section}{key}.") if isinstance(value, Mapping) else {f"{section}{key}": value}
    return found


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    return {key: (one.get(key, _ABSENT), other.get(key, _ABSENT)) for key in {**one, **other}}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    return {key: pair for key, pair in _pairs(one, other).items() if pair[0] != pair[1]}


def main(argv: list[str]) -> int:
    """Compare two runs from the command line; 0 only if they were the same run."""
    options = _parser().parse_args(argv)
    runs = [past_run.read(folder) for folder in options.runs]
    for run in runs:
        for complaint in run.complaints:
            _say(complaint)
    found = compare(*runs, tolerance=options.tolerance)
    if options.json:
        sys.stdout.write(json.dumps(_as_json(runs, found)) + "\n")
    else:
        _print(plots.labels(runs), found)
    return 0 if found.is_same else 1


def _as_json(runs: Sequence[PastRun], found: Comparison) -> dict[str, Any]:
    values = asdict(found)
    if math.isinf(found.losses.largest):
        values["losses"]["largest"] = None  # JSON has no infinity
    return {"runs": [str(run.folder) for run in runs], "same_run": found.is_same, "verdict": str(found), **values}


def _print(names: Sequence[str], found: Comparison) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for title, pairs in (("recipe", found.recipe or {}), ("preset", found.preset), ("processes and versions", found.machines)):
        if pairs:
            console.print(f"{title}: what differs")
            table = _table(names)
            for key, pair in pairs.items():
                table.add_row(escape(key), *(escape(_shown(value)) for value in pair))
            console.print(table)
    console.print("results")
    table = _table([*names, "difference"], justify="right")
    for key, pair in found.results.items():
        table.add_row(key, *map(_shown, pair), _difference(*pair))
    console.print(table)
    console.print(str(found), markup=False, highlight=False)


def _table(names: Sequence[str], justify: JustifyMethod = "left") -> Table:
    table = Table()
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify=justify, overflow="fold")
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _difference(one: Any, other: Any) -> str:
    """The second number less the first, and its share of the first."""
    if not all(isinstance(value, (int, float)) for value in (one, other)):
        return ""
    return f"{other - one:+,.6g}" + (f" ({other / one - 1:+.2%})" if one else "")


def _say(text: str) -> None:
    sys.stderr.write(f"samerun: {text}\n")


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 0 or more, such as 1e-5")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samerun compare",
        description="Say what differs between two runs, and whether they were the same one (exit code 0) or not (1).",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables and a sentence")
    parser.add_argument("--tolerance", type=_tolerance, default=_TOLERANCE, help="largest relative difference of a loss that "
                        f"is still the same (default: {_TOLERANCE:g})"
                        )  # fmt: skip
    return parser
