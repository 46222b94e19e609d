"""The ledger: lines that survive a kill, are refused when broken, and digests that tell one batch from another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.runs import ledger
from app.runs.claim import claim
from app.runs.ledger import End, Evaluated, Saved, Start, StepSpan

START = Start(
    from_step=0, total_steps=9, training_samples=64, world_size=2, preset=None, resumed_from=None, job="7", submitted=1.0,
    allocated=None, launched=2.5,
)  # fmt: skip
STEPS = StepSpan(first=1, last=3, digests=("0a", "1b", "2c"), skipped=(2,), training_s=1.5, waiting_s=0.25)
EVENTS = [START, STEPS, Evaluated(step=3, held_s=0.5), Saved(step=3, held_s=0.5, written_s=2.0), End(step=3, outcome="stopped")]


def write(run_dir: Path, events: list[ledger.Event]) -> Path:
    ours = claim(run_dir)
    ours.go_on_after(0)
    for event in events:
        ours.append("ledger.jsonl", ledger.line(event))
    ours.sync()
    return run_dir / "ledger.jsonl"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    assert ledger.read(tmp_path) == (EVENTS, None)


@pytest.mark.parametrize("event", EVENTS[1:], ids=lambda event: type(event).__name__)
def test_a_line_cut_off_anywhere_is_left_out_and_the_next_start_begins_a_new_one(tmp_path: Path, event: ledger.Event) -> None:
    path = write(tmp_path, [START])
    before = path.read_bytes()
    write(tmp_path, [event])
    whole = path.read_bytes()
    for length in range(len(before), len(whole), 5):
        path.write_bytes(whole[:length])
        cut = None if length == len(before) else f"{path}: a line is damaged or truncated (line 2: it is cut), and ignored."
        assert ledger.read(tmp_path) == ([START], cut)
        write(tmp_path, [START])
        assert ledger.read(tmp_path) == ([START, START], None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"event": "step"}, "it is none of the events start, steps"),
        ({"digests": ["0a"]}, "steps 1 to 3 have 1 digests"),
        ({"color": "red"}, "it is no event StepSpan: .*'color'"),
    ],
)
def test_a_line_that_says_what_cannot_be_is_left_out_and_said(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = write(tmp_path, EVENTS)
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines) + "\n")
    events, complaint = ledger.read(tmp_path)
    assert events == [START, *EVENTS[2:]]
    assert complaint is not None
    assert re.search(rf"a line is damaged or truncated \(line 2: {words}.*\), and ignored", complaint)


# Digests ---------------------------------------------------------------------------------------------------------------------

SAMPLES = st.lists(st.integers(0, 2**50), min_size=1, max_size=40)


def digest_of(samples: list[int]) -> int:
    return int(ledger.digest(np.array(samples, dtype=np.int64)))


@given(SAMPLES, st.data())
def test_any_order_and_division_of_a_batch_has_its_digest(samples: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    shares = [ledger.digest(torch.tensor(share, dtype=torch.int64)) for share in (shuffled[:cut], shuffled[cut:])]
    assert int(sum(shares)) == digest_of(samples)


@given(SAMPLES, st.data())
def test_another_batch_has_another_digest(samples: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(samples) - 1))
    without = samples[:at] + samples[at + 1 :]
    others = [without, [*samples, samples[at]], [*without, samples[at] + 1], [*samples, 0]]
    assert digest_of(samples) not in map(digest_of, others)


def test_batches_with_equal_sums_of_powers_differ() -> None:
    """1^k + 5^k + 8^k + 12^k = 2^k + 3^k + 10^k + 11^k for k = 1, 2, 3: what a sum of a polynomial would not see."""
    assert digest_of([1, 5, 8, 12]) != digest_of([2, 3, 10, 11])
