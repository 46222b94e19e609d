"""`samerun verify RUN`: checks in a run's ledger that every global batch was applied exactly once, and shows where the time
went.

The digest of each step's samples, which the run computed from its batches, is compared with the digest of the samples that the
recipe in RUN gives for that step. Steps that a later start repeated count once. Works for a run that is running, was killed, or
was copied elsewhere: it reads ledger.jsonl and recipe.yaml only. With --replay, random steps are also computed
again (`app.checks.replay`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from app.checks import replay
from app.data.order import TrainBatches
from app.errors import RecipeError, RunFolderError
from app.options import Parser, positive
from app.recipe.schema import skipped_upto
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
    skipped_by_recipe: list[range]
    """Steps that were fed and not applied, since train.skip_steps has them."""
    against_recipe: list[range]
    """Steps that were computed although train.skip_steps has them, or skipped by the recipe although it does not."""
    left_out: str | None = None
    """A sentence about broken lines of the ledger, whose steps are missing here."""

    @property
    def is_good(self) -> bool:
        """Return True if every step so far was fed what the recipe says, exactly once."""
        return not (self.missing or self.doubled or self.different or self.against_recipe)

    def __str__(self) -> str:
        """The verdict as a user reads it: a sentence a line."""
        if self.last_step < self.first_step:
            return "no step was taken yet"
        every = "every one" if self.is_good else "NOT every one"
        done = "processed" if self.skipped or self.skipped_by_recipe else "applied"
        over = f"{self.starts} attempt{'s' * (self.starts > 1)}"
        lines = [f"{every} of the {self._batches()} was {done} exactly once, over {over}"]
        for spans, what in (
            (self.missing, "missing"),
            (self.doubled, "recorded twice"),
            (self.different, "trained on other samples than the recipe specifies"),
            (self.against_recipe, "skipped or computed in contradiction to train.skip_steps"),
            (self.skipped, "computed but not applied, because a gradient was not finite or a spike"),
            (self.skipped_by_recipe, "skipped as train.skip_steps specifies"),
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


def main(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Print the verdict and where the time went; return 0 if every batch was trained on once, and 1 if not."""
    parser = Parser("verify", "Check that each global batch of a run was applied exactly once; show where the time went.")
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run folder")
    parser.add_argument("--replay", type=positive, metavar="N", help="also replay N random steps, as below")
    replay.add_options(parser)
    arguments = parser.parse_all(argv)
    if arguments.overrides and not arguments.replay:
        parser.error(f"{arguments.overrides[0]}: one argument too many")
    verdict, spent = verify(arguments.run)
    replays = _replayed(arguments, environment, say) if arguments.replay else []
    largest = replay.largest_difference(value for it in replays for value in it.values)
    count, is_good = sum(len(it.walk.wanted) for it in replays), verdict.is_good and not any(it.causes for it in replays)
    if arguments.json:
        time = {**asdict(spent), "wall_s": spent.wall_s, "goodput": spent.share}
        replayed = {"steps": count, "largest": largest, "replays": [it.as_json() for it in replays]}
        values = {"verified": is_good, **asdict(verdict), "time": time, **({"replayed": replayed} if replays else {})}
        sys.stdout.write(json.dumps(values, default=lambda span: [span.start, span.stop - 1]) + "\n")
    else:
        print_text(str(verdict))
        rows: list[Row] = []
        for name, seconds in time_parts(spent).items():
            known = {} if seconds is None else {"seconds": round(seconds, 1), "share": f"{seconds / (spent.wall_s or 1.0):.1%}"}
            rows.append({"part": name, "seconds": "unknown", "share": "", **known})
        write(rows)
        print_text(f"goodput, the share of compute: {spent.share:.1%}")
        if replays:
            print_text(f"{count:,} of {verdict.last_step:,} steps computed again here; largest difference {largest:.1e}")
        for it in replays:
            replay.show(it)
    return 0 if is_good else 1


def _replayed(arguments: argparse.Namespace, environment: Mapping[str, str], say: Callable[[str], None]) -> list[replay.Replay]:
    """Return replays of random steps of the run, the same for the same ledger."""
    record = replay.Record.of(arguments.run)
    steps = sorted(step for step in record.digests if record.span_of(step) in record.losses)
    if not steps:
        raise RunFolderError(f"{arguments.run} has logged no loss yet, so there is nothing to compare a replay with.")
    chosen = random.Random("".join(record.digests.values())).sample(steps, min(arguments.replay, len(steps)))
    with tempfile.TemporaryDirectory(prefix="samerun-replay-") as folder:
        return replay.replay_all(replay.Replayer(record, arguments, Path(folder), environment), chosen, say=say)


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
    try:
        skip_steps = [(int(first), int(end)) for first, end in recipe.get("train.skip_steps") or ()]
    except (TypeError, ValueError):
        raise RecipeError(f"{path} has no pairs of steps as train.skip_steps: it belongs to another run") from None
    verdict = examine(events, seed=seed, global_batch_size=global_batch_size, skip_steps=skip_steps)
    return replace(verdict, left_out=left_out), account(events)


def examine(events: Sequence[Event], *, seed: int, global_batch_size: int, skip_steps: Iterable[Iterable[int]] = ()) -> Verdict:
    """Return what these lines, of which the first is a start, show of a run whose recipe has these values."""
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
            shuffled=starts[-1].shuffled,
        )
        fed = zip(itertools.count(line.first), line.digests, batches, strict=False)
        different += [step for step, digest, batch in fed if digest != ledger.as_text(int(ledger.digest(batch)))]
    to_skip = {step for span in skipped_upto(skip_steps, last_step) for step in range(*span)}
    fed_to_skip = {step for line in steps for step in range(line.first, line.last + 1) if step in to_skip}
    by_recipe = {step for line in steps for step in line.skipped_by_recipe}
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
        skipped_by_recipe=_spans(by_recipe),
        against_recipe=_spans(by_recipe ^ fed_to_skip),
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
