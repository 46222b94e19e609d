"""The tables of the page of `samerun report`, from a run folder.

Values that are not those that a run writes raise what Python raises for them; the page makes sentences of that.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, NamedTuple

from app.errors import RunFolderError
from app.files.lines import is_finite
from app.recipe.batching import BatchPlan
from app.record import goodput as accounting
from app.record import ledger, run_folder
from app.reports.named_scores import (
    FOLLOWED,
    LOSS,
    SPLITS,
    heading,
    is_share,
    key_of,
    last_scores,
    scores,
    split_of,
    value_text,
    words,
)
from app.reports.past_run import PastRun, flat
from app.reports.state import State, duration, moment

Row = tuple[str, str]


class Bar(NamedTuple):
    """A row with a bar; those of parts of a whole begin where the one before ended."""

    name: str
    values: Sequence[str]
    """What the other columns say."""
    share: float
    """The length of the bar, 0..1."""
    begin: float = 0.0


def parts_of(seconds: Mapping[str, float | None], *, unknown: str = "unknown") -> list[Bar]:
    """Return a bar for each part of the sum of `seconds`; None is a part that nobody knows, or that there is not."""
    whole_s = sum(own or 0.0 for own in seconds.values())
    bars, begin = [], 0.0
    for name, own in seconds.items():
        share = (own or 0.0) / whole_s
        told = [unknown, ""] if own is None else [duration(own), f"{100 * share:.1f} %"]
        bars.append(Bar(name, told, share, begin))
        begin += share
    return bars


class Goodput(NamedTuple):
    """Where every second of a run went."""

    share: float
    """Of compute that counts, 0..1."""
    rows: list[Bar]
    meanings: list[Row]


class Scores(NamedTuple):
    """The scores of what splits there are, and of which weights they are."""

    caption: str
    rows: list[Row]


class Named(NamedTuple):
    """Values by name, such as the accuracy of each class, and what stands above the table."""

    caption: str
    rows: list[Bar]


def facts(run: PastRun, state: State | None) -> list[Row]:
    """The few numbers that everybody asks for first."""
    known = last_scores(run)
    judged = [run.monitor[0]] if run.monitor else []
    main = [key_of(split, name) for split in reversed(SPLITS) for name in (*judged, LOSS, *FOLLOWED)]
    rows = [(words(key), value_text(key, known[key])) for key in dict.fromkeys(main) if key in known]
    if state:
        rows.append(("steps", f"{state.step:,}" + (f" of {state.total_steps:,}" if state.total_steps else "")))
    last = run.metrics[-1] if run.metrics else {}
    speed = run.result.get(f"{run.unit}_per_s") or last.get(f"{run.unit}_per_s")
    if speed is not None:
        rows.append((f"{run.unit}/s", f"{speed:,.0f}"))
    if run.unit != run_folder.UNIT and f"{run.unit}_seen" in last:
        rows.append((f"{run.unit} seen", f"{last[f'{run.unit}_seen']:,}"))
    if last.get("mfu") is not None:
        rows.append(("of the devices' peak (MFU)", f"{100 * last['mfu']:.1f} %"))
    if run.about.get("world_size"):
        rows.append(("processes", f"{run.about['world_size']}"))
    if run.about.get("preset") or run.about.get("strategy"):
        rows.append(("preset", str(run.about.get("preset") or f"none ({run.about['strategy']})")))
    return rows


def _spent(run: PastRun) -> accounting.TimeSpent | None:
    if not run.events:
        return None
    if not isinstance(run.events[0], ledger.Start):
        raise RunFolderError(f"{run.folder / run_folder.LEDGER} does not begin with a start: where the time went is unknown.")
    return accounting.account(run.events)


_PARTS = {
    "queue_s": ("in the queue", "from submitting the job until it was allocated"),
    "startup_s": ("start-up", "until the first step, of every start"),
    "compute_s": ("compute", "steps that count in the end"),
    "data_wait_s": ("data wait", "waiting for data in these steps"),
    "evaluation_s": ("evaluation", "on the validation split, and at the end on the test split"),
    "saving_s": ("saving", "training paused to save a checkpoint"),
    "lost_work_s": ("lost work", "what a later start did again"),
    "down_s": ("between starts", "from the last line of a start until the next"),
    "other_s": ("other", "writing the result, and time that no line accounts for"),
}


def goodput(run: PastRun) -> Goodput | None:
    """Return where every second of a run went; None if its ledger is missing."""
    spent = _spent(run)
    if spent is None or not spent.wall_s:
        return None
    seconds = {_PARTS[part.name][0]: getattr(spent, part.name) for part in fields(spent)}
    whole = Bar("whole time", [duration(spent.wall_s), "100.0 %"], 1.0)
    return Goodput(spent.share, [whole, *parts_of(seconds)], list(_PARTS.values()))


class Texts(NamedTuple):
    """What a model wrote after an evaluation."""

    caption: str
    texts: list[Row]
    """Titles and texts."""


_EVALUATIONS_SHOWN = 8


def texts(run: PastRun) -> list[Texts]:
    """Return the texts of some evaluations, spread over the run, the latest first."""
    steps = list(dict.fromkeys(line["step"] for line in run.texts))
    most = min(len(steps), _EVALUATIONS_SHOWN)
    shown = [steps[number * (len(steps) - 1) // max(most - 1, 1)] for number in range(most)]
    found = []
    for step in reversed(shown if most > 1 else steps):
        own = [(line["title"], _printable(line["text"])) for line in run.texts if line["step"] == step]
        found.append(Texts(f"After step {step:,}", own))
    return found


def _printable(text: str) -> str:
    """The text with a mark for each character that has no shape."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def topology(run: PastRun) -> list[Row]:
    """Return the processes, nodes and devices of the last start, and how they shared the batch."""
    about = run.about
    if not about:
        return []
    ranks = [str(rank).rpartition(" ") for rank in about.get("ranks", [])]
    hosts = Counter(host for host, _, _ in ranks)
    rows: list[Row] = [("processes", str(about.get("world_size", "not known"))), ("nodes", str(len(hosts) or "not known"))]
    for host in hosts:
        devices = Counter(device for name, _, device in ranks if name == host)
        told = ", ".join(f"{device} ({count} processes)" if count > 1 else device for device, count in devices.items())
        rows.append((f"devices of {host}", told))
    rows += [
        ("preset", str(about.get("preset") or "none")),
        ("strategy", str(about.get("strategy", "not known"))),
        ("mixed precision", str(about.get("mixed_precision", "not known"))),
    ]
    shares: list[Any] = [about.get(name) for name in ("micro_batch", "accumulation", "world_size", "global_batch_size")]
    if all(isinstance(value, int) and value > 0 for value in shares):
        micro, passes, world, size = shares
        divided = max(1, size // (micro * passes))
        plan = BatchPlan(
            global_batch_size=size, data_ranks=divided, accumulation=passes, tensor_parallel=max(1, world // divided)
        )
        rows.append(("global batch", str(plan).partition("global batch ")[2]))
    for key, name in (("resumed_from", "went on from"), ("init_from", "began with the weights of")):
        if about.get(key):
            rows.append((name, str(about[key])))
    return rows


def versions(run: PastRun) -> list[Row]:
    """Return the versions of what the last start ran."""
    rows = [(str(name), str(version)) for name, version in run.about.get("versions", {}).items()]
    return [*rows, ("commit", str(run.about.get("commit") or "not known"))] if rows else []


def command(run: PastRun) -> str | None:
    """Return the command line of the last start, as a shell would take it."""
    words = run.about.get("command")
    return shlex.join(str(word) for word in words) if words else None


def starts(run: PastRun, state: State | None) -> list[list[str]]:
    """Return of each start: when, after which step, how it ended, on how many processes, under which preset, in which job."""
    rows: list[list[str]] = []
    numbers = [number for number, event in enumerate(run.events) if isinstance(event, ledger.Start)]
    for number, following in pairwise([*numbers, None]):
        start, *others = run.events[number:following]
        assert isinstance(start, ledger.Start)
        last = others[-1] if others else start
        done = f"after step {max(map(ledger.last_step, [start, *others])):,}"
        if isinstance(last, ledger.End):
            is_told = following is None and last.outcome == "stopped" and run.outcome.get("reason")
            ended = f"{last.outcome} {done}" + (f", because {run.outcome['reason']}" if is_told else "")
        elif following is None:
            ended = state.word if state else "not known"
        else:
            ended = f"killed or failed {done}"
        processes, preset, job = str(start.world_size), start.preset or "none", start.job or "none"
        rows.append([moment(start.launched), f"{start.from_step:,}", ended, processes, preset, job])
    return rows


def tested(run: PastRun) -> Scores | None:
    """Return every score of validation and test: of the final weights, or of the last evaluation of a running run."""
    final = scores(run, run.result)
    known = final or last_scores(run)
    if not known:
        return None
    splits = [split for split in SPLITS if any(split_of(key) == split for key in known)]
    sizes = " and ".join(f"{run.result[key_of(split, 'samples')]:,} {split} samples" for split in splits) if final else ""
    of = f"Of the final weights, over {sizes}" if final else "Of the last evaluation"
    return Scores(of, [(words(key), value_text(key, value)) for key, value in known.items()])


_MOST_NAMED = 20


def named(run: PastRun) -> list[Named]:
    """Return a table of each value of the result that has names below it; of many names the lowest and the highest values."""
    tables = []
    for key, values in run.result.items():
        below = values.items() if isinstance(values, dict) else ()
        known = {str(name): float(value) for name, value in below if is_finite(value)}
        if known:
            tables.append(_named(key, known))
    return tables


def _named(key: str, known: Mapping[str, float]) -> Named:
    caption, shown = heading(words(key)), list(known.items())
    if len(shown) > _MOST_NAMED:
        each = _MOST_NAMED // 2
        caption += f": the {each} lowest and the {each} highest of {len(shown):,}"
        shown = sorted(shown, key=lambda pair: pair[1])
        shown = [*shown[:each], *shown[-each:]]
    values = list(known.values())
    longest = 1.0 if is_share(key, values) else max(0.0, *values) or 1.0
    return Named(caption, [Bar(name, [value_text(key, value, values)], max(0.0, value) / longest) for name, value in shown])


def recipe(run: PastRun) -> list[Row]:
    """Return every key of the resolved recipe with its value."""
    return [(key, _plain(value)) for key, value in flat(run.recipe).items()]


def _plain(value: Any) -> str:
    return {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
