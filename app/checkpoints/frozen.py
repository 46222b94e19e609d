"""Parameters that are not trained: written once into the run folder, and named by their digest in each of its checkpoints.

So a checkpoint is as large as what is trained, and a run goes on with the frozen weights that it had, or not at all: the file
that it once began with may be gone or another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from app.checkpoints import step_folders as files
from app.checkpoints.durable import check
from app.checkpoints.manifest import FileEntry
from app.checkpoints.piece import WEIGHT, Piece
from app.checkpoints.step_folders import Reader
from app.errors import CheckpointError
from app.ranks.runtime import Runtime
from app.record.claim import Claim

_MOST_NAMED = 8


def settle(runtime: Runtime, claim: Claim, model: torch.nn.Module, resumed: Path | None) -> FileEntry | None:
    """Give the model, plain on the CPU of every rank, the frozen parameters of the checkpoint `resumed`, and keep them.

    Returns, on the main process, the file in the run folder that checkpoints are to name; None: all parameters are trained.
    Raises CheckpointError, on all ranks, if the checkpoint's run has frozen others, or they cannot be read or written.
    """
    held = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    with runtime.together():
        reader = Reader(resumed) if resumed else None
        if reader:
            _take_up(reader, held)
        return _kept(claim, reader, held) if held and runtime.is_main else None


def _take_up(reader: Reader, held: Mapping[str, torch.Tensor]) -> None:
    entry = reader.frozen
    before = {it.name: it.shape for it in entry.ranges} if entry else {}
    now = {name: tuple(parameter.shape) for name, parameter in held.items()}
    differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if differing:
        shown = ", ".join(differing[:_MOST_NAMED]) + (", ..." if len(differing) > _MOST_NAMED else "")
        raise CheckpointError(
            f"{reader.folder} is of a run that froze {len(before)} parameters, and this one freezes {len(now)}; of one are "
            f"{shown} alone. Freeze what it froze (train.freeze, or the task's model), or begin anew in another --run-dir."
        )
    for name, parameter in held.items():
        reader.read_into(Piece(WEIGHT, name, now[name], 0, parameter.detach().view(-1)))


def _kept(claim: Claim, reader: Reader | None, held: Mapping[str, torch.Tensor]) -> FileEntry:
    """Return the file of the frozen parameters in the claimed run folder, after it is written if it is not there."""
    entry = reader.frozen if reader else None
    if reader and entry and (there := claim.path / entry.file).exists():
        if not there.samefile(files.place_of(reader.folder, entry.file)):  # which was checked when the checkpoint was found
            check(there, entry.stamp)
        return entry
    return files.write_frozen(claim, held)
