"""Progress of work that is done once before training: a bar on a terminal, two lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Unit = Literal["bytes", "folders", "pictures", "samples"]
_PATIENCE_S = 2.0


@contextmanager
def progress(doing: str, total: int, unit: Unit, *, after_s: float = _PATIENCE_S) -> Iterator[Callable[[int], None]]:
    """Yield what is told of more of the `total` that is done; what is over within `after_s` seconds is not shown."""
    shown = _Shown(doing, total, unit, after_s)
    try:
        yield shown.advance
    except BaseException:
        shown.close(is_done=False)
        raise
    shown.close(is_done=True)


class _Shown:
    def __init__(self, doing: str, total: int, unit: Unit, after_s: float) -> None:
        self._doing, self._total, self._unit, self._after_s = doing, total, unit, after_s
        self._began_s, self._done = time.perf_counter(), 0
        self._is_said = False
        self._bar: Any = None
        if after_s == 0:
            self._show()

    def advance(self, count: int) -> None:
        self._done += count
        if not self._is_said and time.perf_counter() - self._began_s >= self._after_s:
            self._show()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self, *, is_done: bool) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._is_said and is_done:
            sys.stderr.write(f"done in {time.perf_counter() - self._began_s:.1f} s\n")

    def _show(self) -> None:
        # Not at the top: worker processes, and runs that find everything made, do without.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._is_said = True
        # `samerun launch` reads the stderr of a run: there the terminal is stdout.
        console = Console(stderr=sys.stderr.isatty())
        is_in_bytes = self._unit == "bytes"
        if not console.is_terminal:
            amount = f"{self._total / 1e9:.2f} GB" if is_in_bytes else f"{self._total:,} {self._unit}"
            sys.stderr.write(f"{self._doing}: {amount}\n")
            return
        count = DownloadColumn() if is_in_bytes else MofNCompleteColumn()
        self._bar = Progress(TextColumn(self._doing), BarColumn(), count, TimeRemainingColumn(), console=console)
        self._bar.add_task(self._doing, total=self._total)
        self._bar.start()
