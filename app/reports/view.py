"""The state of a run, drawn for a terminal: progress, scores, throughput, time split, checkpoint, and expected end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.files.lines import is_finite
from app.record import ledger, run_folder
from app.reports.named_scores import scores, value_text, words
from app.reports.past_run import Line, PastRun
from app.reports.state import State, duration, moment

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARKS = 32
"""Characters of a sparkline."""
_RECENT_LINES = 30
"""Of metrics, from which is told when the run will be done."""
_SHARES = {
    "forward_backward_share": "forward and backward",
    "communication_share": "communication",
    "optimizer_share": "optimizer",
    "data_wait_share": "waiting for data",
}


def view(run: PastRun, state: State, now: float) -> RenderableType:
    """Return what is drawn of a run at the time `now`, in Unix seconds."""
    title = Text(f"{run.about.get('recipe') or run.name}", style="bold")
    title.append(f"  {run.folder}", style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("state", Text(f"{state.word}: {state.sentence}", style="bold" if state.word != "running" else ""))
    for name, value in _rows(run, state, now):
        rows.add_row(name, value)
    return Group(title, rows)


def _rows(run: PastRun, state: State, now: float) -> list[tuple[str, RenderableType]]:
    last = run.metrics[-1] if run.metrics else {}
    rows: list[tuple[str, RenderableType]] = [("steps", _progress(run, state))]
    if run.unit != run_folder.UNIT and is_finite(last.get(f"{run.unit}_seen")):
        rows.append((run.unit, f"{last[f'{run.unit}_seen']:,} seen"))
    remaining_s = None if state.word != "running" else remaining(run, state)
    if remaining_s is not None:
        may_end_early = (run.recipe.get("train") or {}).get("stop_after_evaluations_without_gain")
        name = "done in at most" if may_end_early else "done in"
        rows.append((name, f"{duration(remaining_s)}, at {moment(now + remaining_s)}"))
    rows += _told(run.metrics, "loss", "loss", "{:.4f}".format)
    rows += _told(run.metrics, f"{run.unit}_per_s", f"{run.unit}/s", "{:,.0f}".format)
    rows += _told(run.metrics, "learning_rate", "learning rate", "{:.3g}".format)
    for key in scores(run, run.evaluations[-1]) if run.evaluations else ():
        rows += _told(run.evaluations, key, words(key), partial(value_text, key))
    shares = [f"{name} {percent(last[key])}" for key, name in _SHARES.items() if is_finite(last.get(key))]
    if shares:
        rows.append(("time", ", ".join(shares)))
    saved = [event for event in run.events if isinstance(event, ledger.Saved)]
    rows.append(("checkpoint", f"step {saved[-1].step:,}, {duration(now - saved[-1].time)} ago" if saved else "none yet"))
    starts = [event for event in run.events if isinstance(event, ledger.Start)]
    if starts:
        processes = f"{starts[-1].world_size}, preset {starts[-1].preset or 'none'}"
        again = f", start {len(starts)} of the run, after step {starts[-1].from_step:,}" if len(starts) > 1 else ""
        rows.append(("processes", processes + again))
    return rows


def _progress(run: PastRun, state: State) -> RenderableType:
    line = run.metrics[-1] if run.metrics else {}
    epoch = f", epoch {line['epoch'] + 1}" if is_finite(line.get("epoch")) else ""
    if not state.total_steps:
        return f"{state.step:,}{epoch}"
    told = f"{state.step:,} of {state.total_steps:,} ({percent(state.step / state.total_steps)}){epoch}"
    both = Table.grid(padding=(0, 2))
    both.add_row(ProgressBar(total=state.total_steps, completed=state.step, width=_SPARKS), told)
    return both


def _told(lines: Sequence[Line], key: str, name: str, text: Callable[[float], str]) -> list[tuple[str, RenderableType]]:
    """A row with the last value of a column and its course, if it has any values."""
    values = [float(line[key]) for line in lines if is_finite(line.get(key))]
    if not values:
        return []
    both = Table.grid(padding=(0, 2))
    both.add_row(Text(sparkline(values).ljust(_SPARKS), no_wrap=True), text(values[-1]))
    return [(name, both)]


def sparkline(values: Sequence[float], width: int = _SPARKS) -> str:
    """Return the course of `values` (finite, at least one) in at most `width` characters, of which each is a mean."""
    width = min(width, len(values))
    cuts = [len(values) * place // width for place in range(width + 1)]
    groups = [values[begin:end] for begin, end in pairwise(cuts)]
    means = [sum(group) / len(group) for group in groups]
    lowest, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[round((mean - lowest) / span * (len(_BLOCKS) - 1)) if span else 3] for mean in means)


def remaining(run: PastRun, state: State) -> float | None:
    """Return the seconds until the last step, at the pace of the last lines of this start; None where that is not known."""
    start_s = max((event.time for event in run.events if isinstance(event, ledger.Start)), default=0.0)
    recent = [line for line in run.metrics[-_RECENT_LINES:] if is_finite(line.get("time")) and line["time"] >= start_s]
    if len(recent) < 2 or not state.total_steps:
        return None
    seconds, steps = recent[-1]["time"] - recent[0]["time"], recent[-1]["step"] - recent[0]["step"]
    pace_s: float = seconds / steps
    return max(0.0, pace_s * (state.total_steps - state.step))


def percent(share: float) -> str:
    """Return a share, 0..1, in per cent."""
    return f"{share:.0%}"
