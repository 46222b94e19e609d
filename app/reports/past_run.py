"""Read a run and its state from its folder: finished, running, failed, or copied with files missing or truncated.

What cannot be read becomes a sentence among the complaints, and everything else is still there. Imports neither torch nor
the data of the run.

A score of a split is `validation_NAME` or `test_NAME` in evaluations.jsonl and result.json; the score of the training data is
NAME in metrics.jsonl. Which scores there are depends on the task: here a score is a name and a number.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from app.errors import RunFolderError, printable
from app.files.text_files import Lines, duration, is_count, is_finite
from app.runs import ledger, run_folder
from app.runs.run_folder import ProcessFailure

Line = Mapping[str, Any]
T = TypeVar("T")
SPLITS = ("validation", "test")
TEXT_SCORE = "bits_per_byte"
"""Followed wherever it is recorded: the one score of a text that can be compared across tokenizers."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """Contents of a run folder."""

    folder: Path
    recipe: Mapping[str, Any]
    """recipe.yaml, by section and key."""
    about: Mapping[str, Any]
    """run.json: processes, devices, batch, versions, command."""
    metrics: Sequence[Line]
    """Whole lines of metrics.jsonl, by rising step; of a step that was taken twice the later."""
    evaluations: Sequence[Line]
    """Lines of evaluations.jsonl; of a step after which several splits were scored, one line with the scores of all."""
    events: Sequence[ledger.Event]
    """Events of ledger.jsonl, the oldest first."""
    texts: Sequence[Line]
    """Lines of texts.jsonl, by rising step; of a step that was evaluated twice the later."""
    result: Mapping[str, Any]
    """result.json; empty if the run is not finished."""
    outcome: Mapping[str, Any]
    """outcome.json; empty if the run did not end by itself."""
    failure: ProcessFailure | None
    """Why the last start failed, where it did."""
    complaints: Sequence[str]
    """A sentence for each file that is broken, or missing though every run has it from its start."""

    @property
    def name(self) -> str:
        """The folder's name, as a heading or in a legend."""
        return printable(self.folder.resolve().name)

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The score that judges the run, without its split, and whether its best is `max` or `min`; None if not known."""
        match self.about.get("monitor"):
            case [str(name), ("max" | "min") as best]:
                return name, best
        return None

    @property
    def unit(self) -> str:
        """Unit that the run counts, as in `tokens_per_s` and `tokens_seen`; samples if its task has no unit of its own."""
        found = self.about.get("unit")
        return found if isinstance(found, str) else run_folder.UNIT

    @property
    def starts(self) -> list[ledger.Start]:
        """Starts of the run, the oldest first."""
        return [event for event in self.events if isinstance(event, ledger.Start)]

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one epoch: the training data without its incomplete last global batch; None if not known."""
        size, batch = self.starts[-1].training_samples if self.starts else None, self.about.get("global_batch_size")
        return size // batch * batch if size and isinstance(batch, int) and batch > 0 else None

    @property
    def training_s(self) -> dict[int, float]:
        """Seconds of training up to each logged step, over all starts, each of which counts its own from 0."""
        found, whole_s, before = dict[int, float](), 0.0, (0, 0.0)
        for line in self.metrics:
            if is_finite(line.get("training_s")) and is_finite(line.get("time")):
                start, own_s = sum(start.time <= line["time"] for start in self.starts), float(line["training_s"])
                whole_s += own_s - (before[1] if start == before[0] else 0.0)
                before, found[line["step"]] = (start, own_s), whole_s
        return found


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a mapping and of its sections, by `key` and `section.key`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= {f"{name}.{key}": it for key, it in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def is_run(folder: Path) -> bool:
    """Return whether a folder holds something that a run writes at its start."""
    names = (run_folder.RUN, run_folder.METRICS, run_folder.LEDGER)
    return any((folder / name).exists() for name in names)


def read(folder: Path) -> PastRun:
    """Return what is in `folder`. Raises RunFolderError if it is not a run folder, or its name is not UTF-8."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder: give that of a run (--run-dir, by default runs/<recipe>-<time>).")
    if not is_run(folder):
        raise RunFolderError(f"{folder} is not the folder of a run, or the run is still starting: it has no run.json.")
    complaints: list[str] = []

    def attempt(load: Callable[[Path], T], name: str, otherwise: T, *, optional: bool = False) -> T:
        try:
            return otherwise if optional and not (folder / name).exists() else load(folder / name)
        except RunFolderError as error:
            complaints.append(str(error))
            return otherwise

    def lines(path: Path, *texts: str) -> list[Line]:
        reader, found = Lines(path), []
        for number, _, values in reader:
            if is_count(values.get("step")) and all(isinstance(values.get(key), str) for key in texts):
                found.append(values)
            else:
                reader.leave_out(number, "it has no step, title and text" if texts else "it has no step")
        complaints.extend([reader.complaint] if reader.complaint else [])
        return sorted(found, key=lambda line: int(line["step"]))

    def events(_: Path) -> list[ledger.Event]:
        found, complaint = ledger.read(folder)
        complaints.extend([complaint] if complaint else [])
        return found

    none: list[Line] = []
    evaluations: dict[int, dict[str, Any]] = {}
    for line in attempt(lines, run_folder.EVALUATIONS, none, optional=True):
        evaluations.setdefault(line["step"], {}).update(line)
    texts = attempt(lambda path: lines(path, "title", "text"), run_folder.TEXTS, none, optional=True)
    return PastRun(
        folder=folder,
        recipe=attempt(read_yaml, run_folder.RECIPE, {}),
        about=attempt(run_folder.read_json, run_folder.RUN, {}),
        metrics=list({line["step"]: line for line in attempt(lines, run_folder.METRICS, none)}.values()),
        evaluations=list(evaluations.values()),
        texts=list({(line["step"], line["title"]): line for line in texts}.values()),
        events=attempt(events, run_folder.LEDGER, []),
        result=attempt(run_folder.read_json, run_folder.RESULT, {}, optional=True),
        outcome=attempt(run_folder.read_json, run_folder.OUTCOME, {}, optional=True),
        failure=run_folder.newest_failure(folder),
        complaints=complaints,
    )


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file that a run has written. Raises RunFolderError."""
    try:
        values = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} holds {type(values).__name__}, not keys with values.")
    return values


def find(places: Iterable[Path]) -> list[PastRun]:
    """Return the runs at these places, each a run folder or a folder of them, every run once. Others are named on stderr."""
    runs: dict[Path, PastRun] = {}
    for place in places:
        children = place.iterdir() if place.is_dir() and not is_run(place) else ()
        # run-2 before run-10
        order = {path: [part.zfill(20) for part in re.split(r"(\d+)", path.name)] for path in children if is_run(path)}
        for folder in sorted(order, key=order.__getitem__) or [place]:
            try:
                runs.setdefault(folder.resolve(), read(folder))
            except RunFolderError as error:
                say(str(error))
    return list(runs.values())


def say(text: str) -> None:
    """Write a sentence to stderr."""
    sys.stderr.write(f"samerun: {printable(text)}\n")


def print_text(text: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{printable(text)}\n")


def quantities(runs: Iterable[PastRun]) -> list[str]:
    """Return the quantities followed over the course of the runs: the loss, the scores that judge them, bits per byte."""
    runs = list(runs)
    recorded = {key for run in runs for line in run.evaluations for key in line}
    texts = [TEXT_SCORE] if any(f"{split}_{TEXT_SCORE}" in recorded for split in SPLITS) else []
    return list(dict.fromkeys(["loss", *(run.monitor[0] for run in runs if run.monitor), *texts]))


def scores(run: PastRun, line: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a line of evaluations or a result; the score that judges the run is first."""
    first = [f"{split}_{run.monitor[0]}" for split in SPLITS] if run.monitor else []
    keys = [key for key in dict.fromkeys([*first, *line]) if key.startswith(("validation_", "test_"))]
    return {key: line[key] for key in keys if is_finite(line.get(key)) and not key.endswith("_samples")}


def last_scores(run: PastRun) -> dict[str, float]:
    """Return the scores of the final weights, or else of the last evaluation."""
    return scores(run, run.result) or scores(run, run.evaluations[-1] if run.evaluations else {})


def words(key: str) -> str:
    """Return the name of a score in words: `test top5 accuracy`."""
    return printable(key.replace("_", " "))


def is_share(key: str, values: Iterable[float]) -> bool:
    """Return True if these values of a score are shown in per cent: an accuracy in 0..1."""
    return key.endswith("accuracy") and all(0.0 <= value <= 1.0 for value in values)


def value_text(key: str, value: float, values: Sequence[float] = ()) -> str:
    """Return the value of a score as text; `values` are all that are shown next to it."""
    if is_share(key, (value, *values)):
        return f"{100 * value:.2f} %"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def time_parts(spent: ledger.TimeSpent) -> dict[str, float | None]:
    """Return the seconds of each part of a run's time, by its name, and of the whole at the end; None: unknown."""
    return {
        "queue": spent.queue_s,
        "start-up": spent.startup_s,
        "compute": spent.compute_s,
        "data wait": spent.data_wait_s,
        "evaluation": spent.evaluation_s,
        "saving": spent.saving_s,
        "lost work": spent.lost_work_s,
        "between attempts": spent.down_s,
        "other": spent.other_s,
        "whole time": spent.wall_s,
    }


PATIENCE_S = 300.0
"""A run without a new line for longer is silent; ten times the usual time between two lines if that is more."""


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a run."""

    word: str
    """`finished`, `stopped`, `failed`, `starting`, `running`, `silent` or `unknown`."""
    sentence: str
    """Details, as a sentence without its full stop."""
    since: float | None
    """When the last file of the run was written to, in Unix seconds, as the lines in them tell."""
    step: int
    """Steps that are done, by the lines of the files."""
    total_steps: int | None
    is_over: bool
    """True if the run has ended and is not restarted automatically."""


def state_of(run: PastRun, now: float) -> State:
    """Return the state of a run at the time `now`, in Unix seconds."""
    lines = [*run.metrics, *run.evaluations]
    known = [*(start.total_steps for start in run.starts[-1:]), run.outcome.get("total_steps"), run.result.get("steps")]
    since = max(_times([*lines, run.outcome]) + [event.time for event in [*run.events, run.failure] if event], default=None)
    if since is None:
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # run.json comes before the first line
            since = datetime.fromisoformat(run.about["started"]).timestamp()
    word, sentence, is_over = _judged(run, None if since is None else now - since)
    return State(
        word=word,
        sentence=sentence,
        since=since,
        step=max([line["step"] for line in lines] + [ledger.last_step(event) for event in run.events] + [0]),
        total_steps=next((total for total in known if isinstance(total, int)), None),
        is_over=is_over,
    )


def _judged(run: PastRun, silent_s: float | None) -> tuple[str, str, bool]:
    """Return the word, the sentence, and whether the run is over; `silent_s`: seconds since the last line, if there is one."""
    outcome, reason = run.outcome.get("outcome"), run.outcome.get("reason")
    because = f", because {reason}" if reason else ""
    last_event = run.events[-1] if run.events else None
    if isinstance(last_event, ledger.End):
        outcome = outcome or last_event.outcome
    if outcome == "finished" or (run.result and not run.events):
        early = run.result.get("stopped_early_because")
        return "finished", f"before its last step, because {early}" if early else "all steps are done", True
    if run.failure and not run.outcome:
        return "failed", f"{run.failure}" + (f": {run.failure.error}" if run.failure.error else ""), False
    if outcome == "stopped":
        again = bool(run.outcome.get("go_on"))
        # A start that resumes the run removes the outcome before its first line: then this is the end of the start before it.
        is_over = bool(run.outcome) and not again
        return "stopped", f"after saving{because}{'; it is restarted automatically' if again else ''}", is_over
    if silent_s is None:
        return "unknown", "no line has a time", False
    if silent_s <= PATIENCE_S and (isinstance(last_event, ledger.Start) or not (run.events or run.metrics)):
        return "starting", f"for {duration(silent_s)}, no step is logged yet", False
    times = _times(run.metrics[-50:])
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if silent_s <= max(PATIENCE_S, 10 * statistics.median(gaps or [0.0])):
        return "running", f"the last line is {duration(silent_s)} old", False
    return "silent", f"no line for {duration(silent_s)}, and no end was recorded: killed, or hanging", False


def _times(lines: Sequence[Any]) -> list[float]:
    return [line["time"] for line in lines if is_finite(line.get("time"))]


def moment(time_s: float) -> str:
    """Return a moment (Unix seconds) as a date and time of this machine's zone."""
    return datetime.fromtimestamp(time_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
