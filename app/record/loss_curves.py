"""What a run did, step by step, read from its run folder, and how two runs differ.

Nothing is taken on trust: a run that was not the one asked for, or a step that is missing, repeated or out of order, is an
error, so that no comparison passes for want of something to compare. Imports neither torch nor rich.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.files.lines import Lines
from app.record import run_folder


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    preset: str
    """Name of a shipped preset, or path of one."""
    processes: int
    accumulation: int
    """Forward passes of each process in one optimizer step."""

    def __str__(self) -> str:
        return f"{Path(self.preset).stem}-{self.processes}x{self.accumulation}"


@dataclass(frozen=True)
class LossCurve:
    """What a run did, by step; index 0 is step 1."""

    losses: tuple[float, ...]
    """Mean loss over the global batch."""
    learning_rates: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]
    """Sample numbers in order."""


@dataclass(frozen=True)
class CurveDifference:
    """How a curve differs from the reference. Steps count from 1."""

    largest_difference: float
    """Largest |loss - reference| / |reference|; infinite if a loss is not finite."""
    at_step: int
    """The step where it is, the first of them."""
    learning_rates_differ_at: int | None
    """First step with another learning rate; None: all are equal."""
    samples_differ_at: int | None
    """First step with other samples, or another order; None: all are equal."""

    def is_same(self, tolerance: float) -> bool:
        """Whether this is the same run, to a relative `tolerance` of the loss."""
        exact = self.learning_rates_differ_at is None and self.samples_differ_at is None
        return exact and self.largest_difference <= tolerance


def read_curve(run_dir: Path, case: Variant, *, steps: int) -> LossCurve:
    """Return what the finished run in `run_dir` did in steps 1 to `steps`.

    Raises RunFolderError if it was not the run that `case` asked for, or if a step is missing, repeated or out of order.
    """
    run, result = run_folder.read_json(run_dir / run_folder.RUN), run_folder.read_json(run_dir / run_folder.RESULT)
    found = {"processes": run.get("world_size"), "accumulation": run.get("accumulation"), "preset": run.get("preset")}
    wanted = {"processes": case.processes, "accumulation": case.accumulation, "preset": Path(case.preset).stem}
    if found != wanted:
        raise RunFolderError(f"{run_dir / run_folder.RUN} says that {found} ran, where {wanted} was asked for")
    if result.get("steps") != steps:
        raise RunFolderError(f"{run_dir / run_folder.RESULT} says {result.get('steps')} steps, where {steps} were asked for")
    metrics = _read_steps(run_dir / run_folder.METRICS, ("loss", "learning_rate"), steps=steps)
    samples = _read_steps(run_dir / run_folder.SAMPLES, ("samples",), steps=steps)
    return LossCurve(
        losses=tuple(float(line["loss"]) for line in metrics),
        learning_rates=tuple(float(line["learning_rate"]) for line in metrics),
        samples=tuple(tuple(line["samples"]) for line in samples),
    )


def _read_steps(path: Path, keys: Iterable[str], *, steps: int) -> list[dict[str, Any]]:
    """The lines of a JSONL file, which must be those of steps 1 to `steps`, each with something under all `keys`."""
    reader = Lines(path)
    lines = [values for *_, values in reader]
    if reader.complaint:
        raise RunFolderError(reader.complaint)
    try:
        found = [line["step"] for line in lines if all(line[key] not in (None, []) for key in keys)]
    except KeyError as error:
        raise RunFolderError(f"{path} is broken: a line has no {error}") from error
    if steps < 1 or found != list(range(1, steps + 1)):
        raise RunFolderError(f"{path} has the steps {_shortened(found)}, where 1 to {steps} were expected")
    return lines


def _shortened(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:4]))} ... {steps[-1]}"


def compare(reference: LossCurve, curve: LossCurve) -> CurveDifference:
    """Compare two curves of the same, positive number of steps."""
    differences = relative_differences(reference.losses, curve.losses)
    at = max(range(len(differences)), key=differences.__getitem__)
    return CurveDifference(
        largest_difference=differences[at],
        at_step=at + 1,
        learning_rates_differ_at=_first_difference(reference.learning_rates, curve.learning_rates),
        samples_differ_at=_first_difference(reference.samples, curve.samples),
    )


def relative_differences(references: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Return each |loss - reference| / |reference|: infinite where a loss is not finite, or only the reference 0."""

    def difference(expected: float, found: float) -> float:
        if not (math.isfinite(expected) and math.isfinite(found)):
            return math.inf  # two that are not finite are not the same run either
        if expected == found:
            return 0.0
        return abs(found - expected) / abs(expected) if expected else math.inf

    return [difference(expected, found) for expected, found in zip(references, losses, strict=True)]


def _first_difference(expected: Sequence[object], found: Sequence[object]) -> int | None:
    pairs = enumerate(zip(expected, found, strict=True), start=1)
    return next((step for step, (one, other) in pairs if one != other), None)
