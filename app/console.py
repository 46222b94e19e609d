"""What a person sees during a run: a progress bar on a terminal, timed lines in a log file.

Only the main process shows anything.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# In a log file a line every few seconds shows that a run is alive; more would bury what matters.
SECONDS_BETWEEN_LINES = 5.0
_TOO_LONG_SHARE = 0.3
_LINES_IN_A_ROW = 3
"""Of metrics, in which the training waits too long before it is said: the first contains the start of the workers."""


class Display(Protocol):
    """Shows a run's progress."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the latest line of metrics."""

    def close(self) -> None:
        """Leave the terminal as it was: what is said from then on stands below all that was shown."""


def display(*, total_steps: int, is_main: bool, remedy: str, unit: str) -> Display:
    """Return the display that suits where this process's output goes.

    `remedy` is what helps where training waits for data; `unit` is what is counted by the second.
    """
    if not is_main:
        return _Nothing()
    starving = _Starving(remedy)
    console = Console()
    # Open MPI gives each process a terminal of its own, wherever mpirun's output goes.
    on_terminal = console.is_terminal and "OMPI_COMM_WORLD_SIZE" not in os.environ
    return _Bar(console, total_steps, starving, unit) if on_terminal else _Lines(total_steps, starving, unit)


class _Starving:
    """Tells once that the training waits for its data."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._lines = 0.0

    def sentence(self, line: Mapping[str, Any]) -> str | None:
        """Return what is to be said with this line of metrics, or None."""
        self._lines = self._lines + 1 if line["data_wait_share"] > _TOO_LONG_SHARE else 0
        if self._lines != _LINES_IN_A_ROW:
            return None
        self._lines = math.inf
        return f"note: {line['data_wait_share']:.0%} of the time is spent waiting for data: {self._remedy}"


class _Nothing:
    def say(self, text: str) -> None: ...

    def show(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class _Bar:
    def __init__(self, console: Console, total_steps: int, starving: _Starving, unit: str) -> None:
        self._starving, self._unit = starving, unit
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total_steps, state="")
        self._progress.start()

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def show(self, line: Mapping[str, Any]) -> None:
        if sentence := self._starving.sentence(line):
            self.say(sentence)
        state = f"{_loss(line)}  {line[f'{self._unit}_per_s']:,.0f} {self._unit}/s"
        self._progress.update(self._task, completed=line["step"], state=state)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, total_steps: int, starving: _Starving, unit: str) -> None:
        self._total_steps, self._starving, self._unit = total_steps, starving, unit
        self._shown_s = -SECONDS_BETWEEN_LINES

    def say(self, text: str) -> None:
        for line in text.splitlines():
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)  # noqa: T201 - the log file's lines

    def show(self, line: Mapping[str, Any]) -> None:
        if sentence := self._starving.sentence(line):
            self.say(sentence)
        now_s = time.perf_counter()
        if now_s - self._shown_s < SECONDS_BETWEEN_LINES and line["step"] < self._total_steps:
            return
        self._shown_s = now_s
        self.say(
            f"step {line['step']}/{self._total_steps}  epoch {line['epoch'] + 1}  {_loss(line)}  "
            f"lr {line['learning_rate']:.2e}  {line[f'{self._unit}_per_s']:,.0f} {self._unit}/s  "
            f"waiting for data {line['data_wait_share']:.0%}{_utilization(line)}"
        )

    def close(self) -> None: ...


def _loss(line: Mapping[str, Any]) -> str:
    skipped = f" ({len(line['skipped_steps'])} steps skipped)" if line["skipped_steps"] else ""
    return f"loss {'none' if line['loss'] is None else format(line['loss'], '.4f')}{skipped}"


def _utilization(line: Mapping[str, Any]) -> str:
    return "" if line["mfu"] is None else f"  {line['mfu']:.0%} of the device's peak"
