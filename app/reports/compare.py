"""`samerun compare RUN RUN`: show what differs between two runs, and whether they were the same run.

The one comparison of runs, for `samerun compare` and `samerun parity`. Two runs were the same if their recipes agree in all
that affects training, if every step that both took had the same samples and learning rate, and if the losses of their first
hundred common steps agree within a tolerance. Later losses drift apart by rounding, the sooner the more kinks a network has.
Then the verdict names the step up to which they agree. Whatever is unknown is reported as unknown.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from app import tasks
from app.files.text_files import is_count
from app.options import Parser, tolerance
from app.recipe import recipe_file, task_file
from app.reports import past_run
from app.reports.curves import labels
from app.reports.past_run import Line, PastRun, flat, print_text, quantities, scores
from app.reports.runs import Row, console, print_wrapped, text_of, write
from app.runs import ledger, run_folder

Pair = tuple[Any, Any]
ABSENT = "absent"
"""A value that one of two runs lacks: a key that is newer than the run, for example."""
_MOST_KEYS = 5  # that a sentence names
DECIDING_STEPS = 100
_EARLY_STEPS, EARLY, _LATE = 20, 1e-5, 1e-4
"""Largest relative difference of losses in the first steps, and in all that decide: upper bounds of what rounding grows to in a
network with ReLU (docs/same-run.md)."""
_ROUNDING, _ROUNDING_STEPS = 1e-6, 10
"""Largest relative difference that is rounding alone, and steps after which a further drift can be rounding that has grown."""
_DRIFT = (
    "Rounding can cause such a drift: it grows from step to step, and jumps where a network has kinks (ReLU, maxima). These "
    "losses cannot show whether rounding is the only cause; with train.dtype=float64, equal runs stay together"
)
_MACHINES = ("preset", "strategy", "mixed_precision", "world_size", "micro_batch", "accumulation", "global_batch_size",
             "commit")  # fmt: skip


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
    same_up_to_step: int
    """Last step of the line before it, or of all lines; 0: none."""
    deciding_up_to_step: int
    """Later lines may differ, as rounding grows; 0: none was compared."""
    rounding: float
    """Largest difference up to `rounding_up_to_step`."""
    rounding_up_to_step: int
    """Last step of the first lines that differ by no more than rounding; 0: none."""
    tolerance: float
    """Largest difference that is the same loss at the step that decides: the first beyond it, or else the last."""

    @property
    def are_same(self) -> bool:
        """Return True if the lines that decide are the same to the tolerance, or there are none."""
        return self.first_beyond is None or self.first_beyond > self.deciding_up_to_step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between two runs, each value as (first, second)."""

    recipe: Mapping[str, Pair] | None
    """By key as on the command line, and the files of a user's task; None if one of them cannot be read."""
    learnt: list[str] | None
    """Keys of `recipe` that affect training; None if a recipe cannot be read."""
    machines: Mapping[str, Pair]
    """Preset by name, processes, hosts, batch plan, versions, commit."""
    results: Mapping[str, Pair]
    """All results by their names in the files, of the last lines; the speed is that of result.json. None: unknown."""
    compared_steps: int
    """Steps whose samples both ledgers know."""
    samples_differ_at: int | None
    """First step with other samples; None: all are the same."""
    rates_differ_at: int | None
    """First line with another learning rate than the other run's of the same step; None: all are the same."""
    losses: LossDifferences
    reason: str = ""
    """Why losses differ although recipe, samples and rates are the same, where the runs show it; empty: unknown."""

    @property
    def is_fed_the_same(self) -> bool:
        """True if the steps that both took had the same samples and learning rates."""
        return self.samples_differ_at is None and self.rates_differ_at is None

    @property
    def is_same(self) -> bool | None:
        """True if it was the same run; None if that cannot be known."""
        if self.learnt or not self.is_fed_the_same or not self.losses.are_same:
            return False
        return True if self.losses.compared_lines and self.learnt is not None else None

    def __str__(self) -> str:
        """The verdict, in a sentence."""
        same = {True: "The same run", False: "Not the same run", None: "Not known to be the same run"}[self.is_same]
        if self.is_same and self.losses.first_beyond is not None:
            same = f"The same run up to step {self.losses.same_up_to_step}"
        recipes = "same training settings"
        if self.learnt is None:
            recipes = "a recipe cannot be read"
        elif self.learnt:
            more = ", ..." if len(self.learnt) > _MOST_KEYS else ""
            recipes = f"the recipes differ in {', '.join(self.learnt[:_MOST_KEYS])}{more}"
        return f"{same}: {recipes}; {self._samples_verdict()}; {self._losses_verdict()}."

    def _samples_verdict(self) -> str:
        if self.samples_differ_at is not None:
            return f"step {self.samples_differ_at} is the first with different samples"
        if self.rates_differ_at is not None:
            return f"step {self.rates_differ_at} is the first with a different learning rate"
        if not self.compared_steps:
            return "the ledgers do not record the samples of any shared step"
        steps = f"all {self.compared_steps:,} shared steps" if self.compared_steps > 1 else "the one shared step"
        return f"same samples and learning rates in {steps}"

    def _losses_verdict(self) -> str:
        found = self.losses
        if not found.compared_lines:
            return "losses cannot be compared, as no lines of the two runs cover the same steps"
        most = f"(largest relative difference {found.largest:.1e}, at step {found.largest_at_step})"
        if found.first_beyond is None:
            return f"losses agree within {found.tolerance:g} {most}"
        text = f"losses differ by more than {found.tolerance:g} from step {found.first_beyond} {most}"
        if found.are_same:
            text = f"losses agree within {found.tolerance:g} up to step {found.same_up_to_step}, then drift apart {most}"
        return ". ".join(filter(None, (text, self.reason)))


def compare(one: PastRun, other: PastRun, *, tolerance: float | None = None) -> Comparison:
    """Compare two runs. `tolerance`: largest relative difference of losses; None: 1e-5 in the first 20 steps, then 1e-4."""
    recipe = _different(_recipe(one), _recipe(other)) if one.recipe and other.recipe else None
    own = (key for run in (one, other) for key in run.about.get("not_learnt", ()) if isinstance(key, str))  # of a user's task
    not_learnt = {*own, *(key for task in tasks.SHIPPED for key in recipe_file.marked("not_learnt", task))}
    first, second = digests(one), digests(other)
    found = Comparison(
        recipe=recipe,
        learnt=None if recipe is None else [key for key in recipe if key not in not_learnt],
        machines=_different(_machines(one), _machines(other)),
        results=_pairs(_results(one), _results(other)),
        compared_steps=len(first.keys() & second.keys()),
        samples_differ_at=_first_difference(first, second),
        rates_differ_at=_first_difference(learning_rates(one), learning_rates(other)),
        losses=_loss_differences(one, other, tolerance=tolerance),
    )
    is_explained = not found.learnt and found.is_fed_the_same and found.losses.first_beyond is not None
    return replace(found, reason=_reason(one.about, other.about, found.losses)) if is_explained else found


def _reason(one: Line, other: Line, losses: LossDifferences) -> str:
    """Return why losses differ, by the run.json of both runs, or by how they begin to differ."""
    layers = one.get("batch_norms", 0)
    lead = {"micro_batch": f"{layers} batch normalization layers computed statistics per micro-batch, and "}
    for key in ("mixed_precision", "tf32", *(["micro_batch"] if is_count(layers) and layers else [])):
        first, second = text_of(one.get(key)), text_of(other.get(key))
        if first != second:
            return f"A known reason: {lead.get(key, '')}{key} is {first} in the first run and {second} in the second"
    if losses.are_same:
        return _DRIFT
    start = f"Up to step {losses.rounding_up_to_step} the difference is at most {losses.rounding:.0e}. {_DRIFT}"
    return start if losses.rounding_up_to_step >= _ROUNDING_STEPS else ""


def _recipe(run: PastRun) -> dict[str, Any]:
    """Return the recipe by key. A task's file is its name and a digest of its contents, not its path."""
    digest = run.about.get("task_digest", "none")
    own = {"task": task_file.name_of(str(run.recipe["task"]))} if "task" in run.recipe else {}
    return {**flat(run.recipe), **own, **({} if digest == "none" else {"the task's files": digest})}


def _loss_differences(one: PastRun, other: PastRun, *, tolerance: float | None) -> LossDifferences:
    losses = [losses_by_steps(run) for run in (one, other)]
    common = sorted((steps for steps in losses[0] if steps in losses[1]), key=lambda steps: steps[1])
    differences = [relative_difference(losses[0][steps], losses[1][steps]) for steps in common]
    ends = [last for _, last in common]
    at = max(range(len(common)), key=differences.__getitem__, default=None)
    before = common[0][0] - 1 if common else 0

    def allowed(step: int) -> float:
        return (EARLY if step - before <= _EARLY_STEPS else _LATE) if tolerance is None else tolerance

    beyond = next((end for end, found in zip(ends, differences, strict=True) if found > allowed(end)), None)
    # The first line decides, however many steps it covers.
    deciding = max(ends[0], before + DECIDING_STEPS) if common else 0
    last = ends[-1] if ends else 0
    close = list(itertools.takewhile(lambda it: it[1] <= _ROUNDING, zip(ends, differences, strict=True)))
    return LossDifferences(
        compared_lines=len(common),
        up_to_step=last,
        largest=0.0 if at is None else differences[at],
        largest_at_step=0 if at is None else ends[at],
        first_beyond=beyond,
        same_up_to_step=max((end for end in ends if beyond is None or end < beyond), default=0),
        deciding_up_to_step=max((end for end in ends if end <= deciding), default=0),
        rounding=max((found for _, found in close), default=0.0),
        rounding_up_to_step=close[-1][0] if close else 0,
        tolerance=allowed(last if beyond is None else beyond),
    )


def relative_difference(reference: float, loss: float) -> float:
    """Return |loss - reference| / |reference|: infinite if one is not finite, or only the reference 0."""
    if not (math.isfinite(reference) and math.isfinite(loss)):
        return math.inf  # two that are not finite are not the same run either
    if reference == loss:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference else math.inf


def _first_difference(one: Mapping[int, Any], other: Mapping[int, Any]) -> int | None:
    return min((step for step in one.keys() & other.keys() if one[step] != other[step]), default=None)


def digests(run: PastRun) -> dict[int, str]:
    """Return the digest of the samples of each step that counts."""
    lines = [event for event in ledger.counting(run.events) if isinstance(event, ledger.StepSpan)]
    found = {step: digest for line in lines for step, digest in enumerate(line.digests, start=line.first)}
    for line in lines:  # samples of a mixture are numbered alike whatever the sources are
        for name, counts in line.sources.items():
            found |= {step: f"{found[step]}, {name} {count}" for step, count in enumerate(counts, start=line.first)}
    return found


def learning_rates(run: PastRun) -> dict[int, float]:
    """Return the learning rate of each line, by its step."""
    return {line["step"]: line["learning_rate"] for line in run.metrics if isinstance(line.get("learning_rate"), float)}


def losses_by_steps(run: PastRun) -> dict[tuple[int, int], float]:
    """Return the loss of each line, by the steps of which it is the mean: those after the line before, or after a start."""
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
    found = {key: run.about[key] for key in _MACHINES if key in run.about}
    ranks = run.about.get("ranks")
    if isinstance(ranks, list):  # of "HOST DEVICE"
        found["hosts"] = ", ".join(dict.fromkeys(str(rank).partition(" ")[0] for rank in ranks))
        found["devices"] = ", ".join(dict.fromkeys(str(rank).partition(" ")[2].partition(":")[0] for rank in ranks))
    if starts := run.starts:
        found |= {"starts": len(starts), "training_samples": starts[-1].training_samples, "total_steps": starts[-1].total_steps}
    return found | flat({"versions": run.about.get("versions", {})})


def _results(run: PastRun) -> dict[str, Any]:
    last, tested = (lines[-1] if lines else {} for lines in (run.metrics, run.evaluations))
    speed, seen = f"{run.unit}_per_s", f"{run.unit}_seen"
    return {
        "steps": last.get("step"),
        **scores(run, tested),
        **{quantity: last[quantity] for quantity in reversed(quantities([run])) if quantity in last},
        **({seen: last[seen]} if run.unit != run_folder.UNIT and seen in last else {}),
        speed: run.result.get(speed),
    }


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    return {key: (one.get(key, ABSENT), other.get(key, ABSENT)) for key in {**one, **other}}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the pairs of unequal values; the order within a value counts, as in `optim.groups`."""
    return {key: pair for key, pair in _pairs(one, other).items() if len({json.dumps(it, default=str) for it in pair}) > 1}


def main(argv: list[str]) -> int:
    """Compare two runs from the command line; 0 only if they were the same run."""
    parser = Parser("compare", "Show what differs between two runs, and whether they are the same (exit code 0) or not (1).")
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--tolerance", type=tolerance, metavar="NUMBER", help="largest relative difference of losses in the "
        f"first {DECIDING_STEPS} steps of the same run (default: 1e-5 in the first 20 steps, then 1e-4)")  # fmt: skip
    options = parser.parse_all(argv)
    runs = [past_run.read(folder) for folder in options.runs]
    for complaint in [complaint for run in runs for complaint in run.complaints]:
        past_run.say(complaint)
    found = compare(*runs, tolerance=options.tolerance)
    if options.json:
        values = asdict(found)
        if math.isinf(found.losses.largest):
            values["losses"]["largest"] = None  # JSON has no infinity
        same_run = {"runs": [str(run.folder) for run in runs], "same_run": found.is_same, "verdict": str(found)}
        sys.stdout.write(json.dumps({**same_run, **values}) + "\n")
    else:
        _print_tables(runs, found)
    return 0 if found.is_same else 1


def _print_tables(runs: Sequence[PastRun], found: Comparison) -> None:
    tables = {"recipe: what differs": found.recipe, "processes and versions: what differs": found.machines}
    names = labels(runs)
    for title, pairs in (tables | {"results": found.results}).items():
        rows: list[Row] = []
        for key, pair in (pairs or {}).items():
            if ABSENT not in pair:
                unknown = "unknown" if title == "results" else "null"
                values = (unknown if value is None else text_of(value) for value in pair)
                row = {"": key, **dict(zip(names, values, strict=True))}
                rows.append({**row, "difference": _difference(*pair)} if title == "results" else row)
        if pairs:
            print_text(title)
        if rows:
            write(rows)
        for name, missing in zip(names, (1, 0), strict=True):
            if alone := [key for key, pair in (pairs or {}).items() if pair[missing] == ABSENT]:
                print_wrapped(f"only in {name}: {', '.join(alone)}")
    console(120).print(str(found), markup=False)


def _difference(one: Any, other: Any) -> str:
    """Return the second number minus the first, and that as a share of the first where it is informative."""
    if not all(isinstance(value, (int, float)) for value in (one, other)):
        return ""
    by, share = other - one, other / one - 1 if one else 0.0
    return (f"{by:+,.0f}" if 1e3 <= abs(by) < 1e9 else f"{by:+.3g}") + (f" ({share:+.2%})" if 1e-4 <= abs(share) < 10 else "")
