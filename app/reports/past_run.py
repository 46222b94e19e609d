"""Reads a run from its folder: finished, running, killed, or copied from another machine with files missing or truncated.

What cannot be read becomes a sentence among the complaints, and everything else is still there. Imports neither torch nor
the data of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from app.errors import RunFolderError
from app.files import regular
from app.files.lines import Lines, is_count
from app.record import ledger, run_folder

Line = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """What a run folder holds. Files that every run has from its start, and that are missing or broken, are complained of."""

    folder: Path
    recipe: Mapping[str, Any]
    """recipe.yaml, by section and key."""
    preset: Mapping[str, Any]
    """preset.yaml; empty where the command line named none."""
    about: Mapping[str, Any]
    """run.json: processes, devices, batch, versions, command."""
    metrics: Sequence[Line]
    """The whole lines of metrics.jsonl, by rising step; of a step that was taken twice the later."""
    evaluations: Sequence[Line]
    """Those of evaluations.jsonl; of a step after which several splits were scored, one line with the scores of all."""
    events: Sequence[ledger.Event]
    """Those of ledger.jsonl, the oldest first."""
    texts: Sequence[Line]
    """Those of texts.jsonl, by rising step; of a step that was evaluated twice the later."""
    result: Mapping[str, Any]
    """result.json; empty if the run is not finished."""
    outcome: Mapping[str, Any]
    """outcome.json; empty if the run did not end by itself."""
    complaints: Sequence[str]
    """A sentence for each file that is missing or broken."""

    @property
    def name(self) -> str:
        """The folder's name, as a heading or in a legend."""
        return self.folder.resolve().name

    @property
    def monitor(self) -> tuple[str, str] | None:
        """The score by which the run is judged, of any split, and whether its best is `max` or `min`.

        None if run.json does not tell.
        """
        return run_folder.monitor(self.about)

    @property
    def unit(self) -> str:
        """What it counts, as in `tokens_per_s` and `tokens_seen`; samples, where its task has no unit of its own."""
        return run_folder.unit(self.about)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, as its last start knew them; None if no start is recorded."""
        return next((event.total_steps for event in reversed(self.events) if isinstance(event, ledger.Start)), None)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that one pass takes: the training data without its incomplete last global batch; None if not known."""
        size = next((event.training_samples for event in reversed(self.events) if isinstance(event, ledger.Start)), None)
        batch = self.about.get("global_batch_size")
        return size // batch * batch if size and isinstance(batch, int) and batch > 0 else None


def flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return nested values by `section.key`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{section}{key}.") if isinstance(value, Mapping) else {f"{section}{key}": value}
    return found


def is_run(folder: Path) -> bool:
    """Return whether a folder holds something that a run writes at its start."""
    names = (run_folder.RUN, run_folder.METRICS, run_folder.RECIPE, run_folder.LEDGER)
    return any((folder / name).exists() for name in names)


def read(folder: Path) -> PastRun:
    """Return what is in `folder`. Raises RunFolderError if it is not a folder, or not a run's, or its name is no text."""
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder: give that of a run (--run-dir, by default runs/<recipe>-<time>).")
    if not is_run(folder):
        raise RunFolderError(f"{folder} is not the folder of a run: it has none of the files that a run writes at its start.")
    run_folder.check_name(folder)
    complaints: list[str] = []

    def attempt(load: Callable[[], T], otherwise: T) -> T:
        try:
            return load()
        except RunFolderError as error:
            complaints.append(str(error))
            return otherwise

    def optional(name: str) -> Mapping[str, Any]:
        path = folder / name
        return attempt(lambda: run_folder.read_json(path), {}) if path.exists() else {}

    preset = folder / run_folder.PRESET
    return PastRun(
        folder=folder,
        recipe=attempt(lambda: _yaml(folder / run_folder.RECIPE), {}),
        preset=attempt(lambda: _yaml(preset), {}) if preset.exists() else {},
        about=attempt(lambda: run_folder.read_json(folder / run_folder.RUN), {}),
        metrics=_lines(folder / run_folder.METRICS, complaints),
        evaluations=_lines(folder / run_folder.EVALUATIONS, complaints, optional=True),
        texts=_texts(folder / run_folder.TEXTS, complaints),
        events=_events(folder, complaints),
        result=optional(run_folder.RESULT),
        outcome=optional(run_folder.OUTCOME),
        complaints=complaints,
    )


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(regular.content(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise RunFolderError(f"{path} holds {type(values).__name__}, not keys with values.")
    return values


def _lines(path: Path, complaints: list[str], *, optional: bool = False) -> list[Line]:
    """The whole lines of a JSONL file, sorted by step; the broken ones are counted in one complaint."""
    if optional and not path.exists():
        return []
    lines = Lines(path)
    by_step: dict[int, Line] = {}
    try:
        for number, _, values in lines:
            if is_count(values.get("step")):
                by_step[values["step"]] = {**by_step.get(values["step"], {}), **values} if optional else values
            else:
                lines.leave_out(number, "it has no step")
    except RunFolderError as error:
        complaints.append(str(error))
    complaints += [lines.complaint] if lines.complaint else []
    return [by_step[step] for step in sorted(by_step)]


def _texts(path: Path, complaints: list[str]) -> list[Line]:
    if not path.exists():
        return []
    lines = Lines(path)
    found: dict[tuple[int, str], Line] = {}
    try:
        for number, _, values in lines:
            if is_count(values.get("step")) and all(isinstance(values.get(key), str) for key in ("title", "text")):
                found[values["step"], values["title"]] = values
            else:
                lines.leave_out(number, "it has no step, title and text")
    except RunFolderError as error:
        complaints.append(str(error))
    complaints += [lines.complaint] if lines.complaint else []
    return sorted(found.values(), key=lambda line: int(line["step"]))


def _events(folder: Path, complaints: list[str]) -> list[ledger.Event]:
    try:
        events, complaint = ledger.read(folder)
    except RunFolderError as error:
        events, complaint = [], str(error)
    complaints += [complaint] if complaint else []
    return events
