"""The report of a sweep: report.md for people, report.csv for tables, report.json with all; each figure with its runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.record import run_folder
from app.scaling.advice import Advice
from app.scaling.figures import Interval, Row
from app.scaling.fit import LEAST_SIZES

MARKDOWN, TABLE, JSON, PLOT = "report.md", "report.csv", "report.json", "scaling"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is reported."""

    title: str
    facts: Mapping[str, Any]
    """What was measured, where and how, by name."""
    work: str
    """What the seconds are of: `an epoch`, or `the work of the file`."""
    wanted: float
    """Efficiency that is asked for, 0..1."""
    rows: Sequence[Row]
    advice: Sequence[Advice]

    @property
    def unit(self) -> str:
        """What the rates are of, as the runs tell."""
        return next((run.unit for row in self.rows for run in row.runs), run_folder.UNIT)


def write(folder: Path, report: Report) -> None:
    """Write report.md, report.csv and report.json into the folder."""
    run_folder.write_text(folder / MARKDOWN, "\n".join(_markdown(report)) + "\n")
    run_folder.write_text(folder / TABLE, _csv(report))
    run_folder.write_json(folder / JSON, _json(report))


def _figures(report: Report, row: Row) -> dict[str, Any]:
    """A row with all that is derived from it, flat; what is not known is None."""
    method = next((one.method for one in report.advice if row.runs and one.method.name == row.method), None)
    share = method.efficiency(row) if method else None
    return {
        "nodes": row.nodes,
        "devices_per_node": row.devices_per_node,
        "devices": row.devices,
        "method": row.method,
        "repeats": len(row.runs),
        "samples_per_s": row.mean("samples_per_s"),
        "samples_per_s_deviation": row.deviation("samples_per_s"),
        f"{report.unit}_per_s": row.mean("units_per_s"),  # of samples they are the same
        f"{report.unit}_per_s_deviation": row.deviation("units_per_s"),
        "seconds": row.seconds if method else None,
        "seconds_deviation": row.deviation("seconds"),
        "speed_up": method.speed_up(row) if method else None,
        "efficiency": share.value if share else None,
        "efficiency_low": share.low if share else None,
        "efficiency_high": share.high if share else None,
        "data_wait_share": row.mean("data_wait_share"),
        "communication_share": row.mean("communication_share"),
        "memory_bytes": max((run.memory_bytes or 0 for run in row.runs), default=0) or None,
        "device_hours": row.device_hours if method else None,
        "runs": " ".join(run.source for run in row.runs),
        "problems": "; ".join(row.problems),
    }


def _csv(report: Report) -> str:
    lines = [_figures(report, row) for row in report.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _json(report: Report) -> dict[str, Any]:
    rows = [
        {**_figures(report, row), "runs": [asdict(run) for run in row.runs], "problems": list(row.problems)}
        for row in report.rows
    ]
    methods = {advice.method.name: _json_advice(advice) for advice in report.advice}
    about = {"title": report.title, **report.facts, "seconds_of": report.work, "wanted_efficiency": report.wanted}
    return {**about, "rows": rows, "methods": methods}


def _json_advice(advice: Advice) -> dict[str, Any]:
    told = {"devices": advice.devices, "nodes": advice.nodes, "units_per_s": advice.units_per_s, "why": advice.why}
    if advice.fit is None:
        return {"recommended": told, "fit": None}
    laws = [asdict(law) for law in advice.fit.laws]
    return {"recommended": told, "fit": {"laws": laws, "foretold": [asdict(one) for one in advice.foretold]}}


_COLUMNS = ("nodes", "devices per node", "method", "{unit}/s", "{work} [s]", "speed-up", "efficiency", "data wait",
            "communication", "memory [GiB]", "device-hours", "runs")  # fmt: skip


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {report.title}\n"
    yield from (f"- {name.replace('_', ' ')}: {value}" for name, value in report.facts.items())
    yield f"\n![throughput and efficiency by devices]({PLOT}.png)\n"
    columns = [column.format(work=report.work, unit=report.unit) for column in _COLUMNS]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    yield from (_line(report, row) for row in report.rows)
    yield (
        f"\nMean +- standard deviation over the runs. Seconds and device-hours are of {report.work}. Speed-up and efficiency "
        "are relative to the smallest size of the same method; in brackets the 95 % interval, from the spread over all runs "
        "of the method. `-` is not known.\n"
    )
    problems = [f"- {row.devices} devices, {row.method}: {problem}" for row in report.rows for problem in row.problems]
    if problems:
        yield "\n".join(["## What is missing, and why\n", *problems, ""])
    for advice in report.advice:
        yield from _conclusions(report, advice)


def _line(report: Report, row: Row) -> str:
    figures = _figures(report, row)

    def cell(name: str, form: str, factor: float = 1.0) -> str:
        return "-" if figures[name] is None else format(figures[name] * factor, form)

    def spread(name: str) -> str:
        value, deviation = figures[name], figures[f"{name}_deviation"]
        return "-" if value is None else _text(value) + ("" if deviation is None else f" +- {_text(deviation)}")

    runs = "<br>".join(f"`{run.source}`" for run in row.runs)
    cells = [
        cell("nodes", "d", 1), cell("devices_per_node", "d", 1) if row.devices_per_node else str(row.devices), row.method,
        spread(f"{report.unit}_per_s"), spread("seconds"), cell("speed_up", ".2f"), _share(figures),
        cell("data_wait_share", ".1%"), cell("communication_share", ".1%"), cell("memory_bytes", ".2f", 2**-30),
        cell("device_hours", ".4g"), runs or "failed",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _text(value: float | None) -> str:
    """A figure to four digits, or to all before the point if those are more."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sentence(report: Report, row: Row) -> str:
    """Return the main figures of a row in one line."""
    where = f"{row.method}, {_counted(row.devices, 'device')}"
    where += f" on {_counted(row.nodes, 'node')}" if row.nodes else ""
    if not row.runs:
        return f"{where}: {'; '.join(row.problems)}"
    figures = _figures(report, row)
    rate = "" if row.mean("units_per_s") is None else f"{_text(row.mean('units_per_s'))} {report.unit}/s, "
    return f"{where}: {rate}{report.work} in {_text(figures['seconds'])} s, efficiency {_share(figures)}"


def _share(figures: Mapping[str, Any]) -> str:
    values = [figures[name] for name in ("efficiency", "efficiency_low", "efficiency_high")]
    return "-" if values[0] is None else str(Interval(*values))


def recommendation(report: Report, advice: Advice) -> str:
    """Return how many devices a method is worth, and why, in two sentences."""
    nodes = "" if advice.nodes is None else f" ({_counted(advice.nodes, 'node')})"
    rate = "" if advice.units_per_s is None else f", about {_text(advice.units_per_s)} {report.unit}/s,"
    devices = f"{_counted(advice.devices, 'device')}{nodes}{rate}"
    return f"{advice.method.name}: {devices} for an efficiency of at least {report.wanted:.2f}. Efficiency is {advice.why}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else f'{what}s'}"


def _conclusions(report: Report, advice: Advice) -> Iterator[str]:
    """How a method scales, in sentences and figures."""
    yield f"## {advice.method.name}\n"
    yield f"{recommendation(report, advice)}\n"
    if advice.fit is None:
        yield f"No law was fitted: that needs {LEAST_SIZES} sizes.\n"
        return
    largest = advice.foretold[-3].devices
    yield f"| devices | {report.work} by the fit [s] | range [s] | efficiency | range |"
    yield "|---|---|---|---|---|"
    for one in advice.foretold:
        seconds, share = one.seconds, one.efficiency
        name = f"{one.devices}" if one.devices <= largest else f"{one.devices}, foretold"
        between = f"{_text(seconds.low)} to {_text(seconds.high)} | {share.value:.2f} | {share.low:.2f} to {share.high:.2f}"
        yield f"| {name} | {_text(seconds.value)} | {between} |"
    yield "\n| law | weight | missed the largest size by | T(n) [s] |\n|---|---|---|---|"
    for law in advice.fit.laws:
        yield f"| {law.name} | {law.weight:.2f} | {math.expm1(law.miss):+.1%} | {law.formula()} |"
    yield (
        "\nEach law was fitted to all sizes but the largest, and had to predict the largest. Its error there "
        "gives its weight; the fit is the weighted geometric mean. The range covers all laws that missed by "
        "at most 25 % (all laws, if none did), with any size but the smallest left out, or with any size off "
        "by the 95 % error of its mean.\n"
    )
