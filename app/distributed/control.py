"""Stopping or saving a run early: requests that all ranks agree to obey, and early stopping.

SIGTERM, SIGUSR1, SIGUSR2   stop and be started again by the scheduler; to any of the ranks, any number of times
    SIGHUP                      the same: the terminal or the ssh connection is lost. Not after nohup, which has it ignored
    SIGINT                      stop; the second one ends its process at once
    the files STOP and SAVE     in the run folder; removed when obeyed
    checkpoint.every_minutes    save
    SAMERUN_END_TIME            stop while there is time to save, and be started again where there is more
    another attempt of the run    which has taken the run folder over: end with an error and write nothing more

Ranks agree about once a second, however short a step is, and after each step that is longer. Signal handlers only take note,
so a rank in the middle of a collective or a save finishes it. Only the main process looks at files and clocks; on a network
file system a new file may take half a minute to be seen from another machine.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from app.distributed.runtime import Runtime
from app.environment import host
from app.errors import RunFolderError, is_of_a_lost_peer
from app.evaluation import Evaluation
from app.runs import run_folder
from app.runs.claim import Claim

_LOOK_EVERY_S = 1.0
"""About the time between two agreements of the ranks, and so the longest that a request waits. One costs well under a
millisecond."""
_MARGIN_S = 30.0
"""Time before the end of the allocation for what is not measured: closing trackers and the process group takes seconds, and
clocks of nodes and scheduler may differ by as much."""
_SAVES = 2.0
"""A shared disk may be half as fast as at the last save: at the end of an allocation other jobs write too."""
_FIRST_SAVE_BYTES_PER_S = 100e6
"""Assumed for all ranks together until a save was measured: a single hard disk, or one's part of a busy file system."""


@dataclass(frozen=True)
class Request:
    """An action of all ranks after a step: none, save, or save and stop."""

    why: str = ""
    """The reason, in words; empty for no request."""
    stop: bool = False
    """True if the run stops once it has saved."""
    go_on: bool = False
    """True if it is to be restarted automatically: the scheduler ended it, not the user."""

    @property
    def save(self) -> bool:
        """True if a checkpoint is written."""
        return bool(self.why)


NOTHING = Request()
REPLAYED = Request(stop=True)
"""The last step of a replay is done: it stops without a checkpoint."""
_MINUTES = Request("checkpoint.every_minutes have passed")
_SAVE_FILE = Request(f"the file {run_folder.SAVE} was found")
_SIGNALS = {
    sent: Request(f"{sent.name} was received{gone}", stop=True, go_on=sent != signal.SIGINT)
    for sent in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    for gone in [": the terminal is gone" * (sent == signal.SIGHUP)]
}
_STOP_FILE = Request(f"the file {run_folder.STOP} was found", stop=True)
_TAKEN_OVER = Request("another attempt of the run took over the run folder", stop=True)
# Ranks that ask for different things do the last of them. They send each other indices into this.
_BY_FORCE = (NOTHING, _MINUTES, _SAVE_FILE, *_SIGNALS.values(), _STOP_FILE, _TAKEN_OVER)


class Control:
    """One rank's part in the agreements. As a context it takes the signals, which have their usual effect outside."""

    def __init__(
        self, runtime: Runtime, claim: Claim, *, total_steps: int, state_bytes: int, save_every_s: float | None = None
    ) -> None:
        """`state_bytes` is about what a checkpoint holds; `save_every_s` is the time from one save to the next, if any."""
        self._runtime, self._claim, self._total_steps, self._save_every_s = runtime, claim, total_steps, save_every_s
        self._received: set[signal.Signals] = set()
        self._previous: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []
        self._found: set[str] = set()
        self._lost_claim: RunFolderError | None = None
        self._saved_at_s = time.monotonic()
        self._is_saving = False
        self._next_look, self._stride = 0, 1
        self._step_ended_s: float | None = None
        self._step_s, self._slowest_s, self._save_s = 0.0, 0.0, state_bytes / _FIRST_SAVE_BYTES_PER_S
        self.replay_until: int | None = None
        """The last step of a replay, after which it stops; None: this is no replay."""

    def __enter__(self) -> Control:
        self._terminals = host.terminals()
        taken = [number for number in _SIGNALS if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)]
        self._previous = {number: signal.signal(number, self._take_note) for number in taken}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if error is not None and signal.SIGTERM in self._received and is_of_a_lost_peer(error):
            signal.raise_signal(signal.SIGTERM)  # so that was what it meant: the launcher ends those whose peer is gone

    def _take_note(self, number: int, _frame: FrameType | None) -> None:
        self._received.add(signal.Signals(number))
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, and wherever it is just then
        elif number == signal.SIGHUP:
            host.redirect_to_null(self._terminals)

    @property
    def is_asked_to_stop(self) -> bool:
        """True if this process has received a signal."""
        return bool(self._received)

    def agreed(self, step: int) -> Request:
        """Return what is done now that so many steps are: the same on all ranks, all of which call it after each step.

        After the last step it is nothing, because the run ends anyway. Raises RunFolderError, on all ranks, if another
        start of the run has taken the run folder over.
        """
        if step == self.replay_until:
            return REPLAYED
        now_s, before_s = time.monotonic(), self._step_ended_s
        if before_s is not None:  # the very first step may contain a compilation
            self._step_s = max(self._step_s, now_s - before_s)
        self._step_ended_s = now_s
        if step < self._next_look or step >= self._total_steps:
            return NOTHING
        end_time_s = self._runtime.launched.end_time_s
        left_s = end_time_s - time.time() if self._runtime.is_main and end_time_s is not None else math.inf
        force, step_s, save_s, negative_left_s = self._runtime.greatest(
            [_BY_FORCE.index(self._asked()), self._step_s, self._save_s, -left_s]
        )
        # The number of steps at most doubles: the first steps only fill an accelerator's queue, and seem short.
        self._stride = max(1, min(2 * self._stride, int(_LOOK_EVERY_S / max(step_s, 1e-6))))
        self._next_look = step + self._stride
        self._slowest_s, self._step_s = max(self._slowest_s, step_s), 0.0
        request = _BY_FORCE[int(force)]
        if request is _TAKEN_OVER:
            with self._runtime.together():
                if self._lost_claim:
                    raise self._lost_claim
        # A step counts with the evaluation that follows it.
        left_s, needed_s = -negative_left_s, _LOOK_EVERY_S + self._slowest_s + _SAVES * save_s + _MARGIN_S
        if not request.stop and left_s <= needed_s:
            why = f"the allocation ends in {left_s:.0f} s, and the next steps and a save may take {needed_s:.0f} s"
            request = Request(why, stop=True, go_on=True)
        self._is_saving |= request.save
        return request

    def saved(self, took_s: float) -> None:
        """Take note that a checkpoint is on the disk, `took_s` seconds after its step. Any thread may call it."""
        if run_folder.SAVE in self._found:
            self._found.remove(run_folder.SAVE)
            self._claim.remove(run_folder.SAVE)
        self._save_s = took_s
        self._saved_at_s = time.monotonic()
        self._is_saving = False

    def record_outcome(self, step: int, stopped_by: Request = NOTHING, *, why_early: str = "") -> None:
        """Write, on the main process, how this start ended after so many steps: the last that is written.

        `why_early` says why a finished run has fewer steps than its recipe.
        """
        if self._runtime.is_main:
            outcome = {
                "outcome": "stopped" if stopped_by.stop else "finished",
                "reason": stopped_by.why or why_early or "all steps are done",
                "go_on": stopped_by.go_on,
                "step": step,
                "total_steps": self._total_steps,
                "time": time.time(),
            }
            self._claim.write_json(run_folder.OUTCOME, outcome)
            if run_folder.STOP in self._found:
                self._claim.remove(run_folder.STOP)

    def _asked(self) -> Request:
        """Return what this rank asks for."""
        asked = {NOTHING, *(_SIGNALS[number] for number in self._received)}
        if self._runtime.is_main:
            files = {run_folder.STOP: _STOP_FILE, run_folder.SAVE: _SAVE_FILE}
            if self._is_saving:  # what is asked for meanwhile is asked for again when that is done
                del files[run_folder.SAVE]
            elif self._save_every_s is not None and time.monotonic() - self._saved_at_s >= self._save_every_s:
                asked.add(_MINUTES)
            there = [name for name in files if (self._claim.path / name).exists()]
            self._found.update(there)
            asked.update(files[name] for name in there)
            try:
                self._claim.check()
            except RunFolderError as error:
                self._lost_claim = error
                asked.add(_TAKEN_OVER)
        return max(asked, key=_BY_FORCE.index)


def is_better(score: float, best: float | None, *, good_end: Literal["max", "min"]) -> bool:
    """Return True if a score is better than the best before (None: there was none). NaN never is."""
    if best is None:
        return score == score  # noqa: PLR0124  (false of NaN alone)
    return score > best if good_end == "max" else score < best


class Patience:
    """Counts evaluations without a gain: part of a run's state, so that a resumed one ends where it would have ended.

    It sees every evaluation on the validation split, whether a bound is set or not.
    """

    def __init__(self, monitor: tuple[str, Literal["max", "min"]], most: int | None) -> None:
        """`most` evaluations in a row may pass without a gain (the last of them ends the run); None: any number."""
        (self._monitored, self._good_end), self._most = monitor, most
        self._best: float | None = None
        self._without_gain = 0

    def see(self, scores: Evaluation | None) -> None:
        """Take in the scores of an evaluation, if there was one: they are the same on all ranks."""
        if scores is None:
            return
        score = scores.scores[self._monitored]
        if is_better(score, self._best, good_end=self._good_end):
            self._best, self._without_gain = score, 0
        else:
            self._without_gain += 1

    @property
    def is_out(self) -> bool:
        """True if the run is to end."""
        return self._most is not None and self._without_gain >= self._most

    @property
    def why(self) -> str:
        """Why the run ends, in words."""
        best = "no score was a number" if self._best is None else f"the best is {self._best:.6g}"
        return (
            f"{self._without_gain} evaluations in a row did not improve the validation {self._monitored} ({best}), and "
            f"train.stop_after_evaluations_without_gain is {self._most}"
        )

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, as JSON holds it."""
        return {"best": self._best, "without_gain": self._without_gain}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take up the state of a checkpoint; None: it has none."""
        if state is not None:
            self._best, self._without_gain = state["best"], state["without_gain"]
