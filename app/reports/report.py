"""`samerun report RUN`: write one HTML page about a run that needs no network, no other file and no script.

Works on the folder of a run that is finished, running or broken, on any machine; reads it and writes nothing but the page.
What cannot be read or drawn is a sentence at the top, and the rest is there: values that a run does not write raise whatever
Python raises for them, and `render` makes sentences of that.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import RunFolderError, SamerunError
from app.files.text_files import duration, is_finite
from app.optim.schedule import lr_at
from app.options import Parser
from app.recipe import recipe_file
from app.recipe.schema import OptimRecipe
from app.reports import past_run
from app.reports.past_run import SPLITS, TEXT_SCORE, PastRun, State, last_scores, moment, value_text, words
from app.reports.timeline import TIMELINE
from app.runs import ledger, run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
Row = tuple[str, str]
Bar = tuple[str, Sequence[str], float, float]
"""A row with a bar: its name, the other columns, and the bar's length and begin, 0..1."""
FILE = "report.html"
_INCHES = (4.1, 2.7)
"""Size of a plot. At 72 points an inch that is narrower than a phone's screen, so letters are not smaller there."""
_MOST_NAMED = 20
_MOST_STRIPS = 100
"""Places of a plot that show their values; more would be narrower than a pointer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print where it is; return the exit code."""
    parser = Parser("report", "Write a report of a run as one HTML page.")
    parser.add_argument("run", type=run_folder.existing, nargs="?", metavar="RUN", help="run folder; the run may be "
        "finished, running or crashed (default: the newest in runs/)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="PATH", help=f"file to write (default: RUN/{FILE})")
    arguments = parser.parse_all(argv)
    folder = arguments.run or run_folder.newest()
    page = arguments.out or folder / FILE
    html, complaints = render(past_run.read(folder), time.time(), page)
    try:
        run_folder.write_text(page, html)
    except RunFolderError as error:
        raise RunFolderError(f"{error} Write it elsewhere with --out FILE.") from error
    for complaint in complaints:
        past_run.say(complaint)
    past_run.print_text(str(page))
    return 0


def render(run: PastRun, now: float, page: Path | None = None) -> tuple[str, list[str]]:
    """Return the page of a run as HTML, made at the time `now` (Unix seconds), and the complaints on it.

    `page` is the file it will be in; by default one in the run folder.
    """
    import jinja2

    complaints = list(run.complaints)

    def attempt(what: str, build: Callable[[], T]) -> T | None:
        try:
            return build()
        except SamerunError as error:
            complaints.append(str(error))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            complaints.append(f"{what} cannot be shown, because the file has an invalid value: {reason}.")
        return None

    state = attempt("The state of the run", lambda: past_run.state_of(run, now))
    template, own = Path(__file__).with_name("page.html.jinja"), None
    if run.about.get("task") == "image_classification":
        from app.tasks.image_classification import predictions

        own = attempt("The predictions", lambda: predictions.read(run.folder))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, *([predictions.TEMPLATE.parent] if own else [])]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scheduled = attempt("The learning rate of every step, by recipe.yaml,", lambda: _with_schedule(run))
    last = state.since if state else None
    html = environment.get_template(predictions.TEMPLATE.name if own else template.name).render(
        title=str(run.about.get("recipe") or run.name),
        folder=run.name,
        made=moment(now),
        last=None if last is None else f"{moment(last)}, {duration(now - last)}",
        state=state,
        traceback=run.failure.traceback if run.failure and state and state.word == "failed" else "",
        own=own,
        facts=attempt("The headline", lambda: _facts(run, state)),
        curves=attempt("The curves, of metrics.jsonl and evaluations.jsonl,", lambda: _curves(run, scheduled or run)),
        goodput=attempt("The goodput, of ledger.jsonl,", lambda: _goodput(run)),
        scores=attempt("The scores, of result.json and evaluations.jsonl,", lambda: _scores(run)),
        named=attempt("The tables of result.json", lambda: _named(run)),
        texts=attempt("The texts, of texts.jsonl,", lambda: _texts(run)),
        starts=attempt("The list of attempts, of ledger.jsonl,", lambda: _starts(run, state)),
        changed=attempt("The changes to the recipe", lambda: _changed(run)),
        profile=attempt("The profile", lambda: _profile(run, page or run.folder / FILE)),
        topology=attempt("The topology, of run.json,", lambda: _topology(run)),
        versions=attempt("The list of versions, of run.json,", lambda: list(run.about.get("versions", {}).items())),
        command=attempt("The command, of run.json,", lambda: shlex.join(map(str, run.about.get("command") or []))),
        recipe=[(key, _plain(value)) for key, value in past_run.flat(run.recipe).items()],
        complaints=complaints,
    )
    return html, complaints


def _svg(figure: Figure) -> str:
    """Return a figure as SVG to stand in a page, whose style gives it colors and letters."""
    from matplotlib import rc_context

    content = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return re.sub(r' id="[\w.]+_\d+"', "", content.getvalue()[content.getvalue().index("<svg") :])  # others would have the same


def _values(axes: Axes) -> list[tuple[float, float, str]]:
    """Return upright strips of a drawn plot, each with the values of its lines there: left edge and width (%), text."""
    lines = [(line.get_label(), line.get_xydata().tolist()) for line in axes.lines]  # type: ignore[union-attr]  # an array
    places = sorted({place for _, points in lines for place, _ in points})
    places = places[:: -(-len(places) // _MOST_STRIPS)]
    width, box, bottom = axes.figure.bbox.width, axes.get_window_extent(), axes.get_ylim()[0]
    middles = map(fmean, pairwise(axes.transData.transform((place, bottom))[0] for place in places))
    strips = []
    for place, (left, right) in zip(places, pairwise([box.x0, *middles, box.x1]), strict=True):
        near = [(name, *min(points, key=lambda point: abs(point[0] - place))) for name, points in lines]
        text = "\n".join(f"{name} {y:,.6g} ({axes.get_xlabel()} {x:,.6g})" for name, x, y in near)
        strips.append((100 * left / width, 100 * (right - left) / width, text))
    return strips


def _plain(value: Any) -> str:
    """Return a value as a recipe has it."""
    return {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _facts(run: PastRun, state: State | None) -> list[Row]:
    """Return the numbers of the headline."""
    known = last_scores(run)
    names = dict.fromkeys([*(run.monitor or ())[:1], "loss", TEXT_SCORE])
    keys = [f"{split}_{name}" for split in reversed(SPLITS) for name in names]
    rows = [(words(key), value_text(key, known[key])) for key in keys if key in known]
    if state:
        rows.append(("steps", f"{state.step:,}" + (f" of {state.total_steps:,}" if state.total_steps else "")))
    last, rate, seen = run.metrics[-1] if run.metrics else {}, f"{run.unit}_per_s", f"{run.unit}_seen"
    if (speed := run.result.get(rate) or last.get(rate)) is not None:
        rows.append((f"{run.unit}/s", f"{speed:,.0f}"))
    if run.unit != run_folder.UNIT and seen in last:
        rows.append((words(seen), f"{last[seen]:,}"))
    if last.get("mfu") is not None:
        rows.append(("of the devices' peak (MFU)", f"{100 * last['mfu']:.1f} %"))
    if run.about.get("world_size"):
        rows.append(("processes", f"{run.about['world_size']}"))
    if run.about.get("preset") or run.about.get("strategy"):
        rows.append(("preset", str(run.about.get("preset") or f"none ({run.about['strategy']})")))
    return rows


def _curves(run: PastRun, scheduled: PastRun) -> list[dict[str, Any]]:
    """Return the plots of the page: title, picture, its description, its values, and what is missing in it.

    `scheduled` is the run with the learning rate of every step.
    """
    from matplotlib.figure import Figure  # takes half a second, which the help does not need

    from app.reports import curves

    shown = {name: (run, words(name), "") for name in past_run.quantities([run])}
    shown["learning_rate"] = (scheduled, "learning rate", "g")
    shown |= {f"{run.unit}_per_s": (run, f"{run.unit}/s", ",.0f"), "grad_norm": (run, "gradient norm", "g")}
    shown["memory_bytes"] = (run, "memory of a process (GiB)", "g")
    drawn = []
    for name, (of, title, form) in shown.items():
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        notes = curves.draw(axes, [of], name, x=curves.progress_of(run), parts=["training"] if form else None)
        if form and axes.lines:
            axes.lines[0].set_label(title)
            axes.set(ylabel=title, ylim=(0, 1.08 * axes.dataLim.y1 or None))
            axes.yaxis.set_major_formatter(f"{{x:{form}}}")
        if len(axes.lines) > 1:  # of one, the axis has its name
            figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        drawn += [(figure, axes, _heading(title), " ".join(dict.fromkeys(notes)))] if axes.lines else []
    plots = []
    for figure, axes, title, note in drawn:
        axes.set_xlim(0.0, 1.02 * max(other.dataLim.x1 for _, other, *_ in drawn) or None)
        figure.draw_without_rendering()  # places the axes
        alt = f"{axes.get_ylabel()} by {axes.get_xlabel()}: {', '.join(str(line.get_label()) for line in axes.lines)}."
        plots.append({"title": title, "svg": _svg(figure), "alt": alt, "note": note, "values": _values(axes)})
    return plots


def _with_schedule(run: PastRun) -> PastRun:
    """Return the run with the learning rates of its schedule between the logged ones, if these are the schedule's too."""
    import numpy as np

    axis = f"{run.unit}_seen"
    logged = {line["step"]: line for line in run.metrics if is_finite(line.get("learning_rate")) and is_finite(line.get(axis))}
    batch, optim = run.about.get("global_batch_size"), run.recipe.get("optim")
    if not (run.starts and logged and batch and optim):
        return run
    per_epoch, total = run.starts[-1].training_samples // batch, run.starts[-1].total_steps
    sizes = {"global_batch_size": batch, "steps_per_epoch": per_epoch, "total_steps": total}
    steps = sorted({*logged, *range(1, max(logged) + 1, -(-max(logged) // 400))})
    known = {it.name for it in fields(OptimRecipe)}  # a run of another version may have other keys
    of_run = OptimRecipe(**{key: value for key, value in optim.items() if key in known})
    rates = {step: lr_at(step - 1, optim=of_run, **sizes) for step in steps}
    if not all(math.isclose(rates[step], line["learning_rate"], rel_tol=1e-6) for step, line in logged.items()):
        return run
    seen = np.interp(steps, [0, *logged], [0, *(line[axis] for line in logged.values())]).tolist()
    lines = [{"step": step, axis: at, "learning_rate": rates[step]} for step, at in zip(steps, seen, strict=True)]
    return replace(run, metrics=lines)


def _changed(run: PastRun) -> list[Row] | None:
    """Return the values that differ from those of the shipped recipe with the run's recipe name; None if there is none."""
    if (name := run.about.get("recipe")) not in recipe_file.names():
        return None
    own, shipped = past_run.flat(run.recipe), recipe_file.flat(recipe_file.load(str(name)).recipe)
    differ = [key for key, value in own.items() if key in shipped and value != shipped[key]]
    return [(key, f"{_plain(own[key])} (shipped: {_plain(shipped[key])})") for key in differ]


def _profile(run: PastRun, page: Path) -> str | None:
    """Return the address of the run's timeline in a page, empty before it is made; None without a profile."""
    timeline = run.folder / run_folder.PROFILE / TIMELINE
    if not timeline.with_name("ranks.json").exists():
        return None
    return os.path.relpath(timeline, page.parent) if timeline.exists() else ""


def _heading(text: str) -> str:
    """Return a text with a capital letter; a name in it keeps its own."""
    return text[:1].upper() + text[1:]


def _goodput(run: PastRun) -> dict[str, Any] | None:
    """Return where every second of a run went: goodput and rows; None if its ledger is missing."""
    if not run.events:
        return None
    if not isinstance(run.events[0], ledger.Start):
        raise RunFolderError(f"{run.folder / run_folder.LEDGER} does not begin with an attempt: time spent is unknown.")
    spent, begin, rows = ledger.account(run.events), 0.0, list[Bar]()
    for name, seconds in past_run.time_parts(spent).items():
        share = (seconds or 0.0) / (spent.wall_s or 1.0)
        # Without a job there is no queue.
        if share < 5e-4 and not (seconds is None and any(start.job for start in run.starts)):
            continue
        texts = ["unknown" if seconds is None else duration(seconds), f"{100 * share:.1f} %"]
        rows.append((name, texts, share, min(begin, 1.0 - share)))
        begin += share
    return {"share": spent.share, "rows": rows}


def _scores(run: PastRun) -> dict[str, Any] | None:
    """Return every score of validation and test, and which weights they are of; None if there are no scores."""
    final = past_run.scores(run, run.result)
    rows = [(words(key), value_text(key, value)) for key, value in last_scores(run).items()]
    sizes = [f"{run.result[key]:,} {split} samples" for split in SPLITS if (key := f"{split}_samples") in run.result]
    caption = f"Of the final weights, over {' and '.join(sizes)}" if final else "Of the last evaluation"
    return {"caption": caption, "rows": rows} if rows else None


def _named(run: PastRun) -> list[dict[str, Any]]:
    """Return a table of each value of the result that has names below it; of many names the lowest values."""
    tables = []
    for key, values in run.result.items():
        below = values.items() if isinstance(values, Mapping) else ()
        known = {str(name): float(value) for name, value in below if is_finite(value)}
        if not known:
            continue
        caption, shown = _heading(words(key)), list(known.items())
        if len(shown) > _MOST_NAMED:
            caption += f": the {_MOST_NAMED} lowest of {len(shown):,}"
            shown = sorted(shown, key=lambda pair: pair[1])[:_MOST_NAMED]
        everything = list(known.values())
        longest = 1.0 if past_run.is_share(key, everything) else max(0.0, *everything) or 1.0
        rows = [(name, [value_text(key, value, everything)], max(0.0, value) / longest, 0.0) for name, value in shown]
        tables.append({"caption": caption, "rows": rows})
    return tables


def _texts(run: PastRun) -> list[tuple[str, list[Row]]]:
    """Return the texts of the last evaluation and of the first: a caption, and titles with texts."""
    shown = []
    for step in sorted({line["step"] for line in (*run.texts[-1:], *run.texts[:1])}, reverse=True):
        own = [(line["title"], line["text"]) for line in run.texts if line["step"] == step]
        # A mark for each character that has no shape.
        own = [(title, "".join(it if it.isprintable() or it in "\n\t" else "\ufffd" for it in text)) for title, text in own]
        shown.append((f"After step {step:,}", own))
    return shown


def _starts(run: PastRun, state: State | None) -> list[list[str]]:
    """Return of each start: when, after which step, how it ended, on how many processes, under which preset, in which job."""
    rows: list[list[str]] = []
    numbers = [number for number, event in enumerate(run.events) if isinstance(event, ledger.Start)]
    for start, (number, following) in zip(run.starts, pairwise([*numbers, None]), strict=True):
        events = run.events[number:following]
        done = f"after step {max(map(ledger.last_step, events)):,}"
        ended = f"killed or failed {done}"
        if isinstance(last := events[-1], ledger.End):
            ended = f"{last.outcome} {done}"
        elif following is None:
            ended = state.word if state else "not known"
        processes, preset, job = str(start.world_size), start.preset or "none", start.job or "none"
        rows.append([moment(start.launched), f"{start.from_step:,}", ended, processes, preset, job])
    return rows


def _topology(run: PastRun) -> list[Row]:
    """Return the processes, hosts and devices of the last start, and how they shared the batch."""
    hosts: dict[str, list[str]] = {}
    for rank in run.about.get("ranks", []):
        host, _, device = str(rank).rpartition(" ")
        hosts.setdefault(host, []).append(device)
    rows = [(f"devices of {host}", ", ".join(dict.fromkeys(devices))) for host, devices in hosts.items()]
    keys = ("world_size", "preset", "strategy", "mixed_precision", "global_batch_size", "micro_batch", "accumulation",
            "resumed_from", "init_from", "commit")  # fmt: skip
    return [*rows, *((words(key), str(run.about[key])) for key in keys if run.about.get(key) is not None)]
