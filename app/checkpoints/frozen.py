"""Frozen parameters: written once into the run folder; each checkpoint names that file by its digest.

So a checkpoint is as large as what is trained, and a run goes on with the frozen weights that it had, or not at all: the file
that it once began with may be gone or another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.durable import check
from app.checkpoints.manifest import FileEntry
from app.checkpoints.piece import WEIGHT, Piece
from app.checkpoints.step_folders import Reader
from app.checkpoints.tensor_file import Content
from app.errors import CheckpointError
from app.initial import held
from app.initial.held import Held
from app.initial.region import Region
from app.ranks.runtime import Runtime
from app.record.claim import Claim

_MOST_NAMED = 8


def settle(runtime: Runtime, claim: Claim, model: torch.nn.Module, resumed: Path | None) -> FileEntry | None:
    """Give the model, not prepared yet, the frozen parameters of the checkpoint `resumed`, and keep them.

    Returns, on the main process, the file in the run folder that checkpoints are to name; None: all parameters are trained.
    Raises CheckpointError, on all ranks, if the checkpoint's run has frozen others, or they cannot be read or written.
    """
    kept = held.held(model)
    names = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    frozen = {name: kept[name] for name in sorted(names, key=lambda name: -kept[name].dtype.itemsize)}  # as a file has them
    with runtime.together():
        reader = Reader(resumed) if resumed else None
        if reader:
            _take_up(reader, frozen)
    if not frozen:
        return None
    with runtime.together():
        there = _there(claim, reader) if runtime.is_main and reader else None
    if runtime.from_main(there is not None):
        return there
    with runtime.together():
        whole = _whole(runtime, model, frozen.values())
        try:
            return files.write_frozen(claim, _contents(frozen, whole)) if runtime.is_main else None
        finally:
            for _ in whole:  # what the disk has refused: the other ranks wait with their shares of it
                pass


def _take_up(reader: Reader, frozen: Mapping[str, Held]) -> None:
    entry = reader.frozen
    before = {it.name: it.shape for it in entry.ranges} if entry else {}
    now = {name: it.shape for name, it in frozen.items()}
    differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if differing:
        shown = ", ".join(differing[:_MOST_NAMED]) + (", ..." if len(differing) > _MOST_NAMED else "")
        raise CheckpointError(
            f"{reader.folder} belongs to a run that froze {len(before)} parameters, and this run freezes "
            f"{len(now)}; only one of them freezes {shown}. Freeze the same parameters (train.freeze, or the "
            "task's model), or start a new run in another --run-dir."
        )
    for name, it in frozen.items():
        reader.read_into(Piece(WEIGHT, name, it.shape, it.region, it.values))


def _there(claim: Claim, reader: Reader) -> FileEntry | None:
    """Return the file of the checkpoint's frozen parameters if the claimed run folder has it."""
    entry = reader.frozen
    if entry is None or not (there := claim.path / entry.file).exists():
        return None
    if not there.samefile(files.place_of(reader.folder, entry.file)):  # which was checked when the checkpoint was found
        check(there, entry.stamp)
    return entry


def _whole(runtime: Runtime, model: torch.nn.Module, frozen: Iterable[Held]) -> Iterator[torch.Tensor]:
    """Yield the parameters, 1-D, one after the other, on all ranks: each has the whole of one at a time."""
    is_divided = held.is_divided(model)
    for it in frozen:
        yield _joined(it, runtime.gather((it.region, it.values.cpu()) if it.copy == 0 else None)) if is_divided else it.values


def _joined(it: Held, parts: Iterable[tuple[Region, torch.Tensor] | None]) -> torch.Tensor:
    whole = torch.empty(prod(it.shape), dtype=it.dtype)
    for region, values in filter(None, parts):
        region.rows(whole).copy_(values.view(region.runs, region.run))
    return whole


def _contents(frozen: Mapping[str, Held], whole: Iterator[torch.Tensor]) -> dict[str, Content]:
    """What is to be written; it must be taken in this order."""
    return {name: Content(tensor_file.dtype_of(name, it.values), it.shape, _next(whole)) for name, it in frozen.items()}


def _next(whole: Iterator[torch.Tensor]) -> Iterator[memoryview]:
    yield from tensor_file.chunks(next(whole))
