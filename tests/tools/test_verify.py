"""`samerun verify` on ledgers of made-up histories: what is whole is called whole, what is not is named, and time adds up.

tests/runs/test_resume.py has the ledger of a real run that was killed.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.data.order import TrainBatches
from app.errors import RecipeError, RunFolderError
from app.recipe import recipe_file
from app.recipe.schema import Recipe, TrainRecipe
from app.runs import ledger
from app.runs.claim import claim
from app.runs.ledger import End, Evaluated, Event, Saved, Start, StepSpan, TimeSpent, account
from app.tools.verify import Verdict, examine
from launch import cli

SIZE, RECIPE = 26, Recipe(seed=3, train=TrainRecipe(global_batch_size=8))  # 3 steps an epoch, and 2 samples left out
SECONDS = st.integers(0, 1000).map(lambda number: number / 8)


def fed(step: int, pieces: int = 1) -> str:
    """The digest of a step as ranks and micro-batches make it, piece by piece."""
    batches = TrainBatches(
        size=SIZE, seed=3, global_batch_size=8, micro_batches_per_step=pieces, first_step=step - 1, last_step=step
    )
    total = sum(ledger.digest(torch.from_numpy(batch)) for batch in batches)
    return ledger.as_text(int(total))


def start(from_step: int, total_steps: int, **moments: float | None) -> Start:
    return Start(
        **{"time": 0.0, "launched": 0.0, "submitted": None, "allocated": None, **moments},
        from_step=from_step, total_steps=total_steps, training_samples=SIZE, world_size=1, preset="cpu",
        resumed_from=f"other/checkpoints/{from_step}" if from_step else None, job=None,
    )  # fmt: skip


def steps(first: int, last: int, **given: object) -> StepSpan:
    digests = tuple(fed(step) for step in range(first, last + 1))
    return replace(StepSpan(time=0.0, first=first, last=last, digests=digests, training_s=1.0, waiting_s=0.0), **given)


def write(run_dir: Path, events: list[Event]) -> None:
    (run_dir / "recipe.yaml").write_text(recipe_file.to_yaml(RECIPE))
    ours = claim(run_dir)
    ours.go_on_after(0)
    for event in events:
        ours.append("ledger.jsonl", ledger.line(event))


def written(events: list[Event]) -> list[Event]:
    """The lines as they come back from a file; half a line is wherever a start was killed."""
    with tempfile.TemporaryDirectory() as folder:
        for event in events:
            if isinstance(event, Start):
                with (Path(folder) / "ledger.jsonl").open("a") as file:
                    file.write('{"event": "steps", "fir')
                ours = claim(Path(folder))
                ours.go_on_after(0)
            ours.append("ledger.jsonl", ledger.line(event))
        found, complaint = ledger.read(Path(folder))
        assert complaint is None
        return found


def verdict_of(events: list[Event]) -> Verdict:
    return examine(written(events), seed=3, global_batch_size=8)


# Histories -------------------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """A run as it went, told by somebody who knows what became of each second."""

    total_steps: int
    events: list[Event] = field(default_factory=list)
    now: float = 1000.0
    spent: Counter[str] = field(default_factory=Counter)
    work: list[tuple[int, str, float]] = field(default_factory=list)
    """Step, part and seconds of all that may turn out to be lost."""
    saved: list[int] = field(default_factory=list)

    def spend(self, part: str, seconds: float) -> float:
        self.spent[part] += seconds
        self.now += seconds
        return self.now

    def begin(self, draw: st.DrawFn, from_step: int) -> None:
        self.spent["lost_work_s"] += sum(seconds for step, _, seconds in self.work if step > from_step)
        self.work = [item for item in self.work if item[0] <= from_step]
        self.saved = [step for step in self.saved if step <= from_step]
        submitted = allocated = None
        if draw(st.booleans()):
            if self.events:
                self.spend("down_s", draw(SECONDS))
            submitted = self.now
            allocated = self.spend("queue_s", draw(SECONDS))
            launched = self.spend("startup_s", draw(SECONDS))
        else:
            launched = self.spend("down_s", draw(SECONDS)) if self.events else self.now
        said = self.spend("startup_s", draw(SECONDS))
        self.events.append(
            start(from_step, self.total_steps, time=said, launched=launched, submitted=submitted, allocated=allocated)
        )

    def take(self, draw: st.DrawFn, first: int, last: int) -> None:
        if isinstance(self.events[-1], Start):
            self.spend("startup_s", draw(SECONDS))
        count, compute_s, waiting_s = last - first + 1, draw(SECONDS), draw(SECONDS)
        self.now += compute_s + waiting_s
        for step in range(first, last + 1):
            self.work += [(step, "compute_s", compute_s / count), (step, "data_wait_s", waiting_s / count)]
        digests = tuple(fed(step, draw(st.sampled_from([1, 2, 8]))) for step in range(first, last + 1))
        training_s = compute_s + waiting_s
        self.events.append(
            StepSpan(time=self.now, first=first, last=last, digests=digests, training_s=training_s, waiting_s=waiting_s)
        )

    def hold(self, draw: st.DrawFn, step: int, part: str) -> None:
        held_s = draw(SECONDS)
        self.now += held_s
        self.work.append((step, part, held_s))
        if part == "saving_s":
            self.saved.append(step)
            self.events.append(Saved(time=self.now, step=step, held_s=held_s, written_s=held_s))
        else:
            self.events.append(Evaluated(time=self.now, step=step, held_s=held_s))

    def end(self, draw: st.DrawFn) -> None:
        part = "startup_s" if isinstance(self.events[-1], Start) else "other_s"  # what takes no step is nothing but a start
        self.events.append(End(time=self.spend(part, draw(SECONDS)), step=self.total_steps, outcome="finished"))


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A run that was killed up to three times, each time at a checkpoint's mercy, and is finished."""
    history = History(total_steps=draw(st.integers(1, 12)))
    kills = draw(st.integers(0, 3))
    for number in range(kills + 1):
        step = draw(st.sampled_from([0, *history.saved]))  # not always the newest: that one may be damaged
        history.begin(draw, step)
        goal = history.total_steps if number == kills else draw(st.integers(step, history.total_steps))
        while step < goal:
            first, step = step + 1, draw(st.integers(step + 1, goal))
            history.take(draw, first, step)
            for part in draw(st.lists(st.sampled_from(["evaluation_s", "saving_s"]), max_size=2, unique=True)):
                # A checkpoint that is written in the background is committed when later steps are recorded already.
                history.hold(draw, step if part == "evaluation_s" else draw(st.integers(first, step)), part)
    history.end(draw)
    return history


HISTORIES = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@given(histories())
@HISTORIES
def test_a_history_is_proven_and_every_second_is_in_its_part(history: History) -> None:
    verdict, spent = verdict_of(history.events), account(written(history.events))
    num_starts = sum(isinstance(event, Start) for event in history.events)
    assert verdict.is_good
    assert (verdict.first_step, verdict.last_step, verdict.starts) == (1, history.total_steps, num_starts)
    assert str(verdict).startswith(f"every one of the {history.total_steps} global batches was applied exactly once, over ")
    for _, part, seconds in history.work:
        history.spent[part] += seconds
    for part in fields(TimeSpent):
        assert (getattr(spent, part.name) or 0.0) == pytest.approx(history.spent[part.name], abs=1e-6), part.name
    assert spent.wall_s == pytest.approx(history.now - 1000.0)
    assert (spent.queue_s is None) == all(event.submitted is None for event in history.events if isinstance(event, Start))


@given(histories(), st.sampled_from(["dropped", "doubled", "different"]), st.data())
@HISTORIES
def test_a_line_dropped_doubled_or_changed_is_named(history: History, harm: str, data: st.DataObject) -> None:
    kept = [event for event in ledger.counting(history.events) if isinstance(event, StepSpan)]
    line = data.draw(st.sampled_from(kept))
    # The line as it was written may go further than what counts of it.
    at = max(
        number for number, event in enumerate(history.events)
        if isinstance(event, StepSpan) and event.first == line.first and event.digests[: len(line.digests)] == line.digests
    )  # fmt: skip
    events, whole = list(history.events), history.events[at]
    assert isinstance(whole, StepSpan)
    expected = range(line.first, line.last + 1)
    if harm == "dropped":
        del events[at]
    elif harm == "doubled":
        events.insert(at, whole)
    else:
        step = data.draw(st.sampled_from(expected))
        expected = range(step, step + 1)
        digests = list(whole.digests)
        digests[step - whole.first] = fed(step + 1)
        events[at] = replace(whole, digests=tuple(digests))
    verdict = verdict_of(events)
    assert not verdict.is_good
    found = {"dropped": verdict.missing, "doubled": verdict.doubled, "different": verdict.different}
    assert found == {name: [expected] if name == harm else [] for name in found}
    assert str(verdict).startswith("NOT every one of the ")


# Single ones -----------------------------------------------------------------------------------------------------------------


EVERY = "every one of the "
HISTORY: dict[str, tuple[list[Event], list[str]]] = {
    "nothing yet": ([start(0, 9)], ["no step was taken yet"]),
    "not finished": (
        [start(0, 9), steps(1, 4), Evaluated(step=5, held_s=1)],
        [f"{EVERY}first 4 of 9 global batches was applied exactly once, over 1 start"],
    ),
    "of another run": (
        [start(4, 9), steps(5, 9)],
        [
            f"{EVERY}global batches 5 to 9 of 9 was applied exactly once, over 1 start",
            "the 4 steps before were taken in another run, which saved other/checkpoints/4",
        ],
    ),
    "skipped": (
        [start(0, 9), steps(1, 9, skipped=(2, 4, 5))],
        [
            f"{EVERY}9 global batches was fed exactly once, over 1 start",
            "3 steps were fed but not applied, because a gradient was not finite, or a spike: 2, 4-5",
        ],
    ),
    "skipped and taken again": (
        [start(0, 9), steps(1, 3, skipped=(2,)), start(1, 9), steps(2, 9)],
        [f"{EVERY}9 global batches was applied exactly once, over 2 starts"],
    ),
    "no end": (
        [start(0, 9), steps(1, 4), End(step=9, outcome="finished")],
        [f"NOT {EVERY}9 global batches was applied exactly once, over 1 start", "5 steps were missing: 5-9"],
    ),
    "a checkpoint of a missing step": (
        [start(0, 9), steps(1, 4), Saved(step=5, held_s=0, written_s=0)],
        [f"NOT {EVERY}first 5 of 9 global batches was applied exactly once, over 1 start", "1 step was missing: 5"],
    ),
    "a start after a missing step": (
        [start(0, 9), steps(1, 4), start(6, 9)],
        [f"NOT {EVERY}first 6 of 9 global batches was applied exactly once, over 2 starts", "2 steps were missing: 5-6"],
    ),
    "exchanged": (
        [start(0, 9), steps(1, 9, digests=tuple(fed(step) for step in (1, 3, 2, 4, 5, 6, 7, 8, 1)))],
        [
            f"NOT {EVERY}9 global batches was applied exactly once, over 1 start",
            "3 steps were fed other samples than the recipe says: 2-3, 9",
        ],
    ),
}


@pytest.mark.parametrize(("events", "lines"), HISTORY.values(), ids=HISTORY)
def test_the_verdict(events: list[Event], lines: list[str]) -> None:
    verdict = verdict_of(events)
    assert str(verdict).splitlines() == lines
    assert verdict.is_good is not lines[0].startswith("NOT")


def test_a_restart_in_the_same_job_has_no_queue_and_a_clock_that_went_back_spends_nothing_twice() -> None:
    """And of two steps on one line, of which one was lost, half the time was lost."""
    job = {"submitted": 10.0, "allocated": 15.0}
    events = [start(0, 4, time=18.0, launched=17.0, **job), steps(1, 2, time=20.0),
              start(1, 4, time=27.0, launched=25.0, **job), steps(2, 2, time=28.0),
              start(2, 4, time=21.0, launched=20.0, **job), steps(3, 4, time=22.0)]  # fmt: skip
    assert account(events) == TimeSpent(queue_s=5, startup_s=2 + 2 + 2, lost_work_s=0.5, down_s=5, compute_s=0.5 + 1 + 1)


# The command -----------------------------------------------------------------------------------------------------------------


def test_the_command_says_the_verdict_and_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [start(0, 4, time=2.0, submitted=0.0, allocated=1.0, launched=1.0), steps(1, 2, time=5.0), steps(2, 4, time=8.0)]
    write(tmp_path, events[:2])
    assert cli.main(["verify", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "every one of the first 2 of 4 global batches was applied exactly once, over 1 start"
    assert printed[2:5] == [
        "queue                     1.0 s   20.0%",
        "start-up                  3.0 s   60.0%",
        "compute                   1.0 s   20.0%",
    ]
    assert printed[-1] == "goodput, the share of compute: 20.0%"
    write(tmp_path, events[2:])
    assert cli.main(["verify", str(tmp_path), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["verified"], values["doubled"], values["missing"]) == (False, [[2, 2]], [])
    assert (values["time"]["queue_s"], values["time"]["wall_s"], values["time"]["goodput"]) == (1.0, 8.0, 0.25)


def test_what_cannot_be_verified_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(words: str, code: int) -> None:
        assert cli.main(["verify", str(tmp_path)]) == code
        assert words in capsys.readouterr().err

    refused("ledger.jsonl is missing", RunFolderError.exit_code)
    (tmp_path / "ledger.jsonl").touch()
    refused("does not begin with a start", RunFolderError.exit_code)
    write(tmp_path, [start(0, 9)])
    whole = (tmp_path / "recipe.yaml").read_text()
    for text in (whole.replace("seed: 3\n", ""), "- seed\n"):
        (tmp_path / "recipe.yaml").write_text(text)
        refused("lacks seed or train.global_batch_size", RecipeError.exit_code)


def test_a_broken_line_is_said_and_its_steps_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [start(0, 6), steps(1, 2), steps(3, 4), steps(5, 6), ledger.End(step=6, outcome="finished")])
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], bytes(len(lines[2])), *lines[3:]]))
    assert cli.main(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "4 steps were missing: 3-6"
    assert printed[2].startswith(f"{path}: a line is damaged or truncated (line 3: it is not JSON")
