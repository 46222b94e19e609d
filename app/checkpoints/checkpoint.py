"""Saves and resumes a run: all ranks together write the tensors of `Shards` into the files of `step_folders`.

A checkpoint belongs to the run: any preset on any number of processes resumes it at the next unseen sample. `resumable` has
the settings that can change in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.manifest import FROZEN, FileEntry
from app.checkpoints.shards import Shards
from app.checkpoints.step_folders import Reader
from app.checkpoints.tensor_file import Content
from app.distributed.agreement import Ranks
from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import CheckpointError, SamerunError, printable
from app.evaluation import Evaluation
from app.files.atomic_files import check_stamp
from app.guard.control import Patience, is_better
from app.init import held
from app.init.region import AVERAGE, WEIGHT, Piece
from app.metrics.metrics import Metrics
from app.optim.steps import SpikeGuard
from app.recipe import recipe_file
from app.recipe.schema import Recipe
from app.runs.claim import Claim

RESUMED: files.StateTypes = {
    "step": int,
    **dict.fromkeys(("recipe", "data", "optimizer"), dict),
    **dict.fromkeys(("best", "gradient_scaler"), (dict, type(None))),
}
"""Keys of state.json that a resumed attempt needs, with their types."""
NEVER, AUTO = "never", "auto"
"""Words of --resume; anything else is the path of a run folder or of one of its checkpoints."""


class Checkpoints:
    """The checkpoints of one run, written into its run folder and read from there or from another run's.

    Training pauses while a save copies this rank's pieces to memory of the CPU; a thread then writes the files.
    """

    def __init__(  # noqa: PLR0913  (keyword-only after the parts)
        self,
        runtime: Runtime,
        claim: Claim,
        recipe: Recipe,
        *,
        shards: Shards,
        facts: Mapping[str, Any],
        frozen: FileEntry | None,
        monitor: tuple[str, Literal["max", "min"]],
        metrics: Metrics,
        spikes: SpikeGuard,
        patience: Patience,
        on_disk: Callable[[float], None],
    ) -> None:
        """`shards` are the tensors of the prepared model and optimizer; `facts` are further entries of state.json:

        `data`, the fingerprints of the data sets, for `resumable`, and `model`, which rebuilds it, for `samerun export`.
        `frozen` is, on the main process, the result of `settle_frozen`.

        `monitor` is the score that decides which checkpoint is best, and whether max or min is best. `metrics` records the
        seconds of the pause and of the writing. The state of it, `spikes` and `patience` is saved too. `on_disk` is called on
        every rank, in another thread, with the seconds from a step to its checkpoint on the disk.
        """
        self._runtime, self._claim, self._recipe = runtime, claim, recipe
        self._shards, self._facts, self._frozen, self._metrics = shards, dict(facts), frozen, metrics
        self._spikes, self._patience = spikes, patience
        (self._monitored, self._good_end), self._on_disk = monitor, on_disk
        self._copies = _Copies()
        self._ranks = Ranks()
        self._writing: Future[None] | None = None
        self._best: dict[str, Any] | None = None
        self.written: Path | None = None
        """The last checkpoint of this start that is on disk; the same on every rank."""

    def is_due(self, step: int, *, is_last: bool, scores: Evaluation | None) -> bool:
        """Return whether the recipe asks for a checkpoint after this step; `scores` are from its evaluation, if any."""
        wanted = self._recipe.checkpoint
        if wanted.every_steps is not None and step % wanted.every_steps == 0:
            return True
        return (is_last and wanted.are_wanted) or self._is_best(scores)

    def save(self, step: int, scores: Evaluation | None = None) -> None:
        """Copy the state after this step, and start writing it once the previous save is on disk. Called by all ranks.

        Raises CheckpointError, on all ranks, if the save before could not be written on one.
        """
        self._metrics.flush()
        with self._metrics.clock.held():
            self._wait()
            if scores is not None and self._is_best(scores):
                self._best = {"step": step, self._monitored: scores.scores[self._monitored]}
            self._runtime.average_buffers(self._shards.model)
            pieces = self._copies.copy(self._shards.owned_pieces())
            buffers = {name: buffer.to("cpu", copy=True) for name, buffer in self._shards.buffers().items()}
            state = self._state(step)
        self._writing = _in_background(self._write, state, pieces, buffers, self._metrics.clock.pause_s)

    def finish(self) -> None:
        """Wait until the last save is on disk. Called by all ranks; raises CheckpointError, on all ranks, if it cannot be."""
        self._metrics.flush()
        with self._metrics.clock.held():
            self._wait()

    @property
    def latest(self) -> str:
        """A sentence about the newest checkpoint of the run."""
        found = files.committed(self._claim.path)
        return f"The latest checkpoint is {found[0]}" if found else "There is no checkpoint"

    def _is_best(self, scores: Evaluation | None) -> bool:
        if not self._recipe.checkpoint.keep_best or scores is None:
            return False
        best = self._best[self._monitored] if self._best else None
        return is_better(scores.scores[self._monitored], best, good_end=self._good_end)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write_pieces(self, ranks: Ranks | Runtime, step: int, pieces: Sequence[Piece]) -> list[FileEntry]:
        """Write the pieces of all ranks into the temporary folder of a step, and return their files."""
        runtime = self._runtime
        with ranks.together():
            if runtime.is_main:
                files.begin(self._claim, step)
        with ranks.together():
            folder = files.temporary_of(self._claim, step)
            entry = files.write_pieces(folder, runtime.launched.rank, pieces, on_chunk=runtime.alive)
        return ranks.gather(entry)

    def _write(self, state: dict[str, Any], pieces: list[Piece], buffers: dict[str, torch.Tensor], held_s: float) -> None:
        """Write a checkpoint and remove those that are too old; if a rank cannot write, the older ones are unchanged."""
        start_s, step = time.perf_counter(), state["step"]
        runtime, ranks, claim, is_main = self._runtime, self._ranks, self._claim, self._runtime.is_main
        try:
            entries = self._write_pieces(ranks, step, pieces)
            runtime.alive()
            with ranks.together():
                if is_main:
                    claim.sync()  # the steps are recorded before the checkpoint counts
                    saved = files.commit(claim, step, entries, state=state, buffers=buffers, frozen=self._frozen)
                    best = state["best"]["step"] if state["best"] else None
                    files.prune(claim, saved, keep_last=self._recipe.checkpoint.keep_last, keep_step=best)
        except Exception as error:
            # All ranks have a SamerunError; any other error is a fault of the program, perhaps of this rank alone.
            with ranks.together() if isinstance(error, SamerunError) else suppress(SamerunError):
                if is_main:
                    claim.check()  # a start that took the folder over has removed these files
                    files.discard(claim, files.temporary_of(claim, step))  # a partial checkpoint must not fill the disk
            raise
        self.written = files.path_of(claim.path, step)
        runtime.alive()
        written_s = held_s + time.perf_counter() - start_s
        self._metrics.record_saved(step, held_s=held_s, written_s=written_s)
        self._on_disk(written_s)

    @contextmanager
    def finished_weights(self, step: int) -> Iterator[dict[str, Content]]:
        """Yield on the main process the run's weights after its last step, the average if there is one, by name.

        They are read from the checkpoint of that step, or else from a temporary folder to which all ranks write their shares:
        no process has them whole. Called by all ranks. Raises CheckpointError, on all of them.
        """
        claim, is_main, final = self._claim, self._runtime.is_main, files.path_of(self._claim.path, step)
        is_saved = self.written == final
        try:
            folder = final if is_saved else self._write_weights(step)
            with self._runtime.together():
                reader = Reader(folder, run_dir=claim.path) if is_main else None
            yield reader.contents(reader.finished_key()) if reader else {}
        finally:
            if is_main and not is_saved:
                with suppress(SamerunError):  # the next start removes the folder
                    files.discard(claim, files.temporary_of(claim, step))

    def _write_weights(self, step: int) -> Path:
        self._runtime.average_buffers(self._shards.model)
        key = AVERAGE if self._shards.average else WEIGHT
        entries = self._write_pieces(self._runtime, step, [it for it in self._shards.owned_pieces() if it.key == key])
        with self._runtime.together():
            if self._runtime.is_main:
                buffers = self._shards.buffers()
                files.commit(self._claim, step, entries, state={}, buffers=buffers, frozen=self._frozen, rename=False)
        return files.temporary_of(self._claim, step)

    def restore(self, folder: Path) -> None:
        """Load the state of a checkpoint that `find` returned. Called by all ranks, on a freshly prepared model."""
        # If a later start has taken the folder over and removed this checkpoint, the error names that as the reason.
        with self._runtime.together(), self._claim.errors(folder, "read"):
            reader = Reader(folder)
            self._shards.allocate_state(reader.keys(), reader.state["optimizer"])
            for piece in self._shards.pieces():
                reader.read_into(piece)
            saved, buffers = reader.buffers(), self._shards.buffers()
            if saved.keys() != buffers.keys():
                raise CheckpointError(f"the checkpoint has the buffers {sorted(saved)}, this run's model {sorted(buffers)}.")
            for name, buffer in buffers.items():
                buffer.copy_(saved[name])
            if (scaler := self._runtime.accelerator.scaler) is not None and reader.state["gradient_scaler"]:
                scaler.load_state_dict(reader.state["gradient_scaler"])
        self._best = reader.state["best"]
        self._patience.load(reader.state.get("patience"))
        self._spikes.load(reader.state.get("gradient_norms"), step=reader.state["step"])
        self._metrics.units.load(reader.state.get("units_seen", 0))
        self._metrics.skipped_in_row = reader.state.get("skipped_in_row", 0)
        self._shards.publish()

    def _state(self, step: int) -> dict[str, Any]:
        scaler = self._runtime.accelerator.scaler
        return {
            "step": step,
            "samples_seen": step * self._recipe.train.global_batch_size,
            "recipe": recipe_file.flat(self._recipe),
            **self._facts,
            "best": self._best,
            "patience": self._patience.state(),
            "gradient_norms": self._spikes.state(),
            "units_seen": self._metrics.units.state(),
            "skipped_in_row": self._metrics.skipped_in_row,
            "optimizer": self._shards.scalars(),
            "gradient_scaler": None if scaler is None else scaler.state_dict(),
        }


class _Copies:
    """Memory of the CPU for copies of pieces, reused by each save: allocating it takes longer than filling it."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with their values copied."""
        kinds = [(piece.values.shape, piece.values.dtype) for piece in pieces]
        if kinds != [(memory.shape, memory.dtype) for memory in self._memory]:  # SGD has no momentum before its first step
            on_gpu = any(piece.values.is_cuda for piece in pieces)
            self._memory = [torch.empty(shape, dtype=dtype, pin_memory=on_gpu) for shape, dtype in kinds]
        for memory, piece in zip(self._memory, pieces, strict=True):
            memory.copy_(piece.values, non_blocking=True)
        for device in {piece.values.device for piece in pieces if piece.values.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # the copies above are asynchronous
        return [replace(piece, values=memory) for memory, piece in zip(self._memory, pieces, strict=True)]


def _in_background(work: Callable[..., None], *arguments: Any) -> Future[None]:
    """Call `work` in a thread that does not keep a failing process alive, and return the future of its result."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work(*arguments)
            future.set_result(None)
        except BaseException as error:  # for the thread that waits
            future.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def find(runtime: Runtime, place: Path, *, state: files.StateTypes | None = None) -> Path | None:
    """Return the newest whole checkpoint of a run folder, if any, or `place` itself if it is a checkpoint.

    All ranks check the files together; `state` as in `step_folders.verify`. Prints newer checkpoints that are damaged. Raises
    CheckpointError, on all ranks, if every checkpoint there is damaged, or `place` is.
    """

    def check(folder: Path) -> None:
        with runtime.together():
            files.verify(folder, part=(runtime.launched.rank, runtime.launched.world_size), state=state)

    candidates = runtime.from_main([place] if files.is_checkpoint(place) else files.committed(place))
    found, damaged = files.first_whole(candidates, check)
    if damaged and found is None:
        raise CheckpointError(
            "\n".join(damaged) + "\nThere is no other checkpoint. The run does not start from zero unless you ask for it."
        )
    for sentence in damaged if runtime.is_main else []:
        print(f"passed over: {printable(sentence)}", flush=True)  # noqa: T201 - the user must know
    return found


# ---- Frozen parameters -------------------------------------------------------------------------------------------------------


def settle_frozen(runtime: Runtime, claim: Claim, model: torch.nn.Module, resumed: Path | None) -> FileEntry | None:
    """Give the model, not prepared yet, the frozen parameters of the checkpoint `resumed`, and write them to the run folder.

    They are written once, and each checkpoint names the file by its digest. So a checkpoint has only the trained parameters,
    and a resumed run has the same frozen weights even if the file of its initial weights is gone.

    Returns, on the main process, the file for checkpoints to name; None: all parameters are trained.
    Raises CheckpointError, on all ranks, if the checkpoint's run froze others, or they cannot be read or written.
    """
    every = held.held(model)
    frozen = {name: every[name] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen = dict(sorted(frozen.items(), key=lambda named: -named[1].values.dtype.itemsize))  # the order of a file
    with runtime.together():
        reader = Reader(resumed) if resumed else None
        entry = reader.frozen if reader else None
        if reader:
            _check_same_frozen(reader.folder, entry, frozen)
            for it in frozen.values():
                reader.read_into(it)
    if not frozen:
        return None
    with runtime.together():
        exists = runtime.is_main and entry is not None and (claim.path / entry.file).exists()
        if exists and reader and entry:
            final = claim.path / entry.file
            if not final.samefile(files.place_of(reader.folder, entry.file)):  # `find` has checked that one
                check_stamp(final, entry.stamp)
    if runtime.from_main(exists):
        return entry
    with runtime.together():
        is_sharded = held.is_divided(model)
        tensors = (_gathered(runtime.gather, it) if is_sharded else it.values for it in frozen.values())
        try:
            contents = {  # each takes the next tensor when it is written, in this order
                name: Content(
                    tensor_file.dtype_of(name, it.values),
                    it.shape,
                    chain.from_iterable(map(tensor_file.chunks, islice(tensors, 1))),
                )
                for name, it in frozen.items()
            }
            return files.write_frozen(claim, contents) if runtime.is_main else None
        finally:
            for _ in tensors:  # on the other ranks, and after an error of the disk: each tensor is a collective
                pass


def _check_same_frozen(folder: Path, entry: FileEntry | None, frozen: Mapping[str, Piece]) -> None:
    before = {name: it.shape for name, it in entry.tensors[FROZEN].items()} if entry else {}
    now = {name: it.shape for name, it in frozen.items()}
    differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if differing:
        raise CheckpointError(
            f"{folder} belongs to a run that froze {len(before)} parameters, and this run freezes {len(now)}; only one of them "
            f"freezes {listed(differing)}. Freeze the same parameters (train.freeze, or the task's model), or start a new run "
            "in another --run-dir."
        )


def _gathered(gather: Callable[[Any], list[Any]], it: Piece) -> torch.Tensor:
    """Return the whole of a parameter, 1-D, on all ranks; `gather` returns every rank's value."""
    whole = torch.empty(prod(it.shape), dtype=it.values.dtype)
    for region, values in filter(None, gather((it.region, it.values.cpu()) if it.copies[1] == 0 else None)):
        region.rows(whole).copy_(values.view(region.runs, region.run))
    return whole
