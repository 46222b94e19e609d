"""A run as its trackers know it: its ids there, and the lines that they already have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import RunFolderError
from app.runs import run_folder
from app.runs.claim import Claim


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, at one of its starts."""

    claim: Claim
    """What writes into the run folder."""
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
    scores: Sequence[str]
    """Those that trackers may show beside the settings of the run."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.claim.path

    @property
    def name(self) -> str:
        """The run's name among those of its project."""
        return self.folder.resolve().name

    def remember(self, tracker: str, identity: str) -> None:
        """Keep the id that the run has in a tracker, for the next start."""
        self.claim.write_json(run_folder.TRACKERS, {**_known(self.folder), tracker: identity})


def _known(folder: Path) -> dict[str, str]:
    """The run's ids, as far as the file can be read: a run whose ids are lost is a new one to its trackers."""
    place = folder / run_folder.TRACKERS
    try:
        known = run_folder.read_json(place) if place.exists() else {}
    except RunFolderError as error:
        print(f"note: {error} Its trackers will show it as a new run.", flush=True)  # noqa: T201 - the user must know
        return {}
    return {name: identity for name, identity in known.items() if isinstance(identity, str)}


def tracked(claim: Claim, *, project: str, first_step: int, logged: Mapping[str, int], scores: Sequence[str] = ()) -> Tracked:
    """Return the run of a folder that was opened to go on after `first_step` steps; `logged` is what it held before.

    A run that begins again, for it had no checkpoint, is a new one to its trackers.
    """
    if first_step == 0:
        claim.remove(run_folder.TRACKERS)
    kept = run_folder.last_steps(claim.path)
    known = _known(claim.path)
    return Tracked(claim=claim, project=project, first_step=first_step, logged=logged, kept=kept, known=known, scores=scores)
