"""`samerun watch RUN`: follow a run in the terminal, from any machine that can read its folder.

Only reads: the run does not notice. Draws on a terminal, and elsewhere prints a line for each new line of the run's files.
Waits for a folder that does not exist yet, stays with a run that failed or is silent, since it may be started again, and ends
when the run does, or by Ctrl-C. A last line that is half written is read again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.errors import RunFolderError, printable
from app.files.lines import is_finite
from app.options import Parser, above_zero
from app.reports import past_run
from app.reports.past_run import Line, PastRun, State, duration, moment, scores, state_of, value_text, words
from app.reports.runs import SafeConsole
from app.runs import ledger, run_folder

_EVERY_S = 2.0
_READING_SHARE = 0.1
"""Largest share of the time that is spent reading: the files of a long run take a while."""
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARKS = 32
"""Characters of a sparkline."""
_RECENT_LINES = 30
"""Lines of metrics that the expected end is computed from."""
_SHARES = {
    "forward_backward_share": "forward and backward",
    "optimizer_share": "optimizer",
    "data_wait_share": "waiting for data",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a run until it ends; return the exit code."""
    parser = Parser(prog="samerun watch", description="Follow a run in the terminal, from the files in its folder.")
    parser.add_argument("run", type=Path, help="run folder; it need not exist yet")
    parser.add_argument("--once", action="store_true", help="show the present state once and end")
    parser.add_argument(
        "--every",
        type=above_zero,
        default=_EVERY_S,
        metavar="SECONDS",
        help=f"seconds between two updates (default: {_EVERY_S:g})",
    )
    arguments = parser.parse_all(argv)
    console = SafeConsole(highlight=False)
    if arguments.once:
        run = past_run.read(arguments.run)
        console.print(view(run, state_of(run, time.time()), time.time()))
        for complaint in run.complaints:
            sys.stderr.write(f"note: {printable(complaint)}\n")
        return 0
    lines, is_waiting, is_found = _Lines(), False, False
    drawing = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()
    with suppress(KeyboardInterrupt), drawing as live:  # Ctrl-C is the usual way to stop watching
        while True:
            begin_s = time.monotonic()
            try:
                run = past_run.read(arguments.run)
            except RunFolderError as error:
                if is_found:
                    raise
                if not is_waiting:
                    _say(time.time(), f"waiting for the run: {error} Its job may still be queued; Ctrl-C ends this command.")
                is_waiting = True
            else:
                is_found, state = True, state_of(run, time.time())
                if live:
                    live.update(view(run, state, time.time()), refresh=True)
                else:
                    lines.show(run, state)
                if state.is_over:
                    break
            time.sleep(max(arguments.every, (time.monotonic() - begin_s) / _READING_SHARE))
    return 0


def _say(time_s: float, text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S', time.localtime(time_s))} {printable(text)}\n")
    sys.stdout.flush()


class _Lines:
    """Prints what is new in a run, one line each."""

    def __init__(self) -> None:
        self._num_events, self._word = 0, ""
        self._steps = {"metrics": 0, "evaluations": 0}
        """The last step of which a line of each file was printed."""

    def show(self, run: PastRun, state: State) -> None:
        """Print what was not there the last time."""
        news: list[tuple[float, str]] = []
        for event in run.events[self._num_events :]:
            if isinstance(event, ledger.Start):
                self._steps = {name: min(step, event.from_step) for name, step in self._steps.items()}
                processes = f"{event.world_size} process{'es' if event.world_size != 1 else ''}"
                preset = f", preset {event.preset}" if event.preset else ""
                begin = f"resumed after step {event.from_step}" if event.from_step else "from the beginning"
                news.append((event.time, f"started on {processes}{preset}, {begin}"))
            elif isinstance(event, ledger.Saved):
                news.append((event.time, f"step {event.step} is saved"))
        self._num_events = len(run.events)
        texts: dict[str, tuple[Sequence[Line], Callable[[Line], str]]] = {
            "metrics": (run.metrics, lambda line: _metrics_text(line, state.total_steps, run.unit)),
            "evaluations": (run.evaluations, lambda line: _evaluation_text(run, line)),
        }
        for name, (lines, text_of) in texts.items():
            new = [line for line in lines if line["step"] > self._steps[name]]
            self._steps[name] = max([self._steps[name], *(line["step"] for line in new)])
            news += [(line["time"] if is_finite(line.get("time")) else time.time(), text_of(line)) for line in new]
        for time_s, text in sorted(news, key=lambda pair: pair[0]):
            _say(time_s, text)
        if state.word == "stopped" and not run.outcome:
            return  # its reason will be in outcome.json, which is written last
        if state.word not in (self._word, "running", "unknown"):
            _say(state.since or time.time(), f"{state.word}: {state.sentence}")
        self._word = state.word


def _metrics_text(line: Line, total_steps: int | None, unit: str) -> str:
    parts = [f"step {line['step']}" + (f"/{total_steps}" if total_steps else "")]
    texts: dict[str, Callable[[float], str]] = {
        "epoch": lambda value: f"epoch {value + 1}",
        "loss": "loss {:.4f}".format,
        "learning_rate": "lr {:.2e}".format,
        f"{unit}_per_s": lambda value: f"{value:,.0f} {unit}/s",
        "data_wait_share": "waiting for data {:.0%}".format,
    }
    parts += [text(line[key]) for key, text in texts.items() if is_finite(line.get(key))]
    if line.get("skipped_steps"):
        parts.append(f"skipped steps: {', '.join(map(str, line['skipped_steps']))}")
    return "  ".join(parts)


def _evaluation_text(run: PastRun, line: Line) -> str:
    found = [f"{words(key)} {value_text(key, value)}" for key, value in scores(run, line).items()]
    return f"evaluated after step {line['step']}: " + (", ".join(found) or "no scores")


def view(run: PastRun, state: State, now: float) -> RenderableType:
    """Return a drawing of a run at the time `now`, in Unix seconds: progress, scores, speed, checkpoint, expected end."""
    title = Text(f"{run.about.get('recipe') or run.name}", style="bold")
    title.append(f"  {run.folder}", style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("state", Text(f"{state.word}: {state.sentence}", style="bold" if state.word != "running" else ""))

    def two(first: RenderableType, second: str) -> Table:
        both = Table.grid(padding=(0, 2))
        both.add_row(first, second)
        return both

    def add_course(lines: Sequence[Line], key: str, name: str, text: Callable[[float], str]) -> None:
        if values := [float(line[key]) for line in lines if is_finite(line.get(key))]:
            rows.add_row(name, two(Text(sparkline(values).ljust(_SPARKS), no_wrap=True), text(values[-1])))

    last, total = run.metrics[-1] if run.metrics else {}, state.total_steps
    epoch = f", epoch {last['epoch'] + 1}" if is_finite(last.get("epoch")) else ""
    if total:
        bar = ProgressBar(total=total, completed=state.step, width=_SPARKS)
        rows.add_row("steps", two(bar, f"{state.step:,} of {total:,} ({state.step / total:.0%}){epoch}"))
    else:
        rows.add_row("steps", f"{state.step:,}{epoch}")
    if run.unit != run_folder.UNIT and is_finite(last.get(f"{run.unit}_seen")):
        rows.add_row(run.unit, f"{last[f'{run.unit}_seen']:,} seen")
    since_s = run.starts[-1].time if run.starts else 0.0
    recent = [line for line in run.metrics[-_RECENT_LINES:] if is_finite(line.get("time")) and line["time"] >= since_s]
    if state.word == "running" and total and len(recent) > 1:
        pace_s = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        remaining_s = max(0.0, pace_s * (total - state.step))
        may_end_early = (run.recipe.get("train") or {}).get("stop_after_evaluations_without_gain")
        rows.add_row(
            f"done in{' at most' if may_end_early else ''}", f"{duration(remaining_s)}, at {moment(now + remaining_s)}"
        )
    add_course(run.metrics, "loss", "loss", "{:.4f}".format)
    add_course(run.metrics, f"{run.unit}_per_s", f"{run.unit}/s", "{:,.0f}".format)
    add_course(run.metrics, "learning_rate", "learning rate", "{:.3g}".format)
    for key in scores(run, run.evaluations[-1]) if run.evaluations else ():
        add_course(run.evaluations, key, words(key), partial(value_text, key))
    if shares := [f"{name} {last[key]:.0%}" for key, name in _SHARES.items() if is_finite(last.get(key))]:
        rows.add_row("time", ", ".join(shares))
    saved = [event for event in run.events if isinstance(event, ledger.Saved)]
    rows.add_row("checkpoint", f"step {saved[-1].step:,}, {duration(now - saved[-1].time)} ago" if saved else "none yet")
    if run.starts:
        start, number = run.starts[-1], len(run.starts)
        again = f", start {number} of the run, after step {start.from_step:,}" if number > 1 else ""
        rows.add_row("processes", f"{start.world_size}, preset {start.preset or 'none'}{again}")
    return Group(title, rows)


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """Return the course of `values` (finite, at least one) in at most `width` characters, of which each is a mean."""
    width = min(width, len(values))
    cuts = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(cuts)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - lowest) / span * (len(_BLOCKS) - 1)) if span else 3] for mean in means)
