"""Checkpoints on disk: checksummed folders RUN/checkpoints/step-00000120 that appear whole or not at all.

    rank-00000.safetensors ...  the pieces that each rank wrote: tensors named `key/parameter-name@start`
    buffers.safetensors         the model's buffers, whole, by name
    state.json                  the state of the run that is no tensor
    manifest.json               size and SHA-256 of each file, and of each tensor its shape, dtype and which ranges are where
    RUN/frozen/SHA256.safetensors   the parameters that are not trained: one file for all checkpoints, which name it

Nothing in them depends on how many ranks wrote them or how tensors were sharded: a range is read from the ranges that
contain it. The manifest:

    {"format": 1, "files": {FILE: {"bytes": ..., "sha256": ...}},
     "tensors": {KEY: {PARAMETER: {"shape": [...], "dtype": "F32", "ranges": [[START, STOP, FILE], ...]}}}, "sha256": ...}

In the file FILE the elements START to STOP - 1 of the flattened tensor are the tensor `KEY/PARAMETER@START`. Columns are ranges
[START, STOP, FILE, RUN, STRIDE]: of these elements the first RUN of every STRIDE. A manifest that has such is of format 2.

The steps of a save; a kill at any moment leaves the older checkpoints unchanged:

    begin          one process; an empty folder in the place of the start (app/runs/claim.py), removed with it after a kill
    write_pieces   every rank, once begin has returned
    commit         one process, once all ranks have written; checks the whole, renames the folder to its name
    prune          one process; removes old checkpoints
    discard        one process, instead of commit, if a rank could not write

Any error of the disk is a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from app.checkpoints import tensor_file
from app.checkpoints.tensor_file import Content, TensorFile, contents, dtype_of
from app.errors import CheckpointError, printable
from app.files.atomic_files import CHUNK_BYTES, Stamp, check_stamp, disk_errors, sync, write_chunks
from app.files.text_files import opened, parsed
from app.init.region import AVERAGE, WEIGHT, Piece, Region
from app.runs.claim import Claim

if TYPE_CHECKING:
    import torch

FOLDER = "checkpoints"
FORMAT, WITH_COLUMNS = 1, 2
MANIFEST, STATE, BUFFERS = "manifest.json", "state.json", "buffers.safetensors"
FROZEN = "frozen"
"""The key of parameters that are not trained, and the folder of their file."""


@dataclass(frozen=True)
class TensorEntry:
    """The location of a tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Safetensors' name of the dtype."""
    ranges: list[tuple[Region, str]]
    """Elements and file, sorted by the first element; in a manifest they cover each element once."""

    def problem(self) -> str | None:
        """Return the first problem of the ranges, if any."""
        size, count = prod(self.shape), 0
        open_yet: list[Region] = []  # which the next range can overlap
        for region, file in self.ranges:
            open_yet = [other for other in open_yet if other.end > region.start]
            for other in open_yet:
                if both := next(region.overlaps(other), None):
                    return f"elements {both.start} to {both.end - 1} are in two files, one of them {file}"
            open_yet.append(region)
            count += region.count
            if region.end > size:
                return f"it has {size} elements, and {file} has more"
        return f"{size - count} of its {size} elements are missing from all files" if count < size else None


Tensors = dict[str, dict[str, TensorEntry]]
"""The location of each tensor, by key and parameter name."""


@dataclass(frozen=True)
class FileEntry:
    """A file that a rank wrote; small, to be gathered from all ranks for `commit`."""

    file: str
    stamp: Stamp
    tensors: Tensors
    """The ranges of each tensor in the file."""


def tensor_name(key: str, name: str, start: int) -> str:
    """Return the name, inside a file, of the elements from `start` of a tensor."""
    return f"{key}/{name}@{start}"


def put_together(final: Path, entries: Sequence[FileEntry]) -> Tensors:
    """Return the location of each tensor of the checkpoint `final`, from the files of all ranks.

    Sorts, and then compares neighbors: n log n in the number of ranges. Raises CheckpointError if the ranges do not cover
    each tensor exactly once, or if ranks differ in a shape or dtype.
    """
    tensors: Tensors = {}
    for entry in entries:
        for key, name, part in each(entry.tensors):
            stored = tensors.setdefault(key, {}).setdefault(name, TensorEntry(part.shape, part.dtype, []))
            stored.ranges.extend(it for it in part.ranges if it[0].count)
            if (stored.shape, stored.dtype) != (part.shape, part.dtype):
                raise CheckpointError(
                    f"{final} cannot be written: {key} of {name} is {stored.dtype} {stored.shape} on one rank and "
                    f"{part.dtype} {part.shape} in {entry.file}. Earlier checkpoints are unchanged."
                )
    for key, name, stored in each(tensors):
        stored.ranges.sort(key=lambda part: (part[0].start, part[1]))
        if problem := stored.problem():
            raise CheckpointError(f"{final} cannot be written: {key} of {name}: {problem}. Earlier checkpoints are unchanged.")
    return tensors


def each(tensors: Tensors) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yield each tensor with its key and its name."""
    return ((key, name, stored) for key, names in tensors.items() for name, stored in names.items())


def to_bytes(stamps: Mapping[str, Stamp], tensors: Tensors) -> bytes:
    """Return the content of the manifest's file."""
    has_columns = any(region.runs > 1 for _, _, stored in each(tensors) for region, _ in stored.ranges)
    entries: dict[str, dict[str, Any]] = {}
    for key, name, it in each(tensors):
        ranges = [[at.start, at.end, file, *([] if at.runs == 1 else [at.run, at.stride])] for at, file in it.ranges]
        entries.setdefault(key, {})[name] = {"shape": it.shape, "dtype": it.dtype, "ranges": ranges}
    content = {
        "format": WITH_COLUMNS if has_columns else FORMAT,
        "files": {file: {"bytes": stamp.size_bytes, "sha256": stamp.sha256} for file, stamp in stamps.items()},
        "tensors": entries,
    }
    return _sealed(json.dumps(content).encode())


def _from_json(start: int, stop: int, file: str, run: int = 0, stride: int = 0) -> tuple[Region, str]:
    if not stride:
        return Region.flat(start, stop - start), file
    return Region.made(start, ((stop - start - run) // stride + 1) * run, run, stride), file


def _sealed(content: bytes) -> bytes:
    """Append the SHA-256 of a JSON object to it as its last entry, so that a change of any byte is found."""
    return content[:-1] + b', "sha256": "' + hashlib.sha256(content).hexdigest().encode() + b'"}\n'


_SEAL_BYTES = len(_sealed(b"{}")) - 1


def read_manifest(folder: Path) -> tuple[dict[str, Stamp], Tensors]:
    """Return the files of a checkpoint and the location of each tensor.

    Raises CheckpointError if the manifest is missing, has changed, is of another version, or names files elsewhere.
    """
    path = folder / MANIFEST
    with disk_errors(path, "read"):
        try:
            with opened(path) as file:
                raw = file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path} is missing: {folder} is not a usable checkpoint.") from None
    if raw != _sealed(raw[:-_SEAL_BYTES] + b"}"):
        raise CheckpointError(f"{path} is truncated or has changed since it was written, so its checkpoint cannot be used.")
    try:
        content = parsed(raw)
        if content["format"] not in (FORMAT, WITH_COLUMNS):
            raise ValueError(f"it has format {content['format']}, and this version reads formats {FORMAT} and {WITH_COLUMNS}")
        stamps = {file: Stamp(it["bytes"], it["sha256"]) for file, it in content["files"].items()}
        for file in stamps:
            inside = file.removeprefix(f"{FROZEN}/")
            if inside in ("", "..") or inside != PurePosixPath(inside).name:
                raise ValueError(f"it names {file!r}, which is not in its folder")
        tensors: Tensors = {}
        for key, names in content["tensors"].items():
            for name, it in names.items():
                ranges = sorted(_from_json(*part) for part in it["ranges"])
                stored = tensors.setdefault(key, {})[name] = TensorEntry(tuple(it["shape"]), it["dtype"], ranges)
                if problem := stored.problem():
                    raise ValueError(f"{key} of {name}: {problem}")
        unknown = {STATE, BUFFERS, *(file for *_, it in each(tensors) for _, file in it.ranges)} - stamps.keys()
        if unknown:
            raise ValueError(f"its list of files lacks {sorted(unknown)}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is not a manifest that this version reads: {why}. It cannot be used.") from error
    return stamps, tensors


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
    with disk_errors(folder, "written"):
        (claim.path / FOLDER).mkdir(exist_ok=True)
        if folder.exists():  # of a save that failed
            claim.take_away(folder)
        folder.mkdir()
        sync(claim.path)
    return folder


def write_pieces(
    folder: Path, rank: int, pieces: Sequence[Piece], *, on_chunk: Callable[[], object] = lambda: None
) -> FileEntry:
    """Write the pieces that this rank owns, possibly none, into the temporary folder. Raises CheckpointError.

    They are copied to the CPU and written in chunks of CHUNK_BYTES, before each of which `on_chunk` is called.
    """
    file = f"rank-{rank:05d}.safetensors"
    tensors: Tensors = {}
    written: dict[str, torch.Tensor] = {}
    for piece in pieces:
        inside = tensor_name(piece.key, piece.name, piece.region.start)
        assert "/" not in piece.key, inside
        assert piece.values.shape == (piece.region.count,), inside
        assert inside not in written, inside
        entry = TensorEntry(tuple(piece.shape), dtype_of(inside, piece.values), [])
        tensors.setdefault(piece.key, {}).setdefault(piece.name, entry).ranges.append((piece.region, file))
        if piece.region.count:
            written[inside] = piece.values
    return FileEntry(file, tensor_file.write(folder / file, contents(written, on_chunk=on_chunk)), tensors)


def write_frozen(claim: Claim, contents: Mapping[str, Content]) -> FileEntry:
    """Write the parameters that are not trained, whole, next to the checkpoints, under the name of their digest.

    Raises CheckpointError. The same tensors in the same order give the same file.
    """
    made = claim.place / "frozen.safetensors"
    flat = {tensor_name(FROZEN, name, 0): Content(it.dtype, (prod(it.shape),), it.chunks) for name, it in contents.items()}
    stamp = tensor_file.write(made, flat)
    final = claim.path / FROZEN / f"{stamp.sha256}.safetensors"
    with disk_errors(final, "written"):
        final.parent.mkdir(exist_ok=True)
        claim.put(made, final)
        sync(claim.path)
    file = f"{FROZEN}/{final.name}"
    tensors = {n: TensorEntry(it.shape, it.dtype, [(Region.flat(0, prod(it.shape)), file)]) for n, it in contents.items()}
    return FileEntry(file, stamp, {FROZEN: tensors})


def place_of(folder: Path, file: str, run_dir: Path | None = None) -> Path:
    """Return the path of a file that a checkpoint's manifest names: in its folder or, for all checkpoints, in the run folder.

    `run_dir` is the run folder; None: the checkpoint is in it.
    """
    return (run_dir or folder.resolve().parents[1]) / file if file.startswith(f"{FROZEN}/") else folder / file


def commit(
    claim: Claim,
    step: int,
    entries: Sequence[FileEntry],
    *,
    state: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor],
    frozen: FileEntry | None = None,
    rename: bool = True,
) -> Path:
    """Make a checkpoint of the files of all ranks and return its folder, which keeps its temporary name if `rename` is False.

    `state` is JSON; `frozen` is the result of `write_frozen`, if some parameters are not trained. A checkpoint of the same
    step, from before a resume, is replaced; a kill between the two renames leaves neither. Raises CheckpointError if the ranges
    of the ranks do not cover every tensor exactly once, if a rank's file is not in the folder, or if the disk refuses.
    """
    folder, final = temporary_of(claim, step), path_of(claim.path, step)
    shared = [frozen] if frozen else []
    tensors = put_together(final, [*entries, *shared])
    for entry in entries:
        try:
            check_stamp(folder / entry.file, entry.stamp, size_alone=True)
        except CheckpointError as error:
            raise CheckpointError(
                f"{folder / entry.file} differs from what its rank has just written: the run folder must be on a file "
                "system that all nodes share."
            ) from error
    stamps = {entry.file: entry.stamp for entry in (*entries, *shared)}
    stamps[BUFFERS] = tensor_file.write(folder / BUFFERS, contents(buffers))
    stamps[STATE] = write_chunks(folder / STATE, [json.dumps(state, indent=2).encode() + b"\n"])
    write_chunks(folder / MANIFEST, [to_bytes(stamps, tensors)])
    with disk_errors(final, "written"):
        sync(folder)
        if not rename:
            return folder
        claim.put(folder, final)
    return final


def discard(claim: Claim, folder: Path) -> None:
    """Remove a checkpoint or a temporary folder; a kill half-way leaves nothing under its name. Raises CheckpointError."""
    with disk_errors(folder, "removed"):
        if folder.exists():
            claim.take_away(folder)


def prune(claim: Claim, latest: Path, *, keep_last: int, keep_step: int | None = None, keep_every: int | None = None) -> None:
    """Keep the checkpoint `latest` and the keep_last - 1 before it; remove the other older ones.

    Those of `keep_step` and of the multiples of `keep_every` steps are kept too, if given.

    Checkpoints of later steps, from before a resume further back, neither count nor are removed: they may be damaged, and
    counting them would remove good ones. The run replaces them when it reaches their steps. Raises CheckpointError.
    """
    assert keep_last >= 1
    older = [path for path in committed(latest.parent.parent) if _step(path) < _step(latest)]
    for path in older[keep_last - 1 :]:
        if _step(path) != keep_step and (keep_every is None or _step(path) % keep_every):
            discard(claim, path)


# Reading ---------------------------------------------------------------------------------------------------------------------


def is_checkpoint(place: Path) -> bool:
    """Return True if a path is a checkpoint, damaged or not, and False if it is a run folder."""
    return place.parent.name == FOLDER or (place / MANIFEST).exists()


def committed(run_dir: Path) -> list[Path]:
    """Return the folders of the run's checkpoints, newest first, damaged or not. Raises CheckpointError."""
    with disk_errors(run_dir / FOLDER, "read"):
        found = list((run_dir / FOLDER).iterdir()) if (run_dir / FOLDER).exists() else []
    return sorted((path for path in found if re.fullmatch(r"step-\d{8,}", path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def candidates(place: Path) -> list[Path]:
    """Return the path itself if it is a checkpoint, or the checkpoints of a run folder, newest first."""
    return [place] if is_checkpoint(place) else committed(place)


def first_whole(folders: Iterable[Path], check: Callable[[Path], None], *, reports: bool = True) -> Path | None:
    """Return the first folder for which `check` raises no CheckpointError; None: there are no folders.

    Reports the damaged ones before it on stderr. Raises CheckpointError if all are damaged.
    """
    damaged: list[str] = []
    for folder in folders:
        try:
            check(folder)
        except CheckpointError as error:
            damaged.append(printable(str(error)))
            continue
        sys.stderr.writelines(f"skipped: {sentence}\n" for sentence in damaged if reports)
        return folder
    if damaged:
        damaged.append("There is no other checkpoint. A run does not start from zero unless you ask for it.")
        raise CheckpointError("\n".join(damaged))
    return None


def verify(folder: Path, *, part: tuple[int, int] = (0, 1)) -> None:
    """Check that a checkpoint is as it was written. Raises CheckpointError with the file and the problem.

    With `part` (i, n) check the manifest and every n-th file from the i-th: n ranks with i = 0 .. n-1 check the whole.
    """
    stamps, _ = read_manifest(folder)
    index, count = part
    for file in sorted(stamps)[index::count]:
        check_stamp(place_of(folder, file), stamps[file])
        if file == STATE:
            _read_state(folder, stamps[file])


def _read_state(folder: Path, stamp: Stamp) -> dict[str, Any]:
    path = folder / STATE
    check_stamp(path, stamp)
    with disk_errors(path, "read"), opened(path) as file:
        content = file.read()
    try:
        found: dict[str, Any] = parsed(content)
        return found
    except ValueError as error:
        raise CheckpointError(f"{path} is not the state of a run: {error}. Its checkpoint cannot be used.") from error


class Reader:
    """A checkpoint from which ranges of tensors are read; files are opened when first needed.

    The contents of the tensor files are checked by `verify`, not here. Raises CheckpointError if it cannot read.
    """

    def __init__(self, folder: Path, *, run_dir: Path | None = None) -> None:
        """`run_dir` is the run folder of a checkpoint that is not in it, as in `place_of`."""
        self.folder, self._run_dir = folder, run_dir
        self._stamps, self._tensors = read_manifest(folder)
        self._frozen = self._tensors.pop(FROZEN, {})
        self._files: dict[str, TensorFile] = {}
        self.state = _read_state(folder, self._stamps[STATE])

    def keys(self) -> list[str]:
        """Return the keys of the tensors of trained parameters: "weight", "exp_avg", ..."""
        return sorted(self._tensors)

    @property
    def frozen(self) -> FileEntry | None:
        """The file of the parameters that are not trained, perhaps in another run folder; None: all are trained."""
        found = {file for stored in self._frozen.values() for *_, file in stored.ranges}
        if not found:
            return None
        (file,) = found
        return FileEntry(file, self._stamps[file], {FROZEN: self._frozen})

    def finished_key(self) -> str:
        """Return the key of the weights that a finished run writes: the average if there is one."""
        return AVERAGE if AVERAGE in self._tensors else WEIGHT

    def tensors(self, key: str) -> dict[str, TensorEntry]:
        """Return the tensors `key` by the names of their parameters; weights and averages include the frozen parameters."""
        return {**self._tensors.get(key, {}), **(self._frozen if key in (WEIGHT, AVERAGE) else {})}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers, by name, on the CPU."""
        file = self._file(BUFFERS)
        return {name: file.tensor(name) for name in file.shapes}

    def contents(self, key: str) -> dict[str, Content]:
        """Return the tensors `key` of all parameters, whole, and the buffers, for `tensor_file.write`."""
        buffers = self._file(BUFFERS)
        found = {name: Content(it.dtype, it.shape, self._chunks(key, name, it)) for name, it in self.tensors(key).items()}
        for name, shape in buffers.shapes.items():
            found[name] = Content(buffers.dtypes[name], shape, buffers.chunks(name, 0, prod(shape)))
        return found

    def _chunks(self, key: str, name: str, stored: TensorEntry) -> Iterator[bytearray | memoryview]:
        if all(region.runs == 1 for region, _ in stored.ranges):
            for region, file in stored.ranges:
                yield from self._file(file).chunks(self._name(key, name, region.start), 0, region.count)
            return
        import torch  # only for the columns of tensor parallelism

        dtype = tensor_file.torch_dtype(stored.dtype)
        for wanted in Region.flat(0, prod(stored.shape)).pieces(CHUNK_BYTES // dtype.itemsize):
            values = torch.empty(wanted.count, dtype=dtype)
            self.read_into(Piece(key, name, stored.shape, wanted, values))
            yield from tensor_file.chunks(values)

    def _name(self, key: str, name: str, start: int) -> str:
        return tensor_name(FROZEN if name in self._frozen else key, name, start)

    def read_into(self, piece: Piece) -> None:
        """Fill `piece.values` with its elements, converted to their dtype and device."""
        names = self.tensors(piece.key)
        stored = names.get(piece.name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has {piece.key!r} for {len(names)} parameters, but not for {piece.name}.")
        if stored.shape != tuple(piece.shape):
            raise CheckpointError(
                f"{piece.name} has the shape {tuple(piece.shape)} in this run's model and {stored.shape} in "
                f"{self.folder}: the checkpoint belongs to another model."
            )
        assert piece.values.shape == (piece.region.count,), piece.name
        assert 0 <= piece.region.start <= piece.region.end <= prod(stored.shape), piece.name
        for region, file in stored.ranges:
            if region.start < piece.region.end and piece.region.start < region.end:
                inside = self._name(piece.key, piece.name, region.start)
                self._file(file).read_into(inside, piece.values, piece.region, region)

    def _file(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(place_of(self.folder, file, self._run_dir))
        return self._files[file]


# The checkpoint that a command is given by a path -----------------------------------------------------------------------------


def choose(place: Path) -> Path:
    """Return the path itself if it is a checkpoint, or the newest whole one of a run folder. Raises CheckpointError.

    Reports on stderr which damaged ones are skipped, and why.
    """
    folder = first_whole(candidates(place), verify)
    if folder is None:
        raise CheckpointError(f"{place} is not a checkpoint and contains no complete checkpoint: give another path.")
    return folder


def choose_best(place: Path) -> Path:
    """Return the checkpoint of a run with the best validation score, as its newest whole one records.

    Raises CheckpointError if the run has none, or it is damaged.
    """
    latest = choose(place)
    found = Reader(latest).state["best"]
    if found is None:
        raise CheckpointError(
            f"{latest} records no best checkpoint: the run had no checkpoint.keep_best=true, or no evaluation "
            "before this checkpoint. Leave --best out."
        )
    folder = path_of(latest.absolute().parents[1], found["step"])
    verify(folder)
    return folder
