"""A run as its trackers know it: its names there, and what they have of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import run_folder


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, at one of its starts."""

    folder: Path
    """The run folder."""
    project: str
    """What is learnt, by the recipe's name: runs to be compared are in one project (experiment)."""
    goes_on: bool
    """Whether this start goes on with a run that the trackers know."""
    first_step: int
    """Steps that were taken before."""
    logged: Mapping[str, int]
    """The last step that earlier starts wrote into each file of the run folder."""
    kept: Mapping[str, int]
    """The last step of each that is still there: what came after the checkpoint is taken again."""
    identity: str
    """The same at all starts of this run, and of no other run."""

    @property
    def name(self) -> str:
        """The run's name among those of its project."""
        return self.folder.resolve().name

    @property
    def known(self) -> dict[str, Any]:
        """What trackers.json says: the identity, and the names that trackers have given to the run."""
        return run_folder.read_json(self.folder / run_folder.TRACKERS)

    def remember(self, **names: str) -> None:
        """Keep names that a tracker has given to the run, for its next start."""
        run_folder.write_json(self.folder / run_folder.TRACKERS, {**self.known, **names})


def tracked(folder: Path, *, project: str, first_step: int, logged: Mapping[str, int]) -> Tracked:
    """Return the run of a folder that was opened to go on after `first_step` steps; `logged` is what it held before.

    A run that begins again, for it had no checkpoint, is a new one to its trackers.
    """
    place = folder / run_folder.TRACKERS
    goes_on = first_step > 0 and place.exists()
    if not goes_on:
        run_folder.write_json(place, {"identity": uuid.uuid4().hex[:12]})
    return Tracked(
        folder=folder,
        project=project,
        goes_on=goes_on,
        first_step=first_step,
        logged=logged if goes_on else {},
        kept=run_folder.last_steps(folder) if goes_on else {},
        identity=run_folder.read_json(place)["identity"],
    )
