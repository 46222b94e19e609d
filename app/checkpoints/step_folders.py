"""Checkpoints on disk: checksummed folders RUN/checkpoints/step-00000120 that appear whole or not at all.

    rank-00000.safetensors ...  the pieces that each rank wrote: tensors named `key/parameter-name@start`
    buffers.safetensors         the model's buffers, whole, by name
    state.json                  the state of the run that is no tensor
    manifest.json               size and SHA-256 of each file, and of each tensor its shape, dtype and which ranges are where
    RUN/frozen/SHA256.safetensors   the parameters that are not trained: one file for all checkpoints, which name it

Nothing in them depends on how many ranks wrote them or how tensors were cut: whatever is asked for is put together from the
ranges that hold it. The steps of a save, of which a kill at any moment leaves the older checkpoints as they are:

    begin          one process; an empty folder in the place of the start (app/record/claim.py), with which it goes after a kill
    write_pieces   every rank, once begin has returned
    commit         one process, once all ranks have written; checks the whole, renames the folder to its name
    prune          one process; removes old ones
    discard        one process, instead of commit, if a rank could not write

Whatever a disk does on the way is a CheckpointError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.checkpoints import durable, manifest, tensor_file
from app.checkpoints.durable import Stamp, check, check_size, telling, write_bytes
from app.checkpoints.manifest import FileEntry, Range, Stored, tensor_name
from app.checkpoints.piece import AVERAGE, FROZEN, WEIGHT, Piece
from app.checkpoints.tensor_file import Content, TensorFile, dtype_of, write_tensors
from app.errors import CheckpointError
from app.files import regular
from app.files.whole import sync
from app.initial.region import Region
from app.record.claim import Claim

if TYPE_CHECKING:
    import torch

FOLDER, STATE, BUFFERS = "checkpoints", "state.json", "buffers.safetensors"


# Writing ---------------------------------------------------------------------------------------------------------------------


def path_of(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint once it is committed."""
    return run_dir / FOLDER / f"step-{step:08d}"


def temporary_of(claim: Claim, step: int) -> Path:
    """Return the folder that the ranks write a step's checkpoint into."""
    return claim.place / f"step-{step:08d}"


def begin(claim: Claim, step: int) -> Path:
    """Return the new, empty temporary folder. Raises CheckpointError."""
    folder = temporary_of(claim, step)
    with telling(folder, "written"):
        (claim.path / FOLDER).mkdir(exist_ok=True)
        if folder.exists():  # of a save that failed
            claim.take_away(folder)
        folder.mkdir()
        sync(claim.path)
    return folder


def write_pieces(
    folder: Path, rank: int, pieces: Sequence[Piece], *, on_chunk: Callable[[], object] = lambda: None
) -> FileEntry:
    """Write what this rank owns, which may be nothing, into the temporary folder. Raises CheckpointError.

    Needs no memory of the size of the pieces: they are copied to the CPU and written in chunks of durable.CHUNK_BYTES, for
    each of which `on_chunk` is called.
    """
    file = f"rank-{rank:05d}.safetensors"
    assert all("/" not in piece.key and piece.values.shape == (piece.region.count,) for piece in pieces)
    held = [piece for piece in pieces if piece.values.numel()]
    named = [(tensor_name(piece.key, piece.name, piece.region.start), piece.values) for piece in held]
    stamp = write_tensors(folder / file, named, on_chunk=on_chunk)
    return FileEntry(file, stamp, tuple(_range_of(piece) for piece in pieces))


def write_frozen(claim: Claim, contents: Mapping[str, Content]) -> FileEntry:
    """Write the parameters that are not trained, whole, beside the checkpoints, under the name of their digest.

    Raises CheckpointError. The same tensors in the same order give the same file.
    """
    made = claim.place / "frozen.safetensors"
    flat = {tensor_name(FROZEN, name, 0): Content(it.dtype, (prod(it.shape),), it.chunks) for name, it in contents.items()}
    stamp = tensor_file.write(made, flat)
    final = claim.path / FROZEN / f"{stamp.sha256}.safetensors"
    with telling(final, "written"):
        final.parent.mkdir(exist_ok=True)
        claim.put(made, final)
        sync(claim.path)
    ranges = (Range(FROZEN, name, it.shape, it.dtype, Region.flat(0, prod(it.shape))) for name, it in contents.items())
    return FileEntry(f"{FROZEN}/{final.name}", stamp, tuple(ranges))


def place_of(folder: Path, file: str, run_dir: Path | None = None) -> Path:
    """Return where a file is that the manifest of a checkpoint names: in its folder or, for all checkpoints, in the run's.

    `run_dir` is that; None: the checkpoint lies where it belongs.
    """
    return (run_dir or folder.resolve().parents[1]) / file if file.startswith(f"{FROZEN}/") else folder / file


def _range_of(piece: Piece) -> Range:
    return Range(piece.key, piece.name, tuple(piece.shape), dtype_of(piece.name, piece.values), piece.region)


def commit(
    claim: Claim,
    step: int,
    entries: Sequence[FileEntry],
    *,
    state: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    frozen: FileEntry | None = None,
) -> Path:
    """Make a checkpoint of what all ranks wrote and return its folder. `state` is what JSON can hold.

    `frozen` is what `write_frozen` returned, if some parameters are not trained.

    Raises CheckpointError as `complete` does. A checkpoint of the same step, from before a resume, is replaced; a kill in the
    instant between the two renames leaves neither under its name.
    """
    folder, final = complete(claim, step, entries, state=state, buffers=buffers, frozen=frozen), path_of(claim.path, step)
    with telling(final, "written"):
        claim.put(folder, final)
    return final


def complete(
    claim: Claim,
    step: int,
    entries: Sequence[FileEntry],
    *,
    state: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    frozen: FileEntry | None = None,
) -> Path:
    """Make the temporary folder one that can be read, of what all ranks wrote, and return it.

    Raises CheckpointError if the ranks' ranges do not cover every tensor exactly once, if a rank's file is not where this
    process looks, or if the disk refuses.
    """
    folder, final = temporary_of(claim, step), path_of(claim.path, step)
    shared = [frozen] if frozen else []
    tensors = manifest.put_together(final, [*entries, *shared])
    for entry in entries:
        _check_arrived(folder / entry.file, entry.stamp)
    stamps = {entry.file: entry.stamp for entry in (*entries, *shared)}
    stamps[BUFFERS] = write_tensors(folder / BUFFERS, list(buffers.items()))
    stamps[STATE] = write_bytes(folder / STATE, json.dumps(state, indent=2).encode() + b"\n")
    write_bytes(folder / manifest.MANIFEST, manifest.to_bytes(stamps, tensors))
    with telling(final, "written"):
        sync(folder)
    return folder


def _check_arrived(path: Path, stamp: Stamp) -> None:
    try:
        check_size(path, stamp)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} differs from what its rank has just written: the run folder must be on a file system that all nodes share."
        ) from error


def discard(claim: Claim, folder: Path) -> None:
    """Remove a checkpoint or a temporary folder; a kill half-way leaves nothing under its name. Raises CheckpointError."""
    with telling(folder, "removed"):
        if folder.exists():
            claim.take_away(folder)


def prune(claim: Claim, latest: Path, *, keep_last: int, keep_step: int | None = None) -> None:
    """Keep the checkpoint just committed and the keep_last - 1 before it, and that of `keep_step`; remove the other older ones.

    One of a later step, left from before a resume further back, neither counts nor goes: it may be damaged, and counting it
    would remove the good ones. The run replaces it when it gets there. Raises CheckpointError.
    """
    assert keep_last >= 1
    older = [path for path in committed(latest.parent.parent) if _step(path) < _step(latest)]
    for path in older[keep_last - 1 :]:
        if _step(path) != keep_step:
            discard(claim, path)


# Reading ---------------------------------------------------------------------------------------------------------------------


def is_checkpoint(place: Path) -> bool:
    """Whether a path is that of a checkpoint, damaged or not, and not that of a run folder."""
    return place.parent.name == FOLDER or (place / manifest.MANIFEST).exists()


def committed(run_dir: Path) -> list[Path]:
    """Return the folders of the run's checkpoints, newest first, damaged or not. Raises CheckpointError."""
    with telling(run_dir / FOLDER, "read"):
        found = list((run_dir / FOLDER).iterdir()) if (run_dir / FOLDER).exists() else []
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies, or None, and for each newer one a sentence that says why it does not."""
    problems: list[str] = []
    for path in committed(run_dir):
        try:
            verify(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return path, problems
    return None, problems


def verify(folder: Path, *, part: tuple[int, int] = (0, 1)) -> None:
    """Check that a checkpoint is what was written; raises CheckpointError, naming the file and what is wrong with it.

    With `part` (i, n) the manifest and every n-th file from the i-th: n ranks with i = 0 .. n-1 check the whole together.
    """
    stamps, _ = manifest.read(folder)
    index, count = part
    for file in sorted(stamps)[index::count]:
        check(place_of(folder, file), stamps[file])


class Reader:
    """One checkpoint, from which ranges of tensors are read as they are asked for; files are opened when first needed.

    It trusts the contents of the tensor files: `verify` is the check. Raises CheckpointError wherever it cannot read.
    """

    def __init__(self, folder: Path, *, run_dir: Path | None = None) -> None:
        """`run_dir` is that of a checkpoint which does not lie where it belongs."""
        self.folder, self._run_dir = folder, run_dir
        self._stamps, self._tensors = manifest.read(folder)
        self._frozen = self._tensors.pop(FROZEN, {})
        self._files: dict[str, TensorFile] = {}
        check(folder / STATE, self._stamps[STATE])
        with telling(folder / STATE, "read"):
            self.state: dict[str, Any] = json.loads(regular.content(folder / STATE))

    def keys(self) -> list[str]:
        """Return which tensors there are of trained parameters: "weight", "exp_avg", ..."""
        return sorted(self._tensors)

    @property
    def frozen(self) -> FileEntry | None:
        """The file of the parameters that are not trained, which may be of another start's run folder; None: all are."""
        found = {file for stored in self._frozen.values() for *_, file in stored.ranges}
        if not found:
            return None
        (file,) = found
        every = [(name, it, Region.flat(0, prod(it.shape))) for name, it in self._frozen.items()]
        ranges = [Range(FROZEN, name, it.shape, it.dtype, region) for name, it, region in every]
        return FileEntry(file, self._stamps[file], tuple(ranges))

    def finished_key(self) -> str:
        """Return the key of the weights that a finished run would leave: the averaged ones if there are such."""
        return AVERAGE if AVERAGE in self._tensors else WEIGHT

    def shapes(self, key: str = WEIGHT) -> dict[str, tuple[int, ...]]:
        """Return the shape of the tensor `key` of each parameter that has one; frozen ones have weights, which are averages."""
        return {name: stored.shape for name, stored in self._of(key).items()}

    def dtypes(self, key: str = WEIGHT) -> dict[str, str]:
        """Return the types of the same, as safetensors names them."""
        return {name: stored.dtype for name, stored in self._of(key).items()}

    def _of(self, key: str) -> dict[str, Stored]:
        return {**self._tensors.get(key, {}), **(self._frozen if key in (WEIGHT, AVERAGE) else {})}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers, by name, on the CPU."""
        file = self._file(BUFFERS)
        return {name: file.tensor(name) for name in file.shapes}

    def contents(self, key: str) -> dict[str, Content]:
        """Return the tensors `key` of all parameters, whole, and the buffers: what `tensor_file.write` makes one file of."""
        buffers = self._file(BUFFERS)
        return {
            name: Content(stored.dtype, stored.shape, self._chunks(key, name, stored)) for name, stored in self._of(key).items()
        } | {
            name: Content(buffers.dtypes[name], shape, buffers.chunks(name, 0, prod(shape)))
            for name, shape in buffers.shapes.items()
        }

    def _chunks(self, key: str, name: str, stored: Stored) -> Iterator[bytearray]:
        if all(region.runs == 1 for region, _ in stored.ranges):
            for region, file in stored.ranges:
                yield from self._file(file).chunks(self._name(key, name, region.start), 0, region.count)
            return
        size = tensor_file.item_bytes(stored.dtype)
        for wanted in Region.flat(0, prod(stored.shape)).pieces(durable.CHUNK_BYTES // size):
            chunk = bytearray(wanted.count * size)
            for region, file in stored.near(wanted):
                self._file(file).bytes_into(self._name(key, name, region.start), chunk, wanted, region)
            yield chunk

    def _name(self, key: str, name: str, start: int) -> str:
        return tensor_name(FROZEN if name in self._frozen else key, name, start)

    def read_into(self, piece: Piece) -> None:
        """Fill `piece.values` with its elements, converted to their dtype and device."""
        stored = self._find(piece)
        for region, file in stored.near(piece.region):
            self._file(file).read_into(self._name(piece.key, piece.name, region.start), piece.values, piece.region, region)

    def _find(self, piece: Piece) -> Stored:
        names = self._of(piece.key)
        if not names:
            raise CheckpointError(f"{self.folder} has no {piece.key!r} for any parameter; it has {', '.join(self._tensors)}.")
        stored = names.get(piece.name)
        if stored is None:
            raise CheckpointError(
                f"{self.folder} has no {piece.key!r} for {piece.name}, but for {len(names)} other parameters."
            )
        if stored.shape != tuple(piece.shape):
            raise CheckpointError(
                f"{piece.name} has the shape {tuple(piece.shape)} in this run's model and {stored.shape} in "
                f"{self.folder}: the checkpoint belongs to another model."
            )
        assert piece.values.shape == (piece.region.count,), piece.name
        assert 0 <= piece.region.start <= piece.region.end <= prod(stored.shape), piece.name
        return stored

    def _file(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(place_of(self.folder, file, self._run_dir))
        return self._files[file]
