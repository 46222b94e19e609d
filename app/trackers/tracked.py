"""A run as its trackers know it: its names there, and what they have of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app import run_folder


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, at one of its starts."""

    folder: Path
    """The run folder."""
    project: str
    """What is learnt, by the recipe's name: runs to be compared are in one project (experiment)."""
    first_step: int
    """Steps that were taken before, of which the run folder has the lines."""
    logged: Mapping[str, int]
    """The last step that earlier starts wrote into each file of the run folder."""
    kept: Mapping[str, int]
    """The last step of each that is still there: what came after the checkpoint is taken again."""
    known: Mapping[str, str]
    """The run's id in each tracker that has it from an earlier start."""

    @property
    def name(self) -> str:
        """The run's name among those of its project."""
        return self.folder.resolve().name

    def remember(self, tracker: str, identity: str) -> None:
        """Keep the id that the run has in a tracker, for the next start."""
        place = self.folder / run_folder.TRACKERS
        others = run_folder.read_json(place) if place.exists() else {}
        run_folder.write_json(place, {**others, tracker: identity})


def tracked(folder: Path, *, project: str, first_step: int, logged: Mapping[str, int]) -> Tracked:
    """Return the run of a folder that was opened to go on after `first_step` steps; `logged` is what it held before.

    A run that begins again, for it had no checkpoint, is a new one to its trackers.
    """
    place = folder / run_folder.TRACKERS
    if first_step == 0:
        place.unlink(missing_ok=True)
    known = run_folder.read_json(place) if place.exists() else {}
    kept = run_folder.last_steps(folder)
    return Tracked(folder=folder, project=project, first_step=first_step, logged=logged, kept=kept, known=known)
