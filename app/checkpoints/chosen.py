"""Which checkpoint a command means by a path: itself, or of a run folder the newest that is whole, or the best."""

from __future__ import annotations

import sys
from pathlib import Path

from app.checkpoints import step_folders as files
from app.checkpoints.step_folders import Reader
from app.errors import CheckpointError


def newest(place: Path) -> Path:
    """Return the checkpoint that a path names: itself, or of a run folder the newest that is whole. Raises CheckpointError.

    Says on stderr which are passed over, and why.
    """
    if files.is_checkpoint(place):
        files.verify(place)
        return place
    folder, damaged = files.newest(place)
    if folder is None:
        raise CheckpointError(
            "\n".join([*damaged, f"{place} is not a checkpoint and contains no complete checkpoint: give another path."])
        )
    for sentence in damaged:
        sys.stderr.write(f"passed over: {sentence}\n")
    return folder


def best(place: Path) -> Path:
    """Return the checkpoint of a run that had the best validation score, as its newest whole one knows.

    Raises CheckpointError if there is none, or it is damaged.
    """
    latest = newest(place)
    found = Reader(latest).state["best"]
    if found is None:
        raise CheckpointError(
            f"{latest} records no best checkpoint: the run had no checkpoint.keep_best=true, or no evaluation "
            "before this checkpoint. Leave --best out."
        )
    folder = files.path_of(latest.absolute().parents[1], found["step"])
    if not files.is_checkpoint(folder):
        raise CheckpointError(f"{folder}, the best checkpoint of {place}, no longer exists. Leave --best out.")
    files.verify(folder)
    return folder
