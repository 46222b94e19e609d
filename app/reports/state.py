"""The state of a run, from its folder: finished, stopped, failed, running, or silent since some time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from app.files.lines import is_finite
from app.reports.past_run import PastRun
from app.runs import ledger

PATIENCE_S = 300.0
"""A run whose files are silent for longer is said to be; ten times the usual time between two lines if that is more."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How it stands with a run."""

    word: str
    """`finished`, `stopped`, `failed`, `running`, `silent` or `unknown`."""
    sentence: str
    """What is known of it, as a sentence without its full stop."""
    since: float | None
    """When the last file of the run was written to, in Unix seconds, as the lines in them tell."""
    step: int
    """Steps that are done, as far as a line tells."""
    total_steps: int | None
    is_over: bool
    """Whether the run has ended and is not going to be started again by itself."""


def state_of(run: PastRun, now: float) -> State:
    """Return how it stands with a run at the time `now`, in Unix seconds."""
    step = max(
        [line["step"] for line in [*run.metrics, *run.evaluations]] + [ledger.last_step(event) for event in run.events] + [0]
    )
    known = (run.total_steps, run.outcome.get("total_steps"), run.result.get("steps"))
    word, sentence, is_over = _judged(run, now)
    return State(
        word=word,
        sentence=sentence,
        since=last_sign(run),
        step=step,
        total_steps=next((total for total in known if isinstance(total, int)), None),
        is_over=is_over,
    )


def last_sign(run: PastRun) -> float | None:
    """Return when the run last wrote a line, in Unix seconds; None if no line tells."""
    times = [*_times(run.metrics), *_times(run.evaluations), *(event.time for event in [*run.events, run.failure] if event)]
    return max([*times, *_times([run.outcome])], default=None)


def _judged(run: PastRun, now: float) -> tuple[str, str, bool]:
    """The word, the sentence, and whether the run is over."""
    outcome, reason = run.outcome.get("outcome"), run.outcome.get("reason")
    because = f", because {reason}" if reason else ""
    last_event = run.events[-1] if run.events else None
    if isinstance(last_event, ledger.End):
        outcome = outcome or last_event.outcome
    if outcome == "finished" or (run.result and not run.events):
        early = run.result.get("stopped_early_because")
        return "finished", f"before its last step, because {early}" if early else "all steps are done", True
    if run.failure and not run.outcome:
        return "failed", f"{run.failure}" + (f": {run.failure.error}" if run.failure.error else ""), False
    if outcome == "stopped":
        again = bool(run.outcome.get("go_on"))
        # A start that resumes the run removes the outcome before its first line: then this is the end of the start before it.
        is_over = bool(run.outcome) and not again
        return "stopped", f"after saving{because}{'; it is restarted automatically' if again else ''}", is_over
    sign = last_sign(run)
    if sign is None:
        return "unknown", "no line tells when anything happened", False
    if now - sign <= patience_s(run.metrics):
        return "running", f"the last line is {duration(now - sign)} old", False
    return "silent", f"no line for {duration(now - sign)}, and no end was recorded: killed, or hanging", False


def patience_s(metrics: Sequence[Any]) -> float:
    """Return after how many seconds without a line a run with these lines of metrics is called silent."""
    times = _times(metrics[-50:])
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max(PATIENCE_S, 10 * statistics.median(gaps)) if gaps else PATIENCE_S


def _times(lines: Sequence[Any]) -> list[float]:
    return [line["time"] for line in lines if is_finite(line.get("time"))]


def duration(seconds: float) -> str:
    """Return a time span in words of two units: `45 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0.0):.1f} s"
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit_s:
            whole, rest = divmod(int(seconds), unit_s)
            return f"{whole} {unit} {rest // part_s} {part}"
    raise AssertionError(seconds)


def moment(time_s: float) -> str:
    """Return a moment (Unix seconds) as a date and time of this machine's zone."""
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
