"""What a person sees while a run goes on: a progress bar on a terminal, timed lines in a log file.

Only the main process shows anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# In a log file a line every few seconds shows that a run is alive; more would bury what matters.
SECONDS_BETWEEN_LINES = 5.0


class Display(Protocol):
    """Shows a run's progress."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the latest line of metrics."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display(*, total_steps: int, is_main: bool) -> Display:
    """Return the display that suits where this process's output goes."""
    if not is_main:
        return _Nothing()
    console = Console()
    # Open MPI gives each process a terminal of its own, wherever mpirun's output goes.
    on_terminal = console.is_terminal and "OMPI_COMM_WORLD_SIZE" not in os.environ
    return _Bar(console, total_steps) if on_terminal else _Lines(total_steps)


class _Nothing:
    def say(self, text: str) -> None: ...

    def show(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class _Bar:
    def __init__(self, console: Console, total_steps: int) -> None:
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
        state = f"{_loss(line)}  {line['samples_per_s']:,.0f} samples/s"
        self._progress.update(self._task, completed=line["step"], state=state)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._shown_s = -SECONDS_BETWEEN_LINES

    def say(self, text: str) -> None:
        for line in text.splitlines():
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)  # noqa: T201 - the log file's lines

    def show(self, line: Mapping[str, Any]) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s < SECONDS_BETWEEN_LINES and line["step"] < self._total_steps:
            return
        self._shown_s = now_s
        self.say(
            f"step {line['step']}/{self._total_steps}  epoch {line['epoch']}  {_loss(line)}  "
            f"lr {line['learning_rate']:.2e}  {line['samples_per_s']:,.0f} samples/s  "
            f"waiting for data {line['data_wait_share']:.0%}"
        )

    def close(self) -> None: ...


def _loss(line: Mapping[str, Any]) -> str:
    skipped = f" ({len(line['skipped_steps'])} steps skipped)" if line["skipped_steps"] else ""
    return f"loss {'none' if line['loss'] is None else format(line['loss'], '.4f')}{skipped}"
