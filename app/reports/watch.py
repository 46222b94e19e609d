"""`samerun watch RUN`: follow a run in the terminal, from any machine that can read its folder.

Only reads: the run does not notice. Waits for a folder that does not exist yet, stays with a run that failed or is silent, as
it may be started again, and ends when the run does, or by Ctrl-C. Without a terminal, the last state is printed at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.errors import RunFolderError
from app.files.text_files import duration, is_finite
from app.options import Parser
from app.reports import past_run
from app.reports.past_run import Line, PastRun, State, moment, say, scores, state_of, value_text, words
from app.reports.runs import console
from app.runs import ledger, run_folder

_EVERY_S = 2.0
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_WIDTH = 24
"""Characters of a sparkline and of the bar."""
_RECENT_LINES = 30
"""Lines of metrics that the expected end is computed from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a run until it ends; return the exit code."""
    parser = Parser("watch", "Follow a run in the terminal, from the files in its folder.")
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder; it need not exist yet (default: the "
        "newest in runs/)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="show the present state once and end")
    arguments = parser.parse_all(argv)
    folder = arguments.run or run_folder.newest()
    run: PastRun | None = None
    is_waiting = False
    shown = console()
    with suppress(KeyboardInterrupt), Live(console=shown, auto_refresh=False) as live:
        while True:
            try:
                run = past_run.read(folder)
            except RunFolderError as error:
                if run or arguments.once:
                    raise
                if not is_waiting:
                    say(f"waiting for the run: {error} Its job may still be queued; Ctrl-C ends this command.")
                is_waiting = True
            else:
                state = state_of(run, time.time())
                live.update(view(run, state, time.time()), refresh=True)
                if arguments.once or state.is_over:
                    break
            time.sleep(_EVERY_S)
    if run and not shown.is_terminal:
        shown.print()  # Live ends the last line on terminals alone
    for complaint in run.complaints if run else ():
        say(complaint)
    return 0


def view(run: PastRun, state: State, now: float) -> RenderableType:
    """Return a drawing of a run at the time `now`, in Unix seconds: progress, scores, speed, checkpoint, expected end."""
    title = Text(f"{run.about.get('recipe') or run.name}", style="bold").append(f"  {run.folder}", style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")

    def add(name: str, text: str) -> None:
        rows.add_row(name, Text(text))

    def add_curve(lines: Sequence[Line], key: str, name: str, text: Callable[[float], str]) -> None:
        if values := [float(line[key]) for line in lines if is_finite(line.get(key))]:
            add(name, f"{sparkline(values) if len(values) > 1 else '':{_WIDTH}}  {text(values[-1])}")

    add("state", f"{state.word}: {state.sentence}")
    last, total = run.metrics[-1] if run.metrics else {}, state.total_steps
    epoch = f", epoch {last['epoch'] + 1}" if is_finite(last.get("epoch")) else ""
    if total:
        bar = _BLOCKS[-1] * round(_WIDTH * state.step / total)
        add("steps", f"{bar:\u2581<{_WIDTH}}  {state.step:,} of {total:,} ({state.step / total:.0%}){epoch}")
    else:
        add("steps", f"{state.step:,}{epoch}")
    if run.unit != run_folder.UNIT and is_finite(last.get(f"{run.unit}_seen")):
        add(run.unit, f"{last[f'{run.unit}_seen']:,} seen")
    since_s = run.starts[-1].time if run.starts else 0.0
    recent = [line for line in run.metrics[-_RECENT_LINES:] if is_finite(line.get("time")) and line["time"] >= since_s]
    if state.word == "running" and total and len(recent) > 1:
        pace_s = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        remaining_s = max(0.0, pace_s * (total - state.step))
        add("done in at most", f"{duration(remaining_s)}, at {moment(now + remaining_s)}")
    add_curve(run.metrics, "loss", "loss", partial(value_text, "loss"))
    add_curve(run.metrics, f"{run.unit}_per_s", f"{run.unit}/s", "{:,.0f}".format)
    add_curve(run.metrics, "learning_rate", "learning rate", "{:.3g}".format)
    for key in scores(run, run.evaluations[-1]) if run.evaluations else ():
        add_curve(run.evaluations, key, words(key), partial(value_text, key))
    for key, name in {"data_wait_share": "waiting for data", "communication_share": "waiting for ranks"}.items():
        if is_finite(last.get(key)):
            add(name, f"{last[key]:.0%}")
    saved = [event for event in run.events if isinstance(event, ledger.Saved)]
    add("checkpoint", f"step {saved[-1].step:,}, {duration(now - saved[-1].time)} ago" if saved else "none yet")
    if run.starts:
        it, number = run.starts[-1], len(run.starts)
        add("processes", f"{it.world_size}, preset {it.preset or 'none'}, attempt {number}, after step {it.from_step:,}")
    return Group(title, rows)


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return `values` (finite, at least one) as at most `width` characters, of which each is a mean."""
    width = min(width, len(values))
    cuts = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(cuts)]
    lowest, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - lowest) / span * (len(_BLOCKS) - 1)) if span else 3] for mean in means)
