"""`samerun watch RUN`: follows a run in the terminal, from any machine that can read its folder.

Only reads: the run does not notice. Draws on a terminal, and prints a line for each new line of the run's files elsewhere.
Waits for a folder that is not there yet, stays with a run that is killed or silent, since it may be started again, and ends
when the run does, or by Ctrl-C. A last line that is half written is looked at again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from app.errors import RunFolderError
from app.files.lines import is_finite
from app.options.command_line import Parser
from app.record import ledger
from app.reports import past_run
from app.reports.named_scores import scores, value_text, words
from app.reports.past_run import Line, PastRun
from app.reports.state import State, state_of
from app.reports.view import percent, view

_EVERY_S = 2.0
_READING_SHARE = 0.1
"""The files of a long run take a while to read: never more than this share of the time is spent with it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a run until it ends; return the exit code."""
    parser = Parser(prog="samerun watch", description="Follow a run in the terminal, from the files in its folder.")
    parser.add_argument("run", type=Path, help="run folder; it need not exist yet")
    parser.add_argument("--once", action="store_true", help="show the present state once and end")
    parser.add_argument(
        "--every", type=float, default=_EVERY_S, metavar="SECONDS", help=f"seconds between two updates (default: {_EVERY_S:g})"
    )
    arguments = parser.parse_all(argv)
    if arguments.every <= 0:
        parser.error(f"--every is {arguments.every:g}: give a number of seconds above 0")
    console = Console(highlight=False)
    if arguments.once:
        run = past_run.read(arguments.run)
        console.print(view(run, state_of(run, time.time()), time.time()))
        for complaint in run.complaints:
            sys.stderr.write(f"note: {complaint}\n")
        return 0
    with suppress(KeyboardInterrupt):  # the usual way to stop watching
        _wait_for(arguments.run, arguments.every)
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                _follow(arguments.run, arguments.every, lambda run, state: _draw(live, run, state))
        else:
            _follow(arguments.run, arguments.every, Lines().show)
    return 0


def _wait_for(folder: Path, every_s: float) -> None:
    """Return when there is a run in the folder."""
    is_said = False
    while True:
        try:
            past_run.read(folder)
            return
        except RunFolderError as error:
            if not is_said:
                _say(time.time(), f"waiting for the run: {error} Its job may still be queued; Ctrl-C ends this command.")
            is_said = True
        time.sleep(every_s)


def _follow(folder: Path, every_s: float, show: Callable[[PastRun, State], None]) -> None:
    """Look again and again, until the run is over."""
    while True:
        begin_s = time.monotonic()
        run = past_run.read(folder)
        state = state_of(run, time.time())
        show(run, state)
        if state.is_over:
            return
        time.sleep(max(every_s, (time.monotonic() - begin_s) / _READING_SHARE))


def _draw(live: Live, run: PastRun, state: State) -> None:
    live.update(view(run, state, time.time()), refresh=True)


class Lines:
    """Prints what is new in a run, one line each."""

    def __init__(self) -> None:
        self._num_events, self._state = 0, ""
        self._steps = {"metrics": 0, "evaluations": 0}
        """The last step of which a line of each file was printed."""

    def show(self, run: PastRun, state: State) -> None:
        """Print what was not there the last time."""
        news: list[tuple[float, str]] = []
        for event in run.events[self._num_events :]:
            if isinstance(event, ledger.Start):
                self._steps = {name: min(step, event.from_step) for name, step in self._steps.items()}
                news.append((event.time, _start(event)))
            elif isinstance(event, ledger.Saved):
                news.append((event.time, f"step {event.step} is saved"))
        self._num_events = len(run.events)
        news += self._new("metrics", run.metrics, lambda line: metrics_line(line, state.total_steps, run.unit))
        news += self._new("evaluations", run.evaluations, lambda line: evaluation_line(line, scores(run, line)))
        for time_s, text in sorted(news, key=lambda pair: pair[0]):
            _say(time_s, text)
        if state.word in ("finished", "stopped", "silent") and state.word != self._state:
            _say(state.since or time.time(), f"{state.word}: {state.sentence}")
        self._state = state.word

    def _new(self, name: str, lines: Sequence[Line], told: Callable[[Line], str]) -> list[tuple[float, str]]:
        new = [line for line in lines if line["step"] > self._steps[name]]
        self._steps[name] = max([self._steps[name], *(line["step"] for line in new)])
        return [(line["time"] if is_finite(line.get("time")) else time.time(), told(line)) for line in new]


def _start(event: ledger.Start) -> str:
    processes = f"{event.world_size} process{'es' if event.world_size != 1 else ''}"
    where = f"{processes}, preset {event.preset}" if event.preset else processes
    return f"started on {where}, " + (f"resumed after step {event.from_step}" if event.from_step else "from the beginning")


def metrics_line(line: Line, total_steps: int | None, unit: str) -> str:
    """Return what a line of metrics says, with the speed in this unit; what it does not have is left out."""
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"step {line['step']}{of}"]
    speed = {f"{unit}_per_s": lambda value: f"{value:,.0f} {unit}/s"}
    for key, told in {**_METRICS, **speed, **_WAITING}.items():
        if is_finite(line.get(key)):
            parts.append(told(line[key]))
    if line.get("skipped_steps"):
        parts.append(f"skipped steps: {', '.join(map(str, line['skipped_steps']))}")
    return "  ".join(parts)


_METRICS: dict[str, Callable[[Any], str]] = {
    "epoch": lambda value: f"epoch {value + 1}",
    "loss": lambda value: f"loss {value:.4f}",
    "learning_rate": lambda value: f"lr {value:.2e}",
}
_WAITING: dict[str, Callable[[Any], str]] = {"data_wait_share": lambda value: f"waiting for data {percent(value)}"}


def evaluation_line(line: Line, found: Mapping[str, float]) -> str:
    """Return what a line of evaluations says, which has these scores."""
    told = [f"{words(key)} {value_text(key, value)}" for key, value in found.items()]
    return f"evaluated after step {line['step']}: " + (", ".join(told) or "no scores")


def _say(time_s: float, text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S', time.localtime(time_s))} {text}\n")
    sys.stdout.flush()
