"""Checks before the start for what would end a run later. Used by `samerun launch`, its --dry-run, and `samerun submit`.

Standard library and PyYAML only. What the training alone can know, as whether a checkpoint is whole, is left to it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from app import options
from app.errors import CheckpointError, DataError, RunFolderError, SamerunError, TrackerError


def problems(
    training: argparse.Namespace,
    *,
    run_dir: str | None,
    resume: str | None,
    inputs: Mapping[str, str | None] = MappingProxyType({}),
) -> Iterator[SamerunError]:
    """Yield what the run would end with: how it is started is in `training`, but for its folder and --resume.

    `inputs` are the recipe's files and folders, as far as they must be on this machine.
    """
    try:
        options.trackers(training.trackers)
    except TrackerError as error:
        yield error
    yield from map(RunFolderError, unwritable([Path(run_dir)] if run_dir else []))
    holds_a_run = run_dir is not None and os.access(Path(run_dir, "recipe.yaml"), os.F_OK)
    if holds_a_run and resume != "auto":
        yield RunFolderError(
            f"--run-dir is {run_dir}, which already contains a run (it has a recipe.yaml): choose another, "
            "resume it with --resume auto, or delete the folder"
        )
    if resume not in (None, "auto", "never") and not Path(resume).is_dir():
        what = "that is a file" if Path(resume).exists() else "no such folder"
        yield CheckpointError(f"--resume is {resume}: {what}; give auto, never, or the path of a run folder or of a checkpoint")
    init_from = inputs.get("train.init_from")
    yield from map(DataError, missing({key: path for key, path in inputs.items() if key != "train.init_from"}))
    # A run that goes on does not read the weights that it began with, which may be gone since.
    if init_from and not holds_a_run and not os.access(os.path.expandvars(Path(init_from).expanduser()), os.F_OK):
        which = "give a file of weights, a run folder or a checkpoint, or torchvision:NAME"
        yield CheckpointError(f"train.init_from is {init_from}: there is no such file or folder; {which}")


def missing(inputs: Mapping[str, str | None]) -> Iterator[str]:
    """Yield which files and folders, by their keys, are not there, or may not be read, or have no path."""
    for key, path in inputs.items():
        if path is None:
            yield f"{key} is not given, and the recipe has no data without it: give {key}=PATH"
        elif not os.access(os.path.expandvars(Path(path).expanduser()), os.R_OK):
            yield f"{key} is {path!r}: no such file or folder, or you may not read it. Correct it"


def unwritable(folders: Sequence[Path]) -> Iterator[str]:
    """Yield which folders cannot be made and written; of a sweep, one for all that cannot be for one reason."""
    above = {
        next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK)): folder for folder in folders
    }
    for nearest, folder in above.items():
        if re.search("[\udc80-\udcff]", str(folder.absolute())):
            yield f"--run-dir is {os.fsencode(folder)!r}, in {os.fsencode(Path.cwd())!r}, which is not UTF-8: choose another"
        elif not nearest.is_dir():
            yield f"{folder} cannot be made, because {nearest} is a file: choose another --run-dir"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{folder} cannot be written, because you may not write to {nearest}: choose another --run-dir"
