"""Output for people during a run: a progress bar on a terminal, timed lines in a log file.

Only the main process shows anything.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# In a log file a line every few seconds shows that a run is alive; more would bury what matters.
SECONDS_BETWEEN_LINES = 5.0
_TOO_LONG_SHARE = 0.3
_LINES_IN_A_ROW = 3
"""Lines of metrics in which the training waits too long before a note is shown: the first contains the start of the workers."""


class Display:
    """Shows a run's progress where this process's output goes; on other processes than the main one it shows nothing."""

    def __init__(self, *, total_steps: int, is_main: bool, remedy: str, unit: str) -> None:
        """`remedy` is what helps where training waits for data; `unit` is what is counted by the second."""
        self._total_steps, self._is_main, self._remedy, self._unit = total_steps, is_main, remedy, unit
        self._starving_lines = 0.0
        self._shown_s = -SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        # Open MPI gives each process a terminal of its own, wherever mpirun's output goes.
        if is_main and (console := Console()).is_terminal and "OMPI_COMM_WORLD_SIZE" not in os.environ:
            state = TextColumn("{task.fields[state]}")
            columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), state, TimeRemainingColumn()
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("training", total=total_steps, state="")
            self._bar.start()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._is_main:
            for line in text.splitlines():
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)  # noqa: T201 - the log file's lines

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the latest line of metrics."""
        if not self._is_main:
            return
        waiting, step = line["data_wait_share"], line["step"]
        self._starving_lines = self._starving_lines + 1 if waiting > _TOO_LONG_SHARE else 0
        if self._starving_lines == _LINES_IN_A_ROW:
            self._starving_lines = math.inf  # one note is enough
            self.say(f"note: {waiting:.0%} of the time is spent waiting for data: {self._remedy}")
        skipped = f" ({len(line['skipped_steps'])} steps skipped)" if line["skipped_steps"] else ""
        loss = f"loss {'none' if line['loss'] is None else format(line['loss'], '.4f')}{skipped}"
        speed = f"{line[f'{self._unit}_per_s']:,.0f} {self._unit}/s"
        now_s = time.perf_counter()
        if self._bar:
            self._bar.update(self._task, completed=step, state=f"{loss}  {speed}")
        elif now_s - self._shown_s >= SECONDS_BETWEEN_LINES or step >= self._total_steps:
            self._shown_s = now_s
            utilization = "" if line["mfu"] is None else f"  {line['mfu']:.0%} of the device's peak"
            self.say(
                f"step {step}/{self._total_steps}  epoch {line['epoch'] + 1}  {loss}  "
                f"lr {line['learning_rate']:.2e}  {speed}  waiting for data {waiting:.0%}{utilization}"
            )

    def close(self) -> None:
        """Leave the terminal unchanged: later lines are printed below all that was shown."""
        if self._bar:
            self._bar.stop()
