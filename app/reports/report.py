"""`samerun report RUN`: write one HTML page about a run that needs no network, no other file and no script.

Works on the folder of a run that is finished, running or broken, on any machine; reads it and writes nothing but the page.
What cannot be read or drawn is a sentence at the top, and the rest is there: values that a run does not write raise whatever
Python raises for them, and `render` makes sentences of that.
"""

from __future__ import annotations

import base64
import io
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import RunFolderError, SamerunError, printable
from app.files.text_files import is_finite
from app.options import Parser
from app.reports import past_run
from app.reports.past_run import SPLITS, TEXT_SCORE, PastRun, State, duration, last_scores, moment, value_text, words
from app.runs import ledger, run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Row = tuple[str, str]
Bar = tuple[str, Sequence[str], float, float]
"""A row with a bar: its name, the other columns, and the bar's length and begin, 0..1."""
FILE = "report.html"
_INCHES = (4.1, 2.7)
"""Size of a plot. At 72 points an inch that is narrower than a phone's screen, so letters are not smaller there."""
_MOST_NAMED = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and print where it is; return the exit code."""
    parser = Parser(prog="samerun report", description="Write a report of a run as one HTML page.")
    parser.add_argument("run", type=Path, help="run folder; the run may be finished, running or crashed")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: RUN/{FILE})")
    arguments = parser.parse_all(argv)
    page = arguments.out or arguments.run / FILE
    html, complaints = render(past_run.read(arguments.run), time.time())
    try:
        run_folder.write_text(page, html)
    except RunFolderError as error:
        raise RunFolderError(f"{error} Write it elsewhere with --out FILE.") from error
    for complaint in complaints:
        sys.stderr.write(f"note: {printable(complaint)}\n")
    past_run.print_text(str(page))
    return 0


def render(run: PastRun, now: float) -> tuple[str, list[str]]:
    """Return the page of a run as HTML, made at the time `now` (Unix seconds), and the complaints on it."""
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
    environment.filters["svg"] = _svg_uri
    last = state.since if state else None
    html = environment.get_template(predictions.TEMPLATE.name if own else template.name).render(
        title=str(run.about.get("recipe") or run.name),
        folder=run.name,
        made=moment(now),
        last=None if last is None else f"{moment(last)}, {duration(now - last)}",
        state=state,
        own=own,
        facts=attempt("The headline", lambda: _facts(run, state)),
        curves=attempt("The curves, of metrics.jsonl and evaluations.jsonl,", lambda: _curves(run)),
        goodput=attempt("The goodput, of ledger.jsonl,", lambda: _goodput(run)),
        scores=attempt("The scores, of result.json and evaluations.jsonl,", lambda: _scores(run)),
        named=attempt("The tables of result.json", lambda: _named(run)),
        texts=attempt("The texts, of texts.jsonl,", lambda: _texts(run)),
        starts=attempt("The list of starts, of ledger.jsonl,", lambda: _starts(run, state)),
        topology=attempt("The topology, of run.json,", lambda: _topology(run)),
        versions=attempt("The list of versions, of run.json,", lambda: list(run.about.get("versions", {}).items())),
        command=attempt("The command, of run.json,", lambda: shlex.join(map(str, run.about.get("command") or []))),
        recipe=[(key, _plain(value)) for key, value in past_run.flat(run.recipe).items()],
        complaints=complaints,
    )
    return html, complaints


def _svg_uri(figure: Figure) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(content.getvalue()).decode()


def _plain(value: Any) -> str:
    """Return a value as a recipe has it."""
    return {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _facts(run: PastRun, state: State | None) -> list[Row]:
    """Return the numbers of the headline."""
    known = last_scores(run)
    names = dict.fromkeys([*(run.monitor or ())[:1], "loss", TEXT_SCORE])
    rows = [
        (words(key), value_text(key, known[key]))
        for split in reversed(SPLITS)
        for name in names
        if (key := f"{split}_{name}") in known
    ]
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


def _curves(run: PastRun) -> list[dict[str, str]]:
    """Return the plots of the page: title, picture as a data URI, its description, and what is missing in it."""
    from matplotlib.figure import Figure  # takes half a second, which the help does not need

    from app.reports import curves

    drawn = []
    rates = ("learning_rate", f"{run.unit}_per_s")
    for quantity in [*past_run.quantities([run]), *rates]:
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        parts: list[curves.Part] | None = ["training"] if quantity in rates else None
        notes = curves.draw(axes, [run], quantity, x="epoch" if run.unit == run_folder.UNIT else run.unit, parts=parts)
        if not axes.lines:
            continue
        title = words(quantity).replace(" per s", "/s")
        if quantity in rates:
            axes.set(ylabel=title, ylim=(0, 1.08 * axes.dataLim.y1 or None))
        if len(axes.lines) > 1:  # of one, the axis has its name
            figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        alt = f"{axes.get_ylabel()} by {axes.get_xlabel()}: {', '.join(str(line.get_label()) for line in axes.lines)}."
        drawn.append({"title": _heading(title), "source": _svg_uri(figure), "alt": alt, "note": " ".join(dict.fromkeys(notes))})
    return drawn


def _heading(text: str) -> str:
    """Return a text with a capital letter; a name in it keeps its own."""
    return text[:1].upper() + text[1:]


def _goodput(run: PastRun) -> dict[str, Any] | None:
    """Return where every second of a run went: goodput and rows; None if its ledger is missing."""
    if not run.events:
        return None
    if not isinstance(run.events[0], ledger.Start):
        raise RunFolderError(f"{run.folder / run_folder.LEDGER} does not begin with a start: where the time went is unknown.")
    spent, begin, rows = ledger.account(run.events), 0.0, list[Bar]()
    for name, seconds in past_run.time_parts(spent).items():
        share = (seconds or 0.0) / (spent.wall_s or 1.0)
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
