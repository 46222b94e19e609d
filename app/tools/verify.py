"""`samerun verify RUN`: checks in a run's ledger that every global batch was applied exactly once, and shows where the time
went.

What was fed is compared with what the recipe in RUN says: the digest of each step's samples, which the run took from the
batches themselves, with that of the samples that the order of the data has there. Steps that a later start took again count
once. Works for a run that goes on, was killed, or was copied elsewhere: it reads ledger.jsonl and recipe.yaml only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.data.order import TrainBatches
from app.errors import RecipeError, RunFolderError, printable
from app.files import yaml_text
from app.options import Parser
from app.recipe import recipe_keys
from app.recipe.schema import Recipe
from app.runs import ledger, run_folder
from app.runs.ledger import Evaluated, Event, Start, Steps, TimeSpent, account

_MOST_SPANS = 10


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a ledger shows. Steps are numbered from 1; a list of them is one of spans, each without a gap."""

    starts: int
    first_step: int
    """1, or the first after the checkpoint of another run that this one began with."""
    last_step: int
    """The last that was taken, or that a checkpoint, a start or the end claims."""
    total_steps: int
    """Steps of the whole run."""
    resumed_from: str | None
    """The checkpoint with the steps before the first."""
    missing: list[range]
    doubled: list[range]
    different: list[range]
    """Steps that were fed other samples than the recipe says."""
    skipped: list[range]
    """Steps that were fed and not applied, since a gradient was not finite."""
    left_out: str | None = None
    """A sentence on the lines of the ledger that are broken: what they told is missing here."""

    @property
    def is_good(self) -> bool:
        """Whether every step so far was fed what the recipe says, exactly once."""
        return not (self.missing or self.doubled or self.different)

    def __str__(self) -> str:
        """The verdict as a user reads it: a sentence a line."""
        if self.last_step < self.first_step:
            return "no step was taken yet"
        every = "every one" if self.is_good else "NOT every one"
        done = "fed" if self.skipped else "applied"
        starts = f"{self.starts} start{'s' if self.starts > 1 else ''}"
        lines = [f"{every} of the {self._batches()} was {done} exactly once, over {starts}"]
        for spans, what in (
            (self.missing, "missing"),
            (self.doubled, "recorded twice"),
            (self.different, "fed other samples than the recipe says"),
            (self.skipped, "fed but not applied, because a gradient was not finite, or a spike"),
        ):
            count = sum(map(len, spans))
            if count:
                lines.append(f"{count:,} step{'s were' if count > 1 else ' was'} {what}: {_shown(spans)}")
        if self.first_step > 1:
            lines.append(f"the {self.first_step - 1:,} steps before were taken in another run, which saved {self.resumed_from}")
        if self.left_out:
            lines.append(self.left_out)
        return "\n".join(lines)

    def _batches(self) -> str:
        whole = f"{self.total_steps:,} global batches"
        if self.first_step > 1:
            return f"global batches {self.first_step:,} to {self.last_step:,} of {self.total_steps:,}"
        return whole if self.last_step == self.total_steps else f"first {self.last_step:,} of {whole}"


def main(argv: list[str]) -> int:
    """Print the verdict and where the time went; return 0 if every batch was fed once, and 1 if not."""
    parser = Parser(
        prog="samerun verify",
        description="Check in a run's ledger that every global batch was applied exactly once, and show where the time went.",
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_all(argv)
    verdict, spent = verify(arguments.run)
    if arguments.json:
        time = {**asdict(spent), "wall_s": spent.wall_s, "goodput": spent.share}
        values = {"verified": verdict.is_good, **asdict(verdict), "time": time}
        sys.stdout.write(json.dumps(values, default=_first_and_last) + "\n")
    else:
        sys.stdout.write(printable(f"{verdict}\n\n{_table(spent)}\n"))
    return 0 if verdict.is_good else 1


def verify(run_dir: Path) -> tuple[Verdict, TimeSpent]:
    """Return what a run's ledger shows, and where the time went.

    Raises RunFolderError if there is no ledger, or not its beginning, and RecipeError if the run's recipe cannot be read.
    """
    events, left_out = ledger.read(run_dir)
    if not events or not isinstance(events[0], Start):
        lost = f"{run_dir / run_folder.LEDGER} does not begin with a start of the run: its beginning is missing."
        raise RunFolderError(" ".join([lost, *([left_out] if left_out else [])]))
    verdict = examine(events, _recipe(run_dir / run_folder.RECIPE))
    return replace(verdict, left_out=left_out), account(events)


def _recipe(path: Path) -> Recipe:
    """What the samples of a step follow from, of the run's recipe: a task's file may be gone. Raises RecipeError."""
    text, _ = yaml_text.compose(path, name=str(path), error=RecipeError)
    written = yaml.safe_load(text)
    of_train = written.get("train") if isinstance(written, dict) else None
    found = {
        "seed": written.get("seed") if isinstance(written, dict) else None,
        "train.global_batch_size": of_train.get("global_batch_size") if isinstance(of_train, dict) else None,
    }
    unsaid = [key for key, value in found.items() if type(value) is not int]
    if unsaid:
        raise RecipeError(
            f"{path} does not say {' and '.join(unsaid)}, so it is truncated or belongs to another run: nothing can be verified"
        )
    return recipe_keys.build(found)


def examine(events: Sequence[Event], recipe: Recipe) -> Verdict:
    """Return what these lines, of which the first is a start, show of a run of `recipe`."""
    kept = ledger.counting(events)
    starts = [event for event in events if isinstance(event, Start)]
    steps = [event for event in kept if isinstance(event, Steps)]
    first_step = 1 + min(start.from_step for start in starts)
    # An evaluation comes before the line of its steps.
    last_step = max(ledger.last_step(event) for event in kept if not isinstance(event, Evaluated))
    missing, doubled, following = [], [], first_step
    for line in steps:
        missing.append(range(following, line.first))
        doubled.append(range(line.first, min(line.last + 1, following)))
        following = max(following, line.last + 1)
    missing.append(range(following, last_step + 1))
    expected = _expected_digests(recipe, training_samples=starts[-1].training_samples, last_step=last_step)
    different = [step for line in steps for step, digest in enumerate(line.digests, line.first) if digest != expected(step)]
    return Verdict(
        starts=len(starts),
        first_step=first_step,
        last_step=last_step,
        total_steps=max(starts[-1].total_steps, last_step),
        resumed_from=next((start.resumed_from for start in starts if start.from_step == first_step - 1), None),
        missing=[span for span in missing if span],
        doubled=[span for span in doubled if span],
        different=_spans(different),
        skipped=_spans(step for line in steps for step in line.skipped),
    )


def _expected_digests(recipe: Recipe, *, training_samples: int, last_step: int) -> Callable[[int], str]:
    """Return the function that says the digest of a step's samples; one step after the other costs least."""
    batches: Iterator[np.ndarray] = iter(())
    following = 0

    def at(step: int) -> str:
        nonlocal batches, following
        if step != following:
            order = TrainBatches(
                size=training_samples,
                seed=recipe.seed,
                global_batch_size=recipe.train.global_batch_size,
                micro_batches_per_step=1,
                first_step=step - 1,
                last_step=last_step,
            )
            batches = iter(order)
        following = step + 1
        return ledger.as_text(int(ledger.digest(next(batches))))

    return at


def _spans(steps: Iterable[int]) -> list[range]:
    """The steps in order, each once, as spans without a gap."""
    spans: list[range] = []
    for step in sorted(set(steps)):
        if spans and spans[-1].stop == step:
            spans[-1] = range(spans[-1].start, step + 1)
        else:
            spans.append(range(step, step + 1))
    return spans


def _shown(spans: Sequence[range]) -> str:
    shown = [f"{span.start}-{span.stop - 1}" if len(span) > 1 else str(span.start) for span in spans[:_MOST_SPANS]]
    return ", ".join(shown) + (", ..." if len(spans) > _MOST_SPANS else "")


def _first_and_last(span: Any) -> list[int]:
    assert isinstance(span, range)
    return [span.start, span.stop - 1]


def _table(spent: TimeSpent) -> str:
    rows = {
        "queue": spent.queue_s,
        "start-up": spent.startup_s,
        "compute": spent.compute_s,
        "data wait": spent.data_wait_s,
        "evaluation": spent.evaluation_s,
        "saving": spent.saving_s,
        "lost work": spent.lost_work_s,
        "between starts": spent.down_s,
        "other": spent.other_s,
        "whole time": spent.wall_s,
    }
    whole_s = spent.wall_s or 1.0
    lines = [
        f"{name:14} {'unknown':>16}" if seconds is None else f"{name:14} {seconds:14,.1f} s {seconds / whole_s:7.1%}"
        for name, seconds in rows.items()
    ]
    return "\n".join([*lines, f"goodput, the share of compute: {spent.share:.1%}"])
