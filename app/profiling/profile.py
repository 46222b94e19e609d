"""`profile.steps=10:20`: a trace of all processes in these steps, on one time axis.

The window opens before its first step and closes after its last, on all ranks alike; both are pauses of the training, in which
the clocks of the hosts are compared. In it the steps and their phases are named for torch.profiler (data wait, forward,
backward, optimizer, log); outside of it every call here returns at once. Then each rank writes its file, and the main process
puts them together. What cannot be written is said, and ends no run.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from app.errors import RecipeError, RunFolderError
from app.metrics.clock import Clock, Phase
from app.profiling import merge, rank_file
from app.profiling.account import BACKWARD, DATA_WAIT, FORWARD, LOG, OPTIMIZER, STEP
from app.ranks import clocks
from app.ranks.runtime import Runtime
from app.recipe.schema import ProfileRecipe
from app.record import run_folder
from app.record.claim import Claim

_MOST_BYTES = 100e6
"""Of traces that are put together while the ranks wait: about a minute (docs/profiling.md)."""


def check_window(recipe: ProfileRecipe, *, total_steps: int) -> None:
    """Raise RecipeError if a run of so many steps ends before the window does."""
    if recipe.window is not None and recipe.window[1] > total_steps:
        raise RecipeError(
            f"profile.steps is {recipe.steps}, and the run has {total_steps} steps: give steps within the run, or null."
        )


class NoProfile:
    """What a run calls that is not profiled; `lap` ends a lap of the clock."""

    def __init__(self, clock: Clock) -> None:
        self.lap = clock.lap
        self.name_backward: Callable[[], None] | None = None

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Profile:
    """The profile of one start of a run."""

    def __init__(
        self,
        runtime: Runtime,
        claim: Claim,
        clock: Clock,
        *,
        window: tuple[int, int],
        say: Callable[[str], None],
    ) -> None:
        """`window` is the first and the last step, 1 being the first of the run; `say` shows a text to the user."""
        self._runtime, self._claim, self._clock, self._say = runtime, claim, clock, say
        self._first, self._last = window
        self._recording: _Recording | None = None
        self._ended: Phase = "other"
        self._is_over = False

    def lap(self, phase: Phase) -> None:
        """End a lap of the clock, and name what comes now."""
        self._clock.lap(phase)
        if self._recording is not None:
            self._recording.name(self._next(phase))
        self._ended = phase

    def _next(self, ended: Phase) -> str:
        if ended == "other" and self._ended == "forward_backward" and self._runtime.accelerator.sync_gradients:
            return OPTIMIZER
        return {"other": DATA_WAIT, "data_wait": FORWARD, "forward_backward": LOG, "optimizer": LOG}[ended]

    def name_backward(self) -> None:
        """Name the backward pass that begins here, which no lap divides from the forward pass."""
        if self._recording is not None:
            self._recording.name(BACKWARD)

    def begin_step(self, step: int) -> None:
        """Open the window before its first step, close it after its last. All ranks call it before each step, from 1."""
        if self._is_over or step < self._first:
            return
        if step > self._last:
            self.close()
            return
        if self._recording is None:
            with self._clock.paused():
                self._recording = _Recording(self._runtime)
        self._recording.begin_step(step)

    def close(self) -> None:
        """Write what was recorded, if the window is open, and show the summary. All ranks call it."""
        if self._is_over:
            return
        recording, self._recording, self._is_over = self._recording, None, True
        if recording is None:
            self._say(f"note: no profile: this start of the run does not include the steps {self._first} to {self._last}")
            return
        recording.end_step()
        with self._clock.paused():
            complaints = self._runtime.gather(self._written(recording))
            self._runtime.alive()
            if self._runtime.is_main:
                self._say("\n".join([complaint for complaint in complaints if complaint] + [self._merged()]))
            self._runtime.gather(None)  # the others wait here, so that the merging is no part of a step
            self._runtime.alive()

    def _written(self, recording: _Recording) -> str | None:
        """Write this rank's file; return why that is not possible, if so."""
        with tempfile.TemporaryDirectory(prefix="samerun-profile-") as folder:
            axis, who = recording.end()
            place = self._claim.place / run_folder.PROFILE
            try:
                with self._claim.telling(place):
                    place.mkdir(exist_ok=True)
                    rank_file.write(place, recording.export(Path(folder)), axis, who)
            except (RunFolderError, RuntimeError, ValueError) as error:  # a full disk shows itself as any of these
                return f"rank {who.rank} on {who.host} cannot write its profile: {error}"
        return None

    def _merged(self) -> str:
        place, folder = self._claim.place / run_folder.PROFILE, self._claim.path / run_folder.PROFILE
        try:
            merged = merge.merge(place, most_bytes=_MOST_BYTES, told_as=folder)
            with self._claim.telling(folder):
                self._claim.put(place, folder)
            return merged.text.rstrip()
        except RunFolderError as error:
            return str(error)


class _Recording:
    """What torch.profiler records from here to `end`."""

    def __init__(self, runtime: Runtime) -> None:
        # Kineto tells stderr when it begins, when it ends, and that there is no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if runtime.device.type == "cuda" else [])]
        self._runtime = runtime
        self._step: Any = None
        self._phase: Any = None
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.prepare_trace()  # CUPTI takes seconds for it
        self._zero_ns: int = runtime.from_main(time.time_ns())
        self._begin = time.time_ns(), clocks.compare(runtime, self._zero_ns)
        self._synchronize()
        self._profiler.start_trace()

    def begin_step(self, step: int) -> None:
        """End a step, and begin this one."""
        self.end_step()
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()

    def name(self, phase: str) -> None:
        """End a phase, and begin this one."""
        self._end_phase()
        self._phase = record_function(phase)
        self._phase.__enter__()

    def end(self) -> tuple[clocks.Axis, rank_file.Who]:
        """Stop, and return what it takes to put the trace beside those of the other ranks. All ranks call it."""
        self._synchronize()
        self._profiler.stop_trace()
        begin_ns, begin = self._begin
        end = clocks.compare(self._runtime, self._zero_ns)
        launched, device = self._runtime.launched, self._runtime.device
        axis = clocks.Axis(self._zero_ns, begin_ns=begin_ns, begin=begin, end_ns=time.time_ns(), end=end)
        return axis, rank_file.Who(
            recorded=self._zero_ns / 1e9,
            rank=launched.rank,
            world_size=launched.world_size,
            host=socket.gethostname(),
            device="cpu" if device.type == "cpu" else str(device),
            strategy=launched.strategy,
        )

    def export(self, folder: Path) -> Path:
        """Write torch's trace into a folder, and return its path."""
        path = folder / "trace.json"
        self._profiler.export_chrome_trace(str(path))
        return path

    def end_step(self) -> None:
        """End a step, if one was begun."""
        self._end_phase()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _synchronize(self) -> None:
        """Let a GPU finish: what belongs to no step of the window is in none, and all that does is recorded."""
        if self._runtime.device.type != "cpu":
            torch.accelerator.synchronize()
