"""`samerun verify RUN`: checks in a run's ledger that every global batch was applied exactly once, and shows where the time
went.

The digest of each step's samples, which the run computed from its batches, is compared with the digest of the samples that the
recipe in RUN gives for that step. Steps that a later start repeated count once. Works for a run that is running, was killed, or
was copied elsewhere: it reads ledger.jsonl and recipe.yaml only.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from app.data.order import TrainBatches
from app.errors import RecipeError, RunFolderError
from app.options import Parser
from app.reports.past_run import flat, print_text, read_yaml, time_parts
from app.reports.runs import Row, write
from app.runs import ledger, run_folder
from app.runs.ledger import Evaluated, Event, Start, StepSpan, TimeSpent, account

_MOST_SPANS = 10


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state of a ledger. Steps are numbered from 1; a list of steps is a list of spans, each without a gap."""

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
    """A sentence about broken lines of the ledger, whose steps are missing here."""

    @property
    def is_good(self) -> bool:
        """Return True if every step so far was fed what the recipe says, exactly once."""
        return not (self.missing or self.doubled or self.different)

    def __str__(self) -> str:
        """The verdict as a user reads it: a sentence a line."""
        if self.last_step < self.first_step:
            return "no step was taken yet"
        every = "every one" if self.is_good else "NOT every one"
        done = "processed" if self.skipped else "applied"
        over = f"{self.starts} attempt{'s' * (self.starts > 1)}"
        lines = [f"{every} of the {self._batches()} was {done} exactly once, over {over}"]
        for spans, what in (
            (self.missing, "missing"),
            (self.doubled, "recorded twice"),
            (self.different, "trained on other samples than the recipe specifies"),
            (self.skipped, "computed but not applied, because a gradient was not finite or a spike"),
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
    """Print the verdict and where the time went; return 0 if every batch was trained on once, and 1 if not."""
    parser = Parser("verify", "Check that each global batch of a run was applied exactly once; show where the time went.")
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_all(argv)
    verdict, spent = verify(arguments.run)
    if arguments.json:
        time = {**asdict(spent), "wall_s": spent.wall_s, "goodput": spent.share}
        values = {"verified": verdict.is_good, **asdict(verdict), "time": time}
        sys.stdout.write(json.dumps(values, default=lambda span: [span.start, span.stop - 1]) + "\n")
    else:
        print_text(str(verdict))
        rows: list[Row] = []
        for name, seconds in time_parts(spent).items():
            known = {} if seconds is None else {"seconds": round(seconds, 1), "share": f"{seconds / (spent.wall_s or 1.0):.1%}"}
            rows.append({"part": name, "seconds": "unknown", "share": "", **known})
        write(rows)
        print_text(f"goodput, the share of compute: {spent.share:.1%}")
    return 0 if verdict.is_good else 1


def verify(run_dir: Path) -> tuple[Verdict, TimeSpent]:
    """Return what a run's ledger shows, and where the time went.

    Raises RunFolderError if there is no ledger, or not its beginning, and RecipeError if the run's recipe cannot be read.
    """
    events, left_out = ledger.read(run_dir)
    if not events or not isinstance(events[0], Start):
        lost = f"{run_dir / run_folder.LEDGER} does not begin with an attempt of the run: its beginning is missing."
        raise RunFolderError(" ".join([lost, *([left_out] if left_out else [])]))
    path = run_dir / run_folder.RECIPE  # not as a recipe, because a task's file may be gone
    recipe = flat(read_yaml(path))
    seed, global_batch_size = recipe.get("seed"), recipe.get("train.global_batch_size")
    if type(seed) is not int or type(global_batch_size) is not int:
        raise RecipeError(f"{path} lacks seed or train.global_batch_size: it is truncated or belongs to another run")
    verdict = examine(events, seed=seed, global_batch_size=global_batch_size)
    return replace(verdict, left_out=left_out), account(events)


def examine(events: Sequence[Event], *, seed: int, global_batch_size: int) -> Verdict:
    """Return what these lines, of which the first is a start, show of a run."""
    kept = ledger.counting(events)
    starts = [event for event in events if isinstance(event, Start)]
    steps = [event for event in kept if isinstance(event, StepSpan)]
    first_step = 1 + min(start.from_step for start in starts)
    # An evaluation comes before the line of its steps.
    last_step = max(ledger.last_step(event) for event in kept if not isinstance(event, Evaluated))
    missing, doubled, following = [], [], first_step
    for line in steps:
        missing.append(range(following, line.first))
        doubled.append(range(line.first, min(line.last + 1, following)))
        following = max(following, line.last + 1)
    missing.append(range(following, last_step + 1))
    different = []
    for line in steps:
        batches = TrainBatches(
            size=starts[-1].training_samples,
            seed=seed,
            global_batch_size=global_batch_size,
            micro_batches_per_step=1,
            first_step=line.first - 1,
            last_step=line.last,
        )
        fed = zip(itertools.count(line.first), line.digests, batches, strict=False)
        different += [step for step, digest, batch in fed if digest != ledger.as_text(int(ledger.digest(batch)))]
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
