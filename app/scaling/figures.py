"""The results of a sweep: a row for each size, with the spread over its repeats, speed-up and efficiency.

A rate is that of the steps after the warm-up, from the lines of metrics.jsonl: samples, or what else the runs count, by the
seconds of training, in which evaluating and saving are not counted. Efficiency is the rate per device as a share of that on
the smallest size of the same preset. Its interval is that of the difference of two means of logarithms (95 %, t
distribution), with the deviation of all sizes of the preset together: they ran in turns, so the machine's noise met all
alike, and two or three runs say little of it.
"""

from __future__ import annotations

import csv
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import DataError, RunFolderError
from app.record import ledger, run_folder
from app.reports import past_run
from app.scaling.fit import t_quantile
from app.scaling.sweep import CASES, Case, Folder


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of a size."""

    source: str
    """Its run folder in the folder of the sweep, or its line of a file of times."""
    seconds: float
    """For as many samples as the training data has, at the rate of the steps measured; in a file of times, of its work."""
    samples_per_s: float | None = None
    unit: str = run_folder.UNIT
    """What the run counts: tokens, for instance."""
    units_per_s: float | None = None
    """Of these; of samples the same as `samples_per_s`."""
    data_wait_share: float | None = None
    """Of the training time, 0..1."""
    communication_share: float | None = None
    """The same; None where the strategy does not tell."""
    memory_bytes: int | None = None
    """Of the rank with most."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A size with its runs. What is not known is None."""

    method: str
    """The preset's name."""
    nodes: int | None
    devices_per_node: int | None
    devices: int
    runs: Sequence[Measured]
    problems: Sequence[str] = ()
    """Why there are not more of them, a sentence each."""

    @property
    def seconds(self) -> float:
        """The time of an epoch at the mean rate; needs a run."""
        return 1 / statistics.fmean(1 / run.seconds for run in self.runs)

    @property
    def device_hours(self) -> float:
        """What an epoch takes of all devices; needs a run."""
        return self.devices * self.seconds / 3600

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure of the runs; None if one of them does not know it."""
        values = [getattr(run, name) for run in self.runs]
        return None if not values or None in values else statistics.fmean(values)

    def deviation(self, name: str) -> float | None:
        """Return the standard deviation of a figure of the runs; None for fewer than two, or if one does not know it."""
        values = [getattr(run, name) for run in self.runs]
        return None if len(values) < 2 or None in values else statistics.stdev(values)


@dataclass(frozen=True)
class Interval:
    """A figure, and from what to what it may be; one run alone does not tell that."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        is_exact = self.low is None or self.low == self.high
        return f"{self.value:.2f}" + ("" if is_exact else f" ({self.low:.2f} to {self.high:.2f})")


@dataclass(frozen=True)
class Method:
    """The sizes of one method that were measured."""

    name: str
    rows: Sequence[Row]
    """The smallest first; each with a run."""

    @property
    def base(self) -> Row:
        """The size that the others are compared with."""
        return self.rows[0]

    def speed_up(self, row: Row) -> float:
        """Return the rate of a size as a multiple of the smallest's."""
        return self.base.seconds / row.seconds

    def efficiency(self, row: Row) -> Interval:
        """Return the rate per device of a size as a share of the smallest's, with its 95 % interval."""
        value = self.speed_up(row) * self.base.devices / row.devices
        if row is self.base:
            return Interval(1.0, 1.0, 1.0)
        logs = [[math.log(run.seconds) for run in one.runs] for one in self.rows]
        freedom = sum(len(some) - 1 for some in logs)
        if freedom == 0:
            return Interval(value, None, None)
        squares = math.fsum(statistics.variance(some) * (len(some) - 1) for some in logs if len(some) > 1)
        error = math.sqrt(squares / freedom * (1 / len(row.runs) + 1 / len(self.base.runs)))
        factor = math.exp(t_quantile(freedom) * error)
        return Interval(value, value / factor, value * factor)


def methods_of(rows: Sequence[Row]) -> list[Method]:
    """Return the methods of which something was measured, in the order of the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.runs:
            found.setdefault(row.method, []).append(row)
    return [Method(name, sorted(some, key=lambda row: row.devices)) for name, some in found.items()]


def read_case(folder: Folder, case: Case) -> Measured | None:
    """Return what a case of a sweep measured; None if its run is not finished.

    Raises RunFolderError, with a sentence, where it was another run than the case asks for, or files are missing or cut.
    """
    place = folder.run_dir(case)
    if not (place / run_folder.RESULT).exists():
        return None
    run = past_run.read(place)
    _refuse_another(run, case, folder.expected_digest(case.size))
    first, last = folder.sweep.warm_up_steps, folder.sweep.warm_up_steps + folder.sweep.steps
    lines = {line["step"]: line for line in run.metrics}
    missing = [str(step) for step in (first, last) if step not in lines]
    if missing:
        said = "; ".join(["", *run.complaints])
        raise RunFolderError(f"{place / run_folder.METRICS} has no line of step {' and '.join(missing)}{said}")
    try:
        return _measure(run, [lines[step] for step in sorted(lines) if first <= step <= last])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise RunFolderError(f"{place / run_folder.METRICS} is broken: {error!r}") from error


def _refuse_another(run: past_run.PastRun, case: Case, digest: str) -> None:
    about = run.about
    if about.get("resumed_from"):
        raise RunFolderError(f"{run.folder} was interrupted and resumed: delete it to measure it again")
    if not about:
        raise RunFolderError("; ".join(run.complaints))
    hosts = {str(rank).partition(" ")[0] for rank in about.get("ranks", [])}
    found = (about.get("world_size"), len(hosts), about.get("preset"), about.get("recipe_digest"))
    wanted = (case.size.devices, case.size.nodes, Path(case.size.preset).stem, digest)
    names = ("processes", "nodes", "preset", "recipe")
    wrong = [f"{name} {one}, not {other}" for name, one, other in zip(names, found, wanted, strict=True) if one != other]
    if wrong:
        raise RunFolderError(f"{run.folder} belongs to another measurement ({'; '.join(wrong)}): delete it to measure it again")


def _measure(run: past_run.PastRun, lines: Sequence[Mapping[str, Any]]) -> Measured:
    first, *measured = lines
    spans_s = [line["training_s"] - before["training_s"] for before, line in zip(lines, measured, strict=False)]
    samples_per_s, units_per_s = (
        (measured[-1][seen] - first[seen]) / sum(spans_s) for seen in ("samples_seen", f"{run.unit}_seen")
    )
    starts = [event for event in run.events if isinstance(event, ledger.Start)]
    if not starts:
        raise RunFolderError("; ".join(run.complaints) or f"{run.folder} does not say how many samples an epoch has")

    def share(name: str) -> float | None:
        values = [line[name] for line in measured]
        if None in values:
            return None
        return float(math.fsum(map(operator.mul, values, spans_s)) / sum(spans_s))

    return Measured(
        source=f"{CASES}/{run.name}",
        seconds=starts[-1].training_samples / samples_per_s,
        samples_per_s=samples_per_s,
        unit=run.unit,
        units_per_s=units_per_s,
        data_wait_share=share("data_wait_share"),
        communication_share=share("communication_share"),
        memory_bytes=max(line["memory_bytes"] for line in measured),
    )


def read_times(path: Path) -> list[Row]:
    """Return the rows of a CSV file with the columns devices and seconds, and perhaps method.

    Lines of the same number of devices are its repeats. Raises DataError with every line that is wrong.
    """
    try:
        table = csv.DictReader(path.read_text().splitlines())
        heading, lines = list(table.fieldnames or ()), list(table)
    except OSError as error:
        raise DataError(f"{path} (--from) cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} (--from) cannot be read: it is not UTF-8 (byte {error.start}): save it as UTF-8.") from error
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path} (--from) is not a table of comma-separated values: {error}.") from error
    lacking = [name for name in ("devices", "seconds") if name not in heading]
    if lacking:
        raise DataError(
            f"{path}:1: its heading is {','.join(heading) or 'empty'}, without {' and '.join(lacking)}: the first line must "
            "be devices,seconds, or method,devices,seconds"
        )
    found: dict[tuple[str, int], list[Measured]] = {}
    problems = []
    for number, line in enumerate(lines, start=2):
        try:
            devices, seconds = int(line["devices"]), float(line["seconds"])
            if devices < 1 or not 0 < seconds < math.inf:
                raise ValueError("devices are 1 or more, seconds more than 0")
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{path}:{number}: expected devices and seconds, as 16,1488.2: {error}")
            continue
        run = Measured(source=f"{path}:{number}", seconds=seconds)
        found.setdefault((line.get("method") or path.stem, devices), []).append(run)
    if problems or not found:
        raise DataError("\n".join(problems) or f"{path} (--from) has no line of times under its heading devices,seconds.")
    rows = [
        Row(method=method, nodes=None, devices_per_node=None, devices=devices, runs=runs)
        for (method, devices), runs in found.items()
    ]
    methods = list(dict.fromkeys(row.method for row in rows))
    return sorted(rows, key=lambda row: (methods.index(row.method), row.devices))
