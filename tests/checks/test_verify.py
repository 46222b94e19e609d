"""`samerun verify` on ledgers of made-up histories: what is whole is called whole, what is not is named, and time adds up.

tests/runs/test_resume.py has the ledger of a real run that was killed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.checks.verify import Verdict, examine
from app.data.order import TrainBatches
from app.recipe import recipe_file
from app.recipe.schema import Recipe, TrainRecipe
from app.runs import ledger
from app.runs.claim import claim
from app.runs.ledger import End, Evaluated, Event, Saved, Start, StepSpan, TimeSpent, account
from launch import cli

SIZE, RECIPE = 26, Recipe(seed=3, train=TrainRecipe(global_batch_size=8))  # 3 steps an epoch, and 2 samples left out


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


def verdict_of(events: list[Event], skip_steps: tuple[tuple[int, int], ...] = ()) -> Verdict:
    return examine(events, seed=3, global_batch_size=8, skip_steps=skip_steps)


HISTORY: dict[str, tuple[list[Event], bool, str]] = {
    "not finished": (
        [start(0, 9), steps(1, 4), Evaluated(step=5, held_s=1)],
        True,
        "every one of the first 4 of 9 global batches was applied exactly once, over 1 attempt",
    ),
    "of another run": (
        [start(4, 9), steps(5, 9)], True, "the 4 steps before were taken in another run, which saved other/checkpoints/4"
    ),
    "skipped": (
        [start(0, 9), steps(1, 3, skipped=(2,)), start(1, 9), steps(2, 9, skipped=(4, 5))],
        True,
        "2 steps were computed but not applied, because a gradient was not finite or a spike: 4-5",
    ),
    "no end": ([start(0, 9), steps(1, 4), End(step=9, outcome="finished")], False, "5 steps were missing: 5-9"),
    "in other pieces": (
        [start(0, 2), steps(1, 2, digests=(fed(1, 2), fed(2, 8)))],
        True,
        "every one of the 2 global batches was applied exactly once, over 1 attempt",
    ),
    "twice": ([start(0, 9), steps(1, 9), steps(5, 6)], False, "2 steps were recorded twice: 5-6"),
    "exchanged": (
        [start(0, 9), steps(1, 9, digests=tuple(fed(step) for step in (1, 3, 2, 4, 5, 6, 7, 8, 1)))],
        False,
        "3 steps were trained on other samples than the recipe specifies: 2-3, 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("events", "is_good", "sentence"), HISTORY.values(), ids=HISTORY)
def test_the_verdict(events: list[Event], is_good: bool, sentence: str) -> None:
    verdict = verdict_of(events)
    assert verdict.is_good is is_good
    assert sentence in str(verdict).splitlines()


def test_steps_that_the_recipe_skips_are_no_others() -> None:
    events: list[Event] = [start(0, 9), steps(1, 5, skipped_by_recipe=(4, 5)), start(4, 9), steps(5, 7)]
    assert verdict_of(events, ((4, 5), (8, 9))).is_good, "step 5 is repeated without, and step 8 not yet taken"
    wrong = verdict_of(events, ((2, 4), (6, 7)))
    assert not wrong.is_good
    assert "4 steps were skipped or computed in contradiction to train.skip_steps: 2-4, 6" in str(wrong)


def test_every_second_of_a_run_that_was_killed_is_in_its_part() -> None:
    events = [
        start(0, 6, time=10.0, submitted=0.0, allocated=5.0, launched=7.0),
        steps(1, 2, time=20.0, training_s=4.0, waiting_s=1.0),
        Evaluated(time=22.0, step=2, held_s=2.0),
        Saved(time=23.0, step=2, held_s=1.0, written_s=1.0),
        steps(3, 4, time=27.0, training_s=4.0, waiting_s=1.0),  # lost
        start(2, 6, time=31.0, launched=30.0),
        steps(3, 6, time=40.0, training_s=8.0, waiting_s=2.0),
        End(time=41.0, step=6, outcome="finished"),
    ]
    assert verdict_of(events).is_good
    spent = account(events)
    assert spent == TimeSpent(
        queue_s=5, startup_s=2 + 9 + 2, compute_s=3 + 6, data_wait_s=1 + 2, evaluation_s=2, saving_s=1, lost_work_s=4,
        down_s=3, other_s=1,
    )  # fmt: skip
    assert spent.wall_s == 41.0


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
    assert printed[0] == "every one of the first 2 of 4 global batches was applied exactly once, over 1 attempt"
    cells = [[cell.strip() for cell in line.split("│")[1:4]] for line in printed if line.startswith("│")]
    assert cells[:3] == [["queue", "1", "20.0%"], ["start-up", "3", "60.0%"], ["compute", "1", "20.0%"]]
    assert printed[-1] == "goodput, the share of compute: 20.0%"
    write(tmp_path, events[2:])
    assert cli.main(["verify", str(tmp_path), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["verified"], values["doubled"], values["missing"]) == (False, [[2, 2]], [])
    assert (values["time"]["queue_s"], values["time"]["wall_s"], values["time"]["goodput"]) == (1.0, 8.0, 0.25)


def test_a_broken_line_is_said_and_its_steps_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [start(0, 6), steps(1, 2), steps(3, 4), steps(5, 6), ledger.End(step=6, outcome="finished")])
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], bytes(len(lines[2])), *lines[3:]]))
    assert cli.main(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "4 steps were missing: 3-6"
    assert printed[2].startswith(f"{path}: a line is damaged or truncated (line 3: it is not JSON")
