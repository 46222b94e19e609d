"""`samerun parity`: shows that presets, numbers of processes and accumulation give the same run.

The reference is one process with the preset `cpu`, every global batch in one forward pass. Each case is started for real,
one after the other, through the command that `samerun launch` would run; what it wrote is then compared step by step:
losses to a tolerance, learning rates and samples exactly. A case that did not run as asked (processes, accumulation,
preset), stopped early or wrote too little is a failure, and so is a comparison without cases.

A recipe can amplify rounding until runs part, on one process as well: what it differs by from itself, when it takes each global
batch in two passes, is its floor, and is shown beside the rest.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from app.errors import RecipeError, RunFolderError, TopologyError
from app.options.command_line import Parser
from app.options.values import names, numbers, positive, tolerance
from app.place.topology import Topology
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe
from app.record.loss_curves import LossCurve, Variant, compare, read_curve, relative_differences
from app.reports.state import duration
from app.tools import quick
from launch import parallelism, preset
from launch.node_command import accelerate_argv

_START_S = 10.0
"""Of a run to its first step and from its last one to its end: 6 to 8 s measured on two cores, 10 to 14 s under DeepSpeed."""
_MOST_ROWS = 25
_TAIL_LINES = 20
_FLOOR = Variant("cpu", 1, 2)
_NEAR_FLOOR = 10
"""Times the floor, within which a difference has its reason: rounding that grows from step to step, of other sums each time."""
_SUMMARY_WIDTH = 120
"""Characters of the summary's widest row: the longest name of a preset, in a case that differs everywhere."""
# What the comparison itself decides; an override of the user's would make cases differ, or be replaced without a word.
_OWN_KEYS = {
    "train.steps": "--steps",
    "train.epochs": "--steps",
    "train.max_micro_batch": "--accumulation",
    "train.evaluate_every_epochs": None,
    "train.evaluate_every_steps": None,
    "log.every_steps": None,
    "log.samples": None,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case."""

    case: Variant
    elapsed_s: float
    """From starting the command to its end, imports included."""
    curve: LossCurve | None = None
    failure: str = ""
    """Why there is no curve."""


def choose_cases(
    recipe: Recipe, *, presets: Sequence[str], processes: Iterable[int], accumulations: Iterable[int]
) -> tuple[list[Variant], list[str]]:
    """Return every combination that can run, and a sentence for each one that cannot. Raises PresetError."""
    cases, skipped = [], []
    loaded = {name: preset.load(name) for name in presets}
    for (name, file), number, accumulation in itertools.product(loaded.items(), processes, accumulations):
        case = Variant(name, number, accumulation)
        if file.is_single_process and number > 1:
            skipped.append(f"{case}: preset {name} starts one process")
        elif reason := _cannot_divide(recipe, case, file):
            skipped.append(f"{case}: {reason}")
        else:
            cases.append(case)
    return cases, skipped


def _data_ranks(file: preset.Preset, processes: int) -> int:
    """How many ranks of so many processes divide the global batch."""
    return parallelism.data_ranks(file.name, file.sizes, Topology(processes_per_node=processes))


def _cannot_divide(recipe: Recipe, case: Variant, file: preset.Preset) -> str:
    """Why the global batch cannot be divided as the case asks; empty if it can."""
    if min(case.processes, case.accumulation) < 1:
        return "processes and accumulation start at 1"
    try:
        data_ranks = _data_ranks(file, case.processes)
    except TopologyError as error:
        return str(error)
    size, parts = recipe.train.global_batch_size, data_ranks * case.accumulation
    if size % parts:
        return f"{size} samples (train.global_batch_size) cannot be divided by {parts}"
    neighbours, why = recipe.sections.neighbours, recipe.sections.why_neighbours
    if size // parts % neighbours:
        return f"{size} samples (train.global_batch_size) / {parts} is no multiple of {neighbours}, and {why}"
    most = size // parts
    plan = BatchPlan.fit(global_batch_size=size, data_ranks=data_ranks, max_micro_batch=most, neighbours=neighbours)
    return "" if plan.accumulation == case.accumulation else f"the batch plan would take {plan.accumulation} passes"


def run_case(
    case: Variant, recipe: Recipe, *, name_or_path: str, overrides: Sequence[str], steps: int, folder: Path
) -> Outcome:
    """Run the case in `folder`/CASE, its output in `folder`/CASE.log, and read what it did."""
    run_dir, log = folder / str(case), folder / f"{case}.log"
    topology = Topology(processes_per_node=case.processes, origins={"processes_per_node": "--processes"})
    file = preset.load(case.preset)
    micro_batch = recipe.train.global_batch_size // (_data_ranks(file, case.processes) * case.accumulation)
    own = [f"train.steps={steps}", f"train.max_micro_batch={micro_batch}"]
    own += ["train.evaluate_every_epochs=0", "log.every_steps=1", "log.samples=true"]
    app_args = ["--recipe", name_or_path, "--run-dir", str(run_dir), "--trackers", "none", *overrides, *own]
    start_s = time.perf_counter()
    with log.open("w") as output:
        command = accelerate_argv(topology, file, app_args)
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    elapsed_s = time.perf_counter() - start_s
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return Outcome(case=case, elapsed_s=elapsed_s, failure=f"exit code {code}; the last lines of its output:\n{tail}")
    try:
        return Outcome(case=case, elapsed_s=elapsed_s, curve=read_curve(run_dir, case, steps=steps))
    except RunFolderError as error:
        return Outcome(case=case, elapsed_s=elapsed_s, failure=str(error))


def curves_table(reference: Outcome, outcomes: Sequence[Outcome], *, tolerance: float) -> Table:
    """Return the losses: a row for each step (25 at most), a column for each case; beyond the tolerance marked with a !."""
    assert reference.curve is not None
    table = Table(title=f"loss by step; ! where it differs by more than {tolerance:g} of the reference")
    for heading in ("step", f"reference\n{reference.case}", *(str(outcome.case).replace("-", "\n") for outcome in outcomes)):
        table.add_column(heading, justify="right", no_wrap=True)
    curves = [outcome.curve for outcome in outcomes]
    differences = [relative_differences(reference.curve.losses, curve.losses) if curve else [] for curve in curves]
    steps = len(reference.curve.losses)
    for row in range(rows := min(steps, _MOST_ROWS)):
        at = row * (steps - 1) // max(rows - 1, 1)
        cells = [f"{reference.curve.losses[at]:.7f}"]
        for curve, difference in zip(curves, differences, strict=True):
            cells.append(f"{curve.losses[at]:.7f}{'!' if difference[at] > tolerance else ' '}" if curve else "failed ")
        table.add_row(str(at + 1), *cells)
    return table


def summary_table(reference: Outcome, outcomes: Sequence[Outcome], *, tolerance: float) -> Table:
    """Return one row for each case: how far it is from the reference, its duration and the verdict."""
    assert reference.curve is not None
    table = Table(title=f"compared with {reference.case} over {len(reference.curve.losses)} steps")
    for heading in ("case\n(processes x accumulation)", "largest relative\nloss difference", "at step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("learning\nrates", "samples", "seconds", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        seconds = f"{outcome.elapsed_s:.1f}"
        if outcome.curve is None:
            table.add_row(str(outcome.case), "", "", "", "", seconds, "[red]failed[/]")
            continue
        found = compare(reference.curve, outcome.curve)
        exact = (
            "equal" if at is None else f"differ at {at}" for at in (found.learning_rates_differ_at, found.samples_differ_at)
        )
        verdict = "[green]same[/]" if found.is_same(tolerance) else "[red]different[/]"
        table.add_row(str(outcome.case), f"{found.largest_difference:.1e}", str(found.at_step), *exact, seconds, verdict)
    return table


def main(argv: list[str]) -> int:
    """Run the comparison from the command line; 0 only if every case is the same run as the reference."""
    options = _parser().parse_all(argv)
    if options.quick:
        return quick.main(options.recipe, options.overrides)
    refuse_own_keys(options.overrides, _OWN_KEYS)
    recipe = recipe_file.load(options.recipe, [*options.overrides, f"train.steps={options.steps}"]).recipe
    cases, skipped = choose_cases(
        recipe, presets=options.presets, processes=options.processes, accumulations=options.accumulation
    )
    console = console_of(columns=len(cases))
    for sentence in skipped:
        console.print(f"skipped {sentence}", markup=False)
    if not cases:
        raise RecipeError(
            "there is no case to compare with the reference: choose other --presets, --processes or --accumulation"
        )
    keep = Path(options.keep) if options.keep else None
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="samerun-parity-") as folder:
        outcomes: list[Outcome] = []
        own = [] if _FLOOR in cases or _cannot_divide(recipe, _FLOOR, preset.load(_FLOOR.preset)) else [_FLOOR]
        runs = [Variant("cpu", 1, 1), *cases, *own]
        for number, case in enumerate(runs):
            kind = "the reference" if not number else "the floor" if number > len(cases) else ""
            said = f"{number}/{len(runs) - 1} {case}{f', {kind}' if kind else ''}"
            console.print(f"{said}: {time_left(outcomes, len(runs), steps=options.steps)}", markup=False)
            place = Path(folder) / (kind.removeprefix("the ") or "cases")
            place.mkdir(exist_ok=True)
            run = {"name_or_path": options.recipe, "overrides": options.overrides, "steps": options.steps, "folder": place}
            outcomes.append(run_case(case, recipe, **run))
            if outcomes[0].curve is None:
                break
    floor = next((outcome for outcome in outcomes[1:] if outcome.case == _FLOOR), None)
    return report(console, outcomes[0], outcomes[1 : 1 + len(cases)], tolerance=options.tolerance, floor=floor)


def time_left(outcomes: Sequence[Outcome], runs: int, *, steps: int) -> str:
    """Say how long `runs` runs of so many steps will take, when these outcomes are there: by their times, if there are any."""
    left = runs - len(outcomes)
    if not outcomes:
        each = f"{steps} step{'s' if steps > 1 else ''}"
        return f"{left} runs, one after the other: about {duration(left * _START_S)} for starting, and {left} times {each}"
    mean_s = sum(outcome.elapsed_s for outcome in outcomes) / len(outcomes)
    return f"about {duration(left * mean_s)} left"


def report(
    console: Console, reference: Outcome, outcomes: Sequence[Outcome], *, tolerance: float, floor: Outcome | None = None
) -> int:
    """Print the tables, the floor and what went wrong; return the exit code, which the floor does not change."""
    for outcome in (reference, *outcomes):
        if outcome.failure:
            console.print(f"\n{outcome.case} failed: {outcome.failure}", markup=False)
    if reference.curve is None:
        return 1
    console.print(curves_table(reference, outcomes, tolerance=tolerance))
    console.print(summary_table(reference, outcomes, tolerance=tolerance))
    for sentence in floor_sentences(reference, outcomes, tolerance=tolerance, floor=floor):
        console.print(sentence, markup=False)
    curves = [outcome.curve for outcome in outcomes]
    return 0 if all(curve and compare(reference.curve, curve).is_same(tolerance) for curve in curves) else 1


def floor_sentences(reference: Outcome, outcomes: Sequence[Outcome], *, tolerance: float, floor: Outcome | None) -> list[str]:
    """Say how far one process is from itself with two passes a batch, and for which cases that is the reason to differ."""
    assert reference.curve is not None
    if floor is None:
        return ["the recipe's floor is unknown: its global batch cannot be divided into two passes"]
    if floor.curve is None:
        return [f"the recipe's floor is unknown: one process with two passes per batch failed: {floor.failure}"]
    least = compare(reference.curve, floor.curve)
    said = [f"floor: one process differs from itself by {least.largest_difference:.1e} with two passes a batch"]
    parted = {
        str(outcome.case): found
        for outcome in outcomes
        if outcome.case != _FLOOR
        and outcome.curve
        and not (found := compare(reference.curve, outcome.curve)).is_same(tolerance)
    }
    explained = [
        name
        for name, found in parted.items()
        if found.is_same(_NEAR_FLOOR * least.largest_difference) and least.largest_difference > tolerance / _NEAR_FLOOR
    ]
    if explained:
        said.append(
            f"the floor explains {', '.join(explained)}: these differ by less than {_NEAR_FLOOR} times the "
            "floor, with the same samples and rates. The recipe also differs from itself on one process: "
            "through batch statistics or dropout, if it has any, or because it amplifies rounding. A lower "
            "learning rate, a warm-up, or no kinks (ReLU, maxima) lower the floor"
        )
    if others := [name for name in parted if name not in explained]:
        said.append(f"the floor does not explain {', '.join(others)}: something else there depends on the topology")
    return said


def refuse_own_keys(overrides: Sequence[str], own: Mapping[str, str | None]) -> None:
    """Raise RecipeError for overrides of keys that a comparison sets itself, naming the option that says the same, if any."""
    given = [override.partition("=")[0].strip() for override in overrides]
    problems = []
    for key in given:
        if key in own:
            option = own[key]
            problems.append(f"{key} (command line): the comparison sets it{f'; use {option}' if option else ''}")
    if problems:
        raise RecipeError(*problems)


def console_of(*, columns: int) -> Console:
    """Return a console; where there is no terminal to fit into, wide enough for all columns."""
    return Console() if sys.stdout.isatty() else Console(width=max(_SUMMARY_WIDTH, 30 + 24 * columns))


def _parser() -> Parser:
    parser = Parser(
        prog="samerun parity",
        usage="%(prog)s [options] [key=value ...]",
        description="Run a recipe for a few steps under several presets and numbers of processes, one after the other. "
        "Compare losses, learning rates and samples with one process on the CPU, step by step.",
    )
    parser.add_argument("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check a task's rules in under a minute, and name a broken one: 3 small steps with 1 process, 1 process with "
        "gradient accumulation, and 2 processes; of the other options only --recipe applies",
    )
    parser.add_argument("--presets", type=names, default=["multi_gpu"], help="presets, comma-separated (default: multi_gpu)")
    parser.add_argument(
        "--processes", type=numbers, default=[1, 2], help="numbers of processes, comma-separated (default: 1,2)"
    )
    # The spellings of other commands, and of Accelerate.
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--preset", "--config_file", dest="presets", type=names, **hidden)
    parser.add_argument("--num_processes", dest="processes", type=numbers, **hidden)
    parser.add_argument(
        "--accumulation",
        type=numbers,
        default=[1],
        help="gradient accumulation: forward passes per step, such as 1,2 (default: 1)",
    )
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps to compare (default: 20)")
    parser.add_argument(
        "--tolerance", type=tolerance, default=1e-5, help="largest relative difference between losses (default: 1e-5)"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep the run folders and the output of all cases in DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values for all cases")
    return parser
