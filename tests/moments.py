"""What a run is doing at this moment, as its folder tells, and how to wait for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from processes import Running, Started

from app.files.text_files import Lines


def last_step(run_dir: Path) -> int:
    """The last step that is logged, 0 before the first."""
    metrics = run_dir / "metrics.jsonl"
    return max((values["step"] for *_, values in Lines(metrics)), default=0) if metrics.exists() else 0


def saves(run_dir: Path) -> set[tuple[str, int]]:
    """The saves that are going on, or were cut."""
    found = set()
    for path in (run_dir / "starts").glob("*/step-????????"):
        with suppress(FileNotFoundError):
            found.add((str(path.relative_to(run_dir)), path.stat().st_ctime_ns))
    return found


def await_that(running: Started | Running, happened: Callable[[], bool]) -> None:
    """Wait until it happened, to a run that goes on."""
    end_s = time.monotonic() + 120
    while not happened():
        over = running.is_over()
        assert not over, running.wait().output
        assert time.monotonic() < end_s, running.kill().output
        time.sleep(0.005)


def await_step(running: Started | Running, run_dir: Path, step: int) -> None:
    """Wait until a step is logged."""
    await_that(running, lambda: last_step(run_dir) >= step)


def await_moment(chance: random.Random, running: Started | Running, run_dir: Path, *, start_s: float, steps: int = 4) -> str:
    """Wait until the run starts (up to `start_s`), a little after one of its next `steps`, or for a save; return which."""
    before = saves(run_dir)
    moment = chance.choice(("start", "step", "save"))
    if moment == "start":
        time.sleep(chance.uniform(0.0, start_s))
        return moment
    if moment == "step":
        await_step(running, run_dir, last_step(run_dir) + chance.randint(1, steps))
    else:
        await_that(running, lambda: bool(saves(run_dir) - before))
    time.sleep(chance.uniform(0.0, 0.03))
    return moment
