"""`profile.steps=10:20`: a torch.profiler trace of these steps from each rank, with the offsets of the hosts' clocks.

No rank leaves a meeting before all have come. If rank i left at `out_i` by its clock and rank 0 came at `in_0` by its own,
then rank i's clock is ahead by no more than `out_i - in_0`; and by no less than `in_i - out_0`. Every meeting gives such
bounds, and the narrowest hold: the error is at most half their distance, whatever the network does (as in F. Cristian,
"Probabilistic clock synchronization", Distributed Computing 3, 1989, with a collective for the message). The ranks of one host
have one clock, so the narrowest of theirs hold for all of them.

RUN/profile has torch's trace of each rank, rank-K.json.gz, and ranks.json, which describes the ranks and their clocks. Steps
and their phases are named ranges. A trace that cannot be written does not end the run.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from app.distributed.runtime import Runtime
from app.errors import RunFolderError
from app.metrics.clock import Clock, Phase
from app.runs import run_folder
from app.runs.claim import Claim

_MEETINGS = 20
"""Enough for one in which nobody was late: a few milliseconds through gloo."""


def clock_bounds(
    greatest: Callable[[Sequence[float]], list[float]], now_ns: Callable[[], int], *, is_main: bool
) -> tuple[float, float]:
    """Return how far this rank's clock is ahead of rank 0's, at least and at most, in nanoseconds. All ranks call this.

    `greatest` returns the greatest of all ranks' values, place by place. `now_ns` is the clock, in nanoseconds, small enough
    for a float64 to hold exactly.
    """
    least_ns, most_ns, came_ns, left_ns = -math.inf, math.inf, 0.0, math.inf
    for _ in range(_MEETINGS):
        came_before_ns, came_ns = came_ns, now_ns()
        main_came_ns, main_left_before_ns = greatest([came_ns, left_ns] if is_main else [-math.inf, -math.inf])
        left_ns = now_ns()
        least_ns = max(least_ns, came_before_ns - main_left_before_ns)
        most_ns = min(most_ns, left_ns - main_came_ns)
    return least_ns, most_ns


_NEXT = {"other": "data wait", "data_wait": "forward", "forward_backward": "log", "optimizer": "log"}
"""Name of the phase that follows one of the clock's phases."""
_GZIP_LEVEL = 5
"""Half the time of the default, for a few per cent more bytes."""


class Profile:
    """The profile of one attempt of a run."""

    def __init__(
        self, runtime: Runtime, claim: Claim, clock: Clock, *, window: tuple[int, int] | None, say: Callable[[str], None]
    ) -> None:
        """`window` is the first and the last step, 1 being the first of the run; None: no profile. `say` shows a line."""
        self._runtime, self._claim, self._clock, self._say = runtime, claim, clock, say
        self._first, self._last = window or (0, 0)
        self._is_over = window is None
        self._profiler: torch.profiler.profile | None = None
        self._ranges: list[Any] = []
        """The open step, and the open phase in it."""
        self._zero_ns = 0
        """Start of the recording, in Unix time by rank 0's clock."""
        self._offsets: list[tuple[int, float]] = []
        """Before and after the window: the time, and how far this rank's clock is ahead of rank 0's, in nanoseconds."""
        self._clock_error_ns = 0.0

    def lap(self, phase: Phase) -> None:
        """End a lap of the clock, and name the phase that begins."""
        self._clock.lap(phase)
        if self._profiler is not None:
            steps = phase == "forward_backward" and self._runtime.accelerator.sync_gradients  # this was the last pass
            self._begin_range("optimizer" if steps else _NEXT[phase], depth=1)

    def name_backward(self) -> None:
        """Name the backward pass that begins, which no lap separates from the forward pass."""
        if self._profiler is not None:
            self._begin_range("backward", depth=1)

    def begin_step(self, step: int) -> None:
        """Open the window before its first step, and close it after its last. All ranks call it before each step, from 1."""
        if self._is_over or step < self._first:
            return
        if step > self._last:
            self.close()
            return
        if self._profiler is None:
            with self._clock.paused():
                self._profiler = self._start()
        self._begin_range(f"step {step}", depth=0)

    def close(self) -> None:
        """Write what was recorded, if the window is open. All ranks call it."""
        if self._is_over:
            return
        self._is_over = True
        if self._profiler is None:
            self._say(f"note: no profile: this attempt does not include the steps {self._first} to {self._last}")
            return
        self._end_ranges(depth=0)
        with self._clock.paused():
            ranks, complaints = zip(*self._runtime.gather(self._stop(self._profiler)), strict=True)
            self._profiler = None
            self._runtime.alive()
            if self._runtime.is_main:
                self._say("\n".join([*filter(None, complaints), *([] if all(complaints) else [self._publish(ranks)])]))

    def _start(self) -> torch.profiler.profile:
        # Kineto writes to stderr when it begins, when it ends, and that there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._runtime.device.type == "cuda" else [])]
        profiler = torch.profiler.profile(activities=activities)
        profiler.prepare_trace()  # takes seconds with CUPTI
        self._zero_ns = self._runtime.from_main(time.time_ns())
        self._compare_clocks()
        self._synchronize()
        profiler.start_trace()
        return profiler

    def _stop(self, profiler: torch.profiler.profile) -> tuple[dict[str, Any], str | None]:
        """Return a description of this rank, and why its trace cannot be written, if so. All ranks call it."""
        self._synchronize()
        profiler.stop_trace()
        self._compare_clocks()
        launched, device, host = self._runtime.launched, self._runtime.device, socket.gethostname()
        rank = {
            "rank": launched.rank,
            "host": host,
            "device": "cpu" if device.type == "cpu" else str(device),
            "strategy": launched.strategy,
            "zero_ns": self._zero_ns,
            "clock": self._offsets,
            "clock_error_ns": self._clock_error_ns,
        }
        folder = self._claim.place / run_folder.PROFILE
        try:
            with self._claim.errors(folder), tempfile.TemporaryDirectory(prefix="samerun-profile-") as temporary:
                trace = Path(temporary, "trace.json")
                profiler.export_chrome_trace(str(trace))
                if not trace.exists():  # Kineto raises nothing
                    raise RunFolderError(f"torch cannot write its trace in {tempfile.gettempdir()}: free space, or set TMPDIR")
                folder.mkdir(exist_ok=True)
                (folder / f"rank-{launched.rank}.json.gz").write_bytes(gzip.compress(trace.read_bytes(), _GZIP_LEVEL))
        except (RunFolderError, RuntimeError) as error:
            return rank, f"rank {launched.rank} on {host} cannot write its profile: {error}"
        return rank, None

    def _publish(self, ranks: tuple[dict[str, Any], ...]) -> str:
        """Move the folder to its place in the run folder, where it replaces an older one; return what to show."""
        place, folder = self._claim.place / run_folder.PROFILE, self._claim.path / run_folder.PROFILE
        try:
            with self._claim.errors(folder):
                place.mkdir(exist_ok=True)
                (place / "ranks.json").write_text(json.dumps({"ranks": ranks}, indent=2) + "\n")
                self._claim.put(place, folder)
        except RunFolderError as error:
            return str(error)
        return f"profile of steps {self._first} to {self._last}: merge its traces with `samerun timeline {self._claim.path}`"

    def _compare_clocks(self) -> None:
        runtime, host = self._runtime, socket.gethostname()
        own = clock_bounds(runtime.greatest, lambda: time.time_ns() - self._zero_ns, is_main=runtime.is_main)
        (main_host, _), *_ = ranks = runtime.gather((host, own))
        ahead_ns = 0.0
        if host != main_host:
            least_ns, most_ns = zip(*(bounds for name, bounds in ranks if name == host), strict=True)
            ahead_ns = (max(least_ns) + min(most_ns)) / 2
            # A clock that was set in between gives bounds that contradict each other.
            self._clock_error_ns = max(self._clock_error_ns, abs(min(most_ns) - max(least_ns)) / 2)
        self._offsets.append((time.time_ns(), ahead_ns))

    def _begin_range(self, name: str, *, depth: int) -> None:
        self._end_ranges(depth)
        self._ranges.append(record_function(name))
        self._ranges[-1].__enter__()

    def _end_ranges(self, depth: int) -> None:
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)

    def _synchronize(self) -> None:
        """Let a GPU finish, so that the trace has all work of its steps and of no other."""
        if self._runtime.device.type != "cpu":
            torch.accelerator.synchronize()
