"""The report of a run: one HTML page that needs no network, no other file and no script.

Works on the folder of a run that is finished, running or broken, on any machine; reads it and writes nothing but the page.
What cannot be read or drawn is a sentence at the top, and the rest is there.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import jinja2
from matplotlib.figure import Figure

from app.errors import SamerunError
from app.reports import plots, tables, time_split
from app.reports.named_scores import heading, quantities, value_text, words
from app.reports.past_run import PastRun
from app.reports.state import State, duration, moment, state_of
from app.reports.task_page import page_of

T = TypeVar("T")
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_MOST_POINTS = 400
"""Of a line; more would be a grey band."""

_WIDE, _HIGH = 4.1, 2.7
"""Inches of a plot. At 72 points an inch that is less than a phone's screen, so that letters are not smaller there."""
_BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""Errors raised by invalid values in a file."""


class Plot(NamedTuple):
    """A picture on the page."""

    title: str
    source: str
    """As a data URI."""
    alt: str
    note: str = ""
    """What stands below it."""


class Split(NamedTuple):
    """Where the time of the training loop went."""

    plot: Plot
    """The shares over the course of the run."""
    shares: list[tables.Bar]
    """Those of the whole of it."""


def render(run: PastRun, now: float) -> tuple[str, list[str]]:
    """Return the page of a run as HTML, made at the time `now` (Unix seconds), and the complaints that stand on it."""
    complaints = list(run.complaints)

    def attempt(what: str, build: Callable[[], T]) -> T | None:
        try:
            return build()
        except SamerunError as error:
            complaints.append(str(error))
        except _BROKEN as error:
            found = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            complaints.append(f"{what} cannot be shown, because the file has an invalid value: {found}.")
        return None

    state = attempt("The state of the run", lambda: state_of(run, now))
    task_page = page_of(run)
    own = attempt("What its task left", lambda: task_page.read(run.folder)) if task_page else None
    complaints += own.complaints if own else []
    since = state.since if state else None
    parts = {name: attempt(what, build) for name, (what, build) in _parts(run, state).items()}
    html = _template(task_page.TEMPLATE if task_page and own else _TEMPLATE).render(
        title=str(run.about.get("recipe") or run.name),
        folder=run.name,
        made=moment(now),
        last=None if since is None else moment(since),
        ago=None if since is None else duration(now - since),
        state=state,
        own=own,
        **parts,
        complaints=complaints,
    )
    return html, complaints


def _parts(run: PastRun, state: State | None) -> Mapping[str, tuple[str, Callable[[], Any]]]:
    """What the template shows, by its name there: what it is called where it is broken, and what builds it."""
    return {
        "facts": ("The headline", lambda: tables.facts(run, state)),
        "curves": ("The curves, of metrics.jsonl and evaluations.jsonl,", lambda: _curves(run)),
        "split": ("The time split, of metrics.jsonl,", lambda: _split(run)),
        "goodput": ("The goodput, of ledger.jsonl,", lambda: tables.goodput(run)),
        "topology": ("The topology, of run.json,", lambda: tables.topology(run)),
        "versions": ("The list of versions, of run.json,", lambda: tables.versions(run)),
        "command": ("The command, of run.json,", lambda: tables.command(run)),
        "starts": ("The list of starts, of ledger.jsonl,", lambda: tables.starts(run, state)),
        "scores": ("The scores, of result.json and evaluations.jsonl,", lambda: tables.tested(run)),
        "texts": ("What the model wrote, of texts.jsonl,", lambda: tables.texts(run)),
        "named": ("The tables of result.json", lambda: tables.named(run)),
        "recipe": ("The recipe", lambda: tables.recipe(run)),
    }


def _template(path: Path) -> jinja2.Template:
    """The template, which may extend ours; its filter `svg` makes of a figure what the source of a picture can be."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([_TEMPLATE.parent, path.parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = _svg_uri
    return environment.get_template(path.name)


def _svg_uri(figure: Figure) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(content.getvalue()).decode()


def _curves(run: PastRun) -> list[Plot]:
    drawn: list[Plot] = []
    for quantity in quantities([run]):
        if not any(plots.curve(run, part, quantity).y for part in plots.PARTS):
            continue
        figure = Figure(figsize=(_WIDE, _HIGH), layout="constrained")
        axes = figure.subplots()
        notes = " ".join(dict.fromkeys(plots.draw(axes, [run], quantity, x=plots.course_of(run))))
        if len(axes.lines) > 1:  # of one, the axis says what it is
            figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        drawn.append(Plot(heading(words(quantity)), _svg_uri(figure), _told(run, quantity), notes))
    drawn += _by_step(run, "learning_rate", "Learning rate", "learning rate")
    drawn += _by_step(run, f"{run.unit}_per_s", "Speed", f"{run.unit}/s")
    return drawn


def _by_step(run: PastRun, key: str, title: str, label: str) -> list[Plot]:
    """A plot of a column of the metrics, if it has any values."""
    points = [(line["step"], line[key]) for line in run.metrics if line.get(key) is not None]
    if not points:
        return []
    length = -(-len(points) // _MOST_POINTS)
    groups = [points[begin : begin + length] for begin in range(0, len(points), length)]
    figure = Figure(figsize=(_WIDE, _HIGH), layout="constrained")
    axes = figure.subplots()
    means = [fmean(value for _, value in group) for group in groups]
    dot = "o" if len(groups) == 1 else ""  # a line of one point is not seen
    axes.plot([group[-1][0] for group in groups], means, color="black", marker=dot, clip_on=False)
    axes.set(ylabel=label, ylim=(0, 1.08 * max(means) or None))  # the line does not run along the frame
    time_split.count_steps(axes, points[-1][0])
    axes.grid(color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    values = [value for _, value in points]
    note = f"{len(points):,} lines are drawn as points, each the mean of {length}." if length > 1 else ""
    told = f"{label} by step: between {min(values):.3g} and {max(values):.3g}."
    return [Plot(title, _svg_uri(figure), told, note)]


def _told(run: PastRun, quantity: str) -> str:
    """What a curve shows, for who cannot see it."""
    sentences, x = [], plots.course_of(run)
    length = "{:.3g} epochs" if x == "epoch" else f"{{:,.0f}} {x}"
    for part in plots.PARTS:
        curve = plots.curve(run, part, quantity, x=x)
        if curve.y:
            first, last = (value_text(quantity, value, curve.y) for value in (curve.y[0], curve.y[-1]))
            sentences.append(f"{part} {words(quantity)} from {first} to {last} over {length.format(curve.x[-1])}")
    return heading(f"{'; '.join(sentences)}.")


def _split(run: PastRun) -> Split | None:
    stretches = time_split.merged(time_split.split(run))
    if not stretches:
        return None
    columns = zip(*(seconds for _, seconds in stretches), strict=True)
    sums: dict[str, float | None] = {name: sum(column) for name, column in zip(time_split.PARTS, columns, strict=True)}
    if all(line.get("communication_share") is None for line in run.metrics):  # as of one process
        sums["communication"] = None
    shares = tables.parts_of(sums, unknown="none" if run.about.get("world_size") == 1 else "unknown")
    told = ", ".join(f"{bar.name} {' '.join(bar.values)}" for bar in shares)
    figure = time_split.draw(stretches, size=(_WIDE, 1.25 * _HIGH))
    alt = f"The time of the whole run: {told}."
    return Split(Plot("The training loop, over its steps", _svg_uri(figure), alt), shares)
