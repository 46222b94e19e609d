"""Saves and resumes a run: all ranks together write the tensors of `Shards` into the files of `step_folders`.

A checkpoint belongs to the run: any preset on any number of processes resumes it at the next unseen sample. Everything that
affects training must be unchanged; the rest, such as the number of epochs or the logging, can change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.sharded_state import Shards
from app.checkpoints.step_folders import FROZEN, FileEntry, Reader
from app.checkpoints.tensor_file import Content
from app.distributed.agreement import Ranks
from app.distributed.control import Patience, is_better
from app.distributed.runtime import Runtime
from app.environment.topology import listed
from app.errors import CheckpointError, SamerunError
from app.evaluation import Evaluation
from app.files import hub
from app.init import model_tensors
from app.init.region import AVERAGE, WEIGHT, Piece
from app.metrics.metrics import Metrics
from app.optim import schedule
from app.optim.schedule import Length
from app.optim.steps import SpikeGuard
from app.recipe import recipe_file, task_file
from app.recipe.schema import Recipe, changes_upto, skipped_upto
from app.runs.claim import Claim

NEVER, AUTO = "never", "auto"
"""Words of --resume; anything else is the path of a run folder or of one of its checkpoints."""
_LENGTH = frozenset({"train.epochs", "train.steps", "train.stop_after_evaluations_without_gain"})
_STOPPING = frozenset({"train.evaluate_every_epochs", "train.evaluate_every_steps", "train.max_validation_samples"})
"""Keys that affect training only through early stopping."""
_SKIP = "train.skip_steps"
"""Key that may change beyond the step of the checkpoint."""
_SCHEDULE = frozenset(f"optim.{key}" for key in schedule.KEYS)
"""Keys that may change if no step before the checkpoint had another learning rate by them."""
_MOST_DIFFERENCES = 20
"""Differences in an error."""
_NO_KEY = "no such key"
"""Value of a recipe key that only one of two versions of the program has."""


class Checkpoints:
    """The checkpoints of one run, written into its run folder and read from there or from another run's.

    Training pauses while a save copies this rank's pieces to memory of the CPU; a thread then writes the files.
    """

    def __init__(
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

        `data`, the fingerprints of the data sets, for `check_same_run`, and `model`, which rebuilds it, for `samerun export`.
        `frozen` is, on the main process, the result of `settle_frozen`.

        `monitor` is the score that decides which checkpoint is best, and whether max or min is best. `metrics` records the
        seconds of the pause and of the writing. The state of it, `spikes` and `patience` is saved too. `on_disk` is called on
        every rank, in another thread, with the seconds from a step to its checkpoint on the disk.
        """
        self._runtime, self._claim, self._recipe = runtime, claim, recipe
        self._shards, self._facts, self._frozen, self._metrics = shards, dict(facts), frozen, metrics
        self._spikes, self._patience = spikes, patience
        (self._monitored, self._good_end), self._on_disk = monitor, on_disk
        self._memory: list[torch.Tensor] = []
        self._ranks = Ranks()
        self._writing: Future[None] | None = None
        self._best: dict[str, Any] | None = None
        self.written: Path | None = None
        """The last checkpoint of this start that is on disk; the same on every rank."""

    def is_due(self, step: int, *, is_last: bool, scores: Evaluation | None) -> bool:
        """Return whether the recipe asks for a checkpoint after this step; `scores` are from its evaluation, if any."""
        wanted = self._recipe.checkpoint
        if any(every is not None and step % every == 0 for every in (wanted.every_steps, wanted.keep_every)):
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
            pieces = self._copied(self._shards.owned_pieces())
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

    @torch.no_grad()
    def _copied(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy pieces to memory of the CPU, which each save uses again: allocating it takes longer than filling it."""
        kinds = [(piece.values.shape, piece.values.dtype) for piece in pieces]
        if kinds != [(memory.shape, memory.dtype) for memory in self._memory]:  # SGD has no momentum before its first step
            on_gpu = any(piece.values.is_cuda for piece in pieces)
            self._memory = [torch.empty(shape, dtype=dtype, pin_memory=on_gpu) for shape, dtype in kinds]
        for memory, piece in zip(self._memory, pieces, strict=True):
            memory.copy_(piece.values, non_blocking=True)
        for device in {piece.values.device for piece in pieces if piece.values.device.type != "cpu"}:
            torch.accelerator.synchronize(device)  # the copies above are asynchronous
        return [replace(piece, values=memory) for memory, piece in zip(self._memory, pieces, strict=True)]

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
                    best, keep = state["best"]["step"] if state["best"] else None, self._recipe.checkpoint
                    files.prune(claim, saved, keep_last=keep.keep_last, keep_step=best, keep_every=keep.keep_every)
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
            if not is_saved:
                self._runtime.average_buffers(self._shards.model)
                pieces = self._shards.owned_pieces()
                key = AVERAGE if any(it.key == AVERAGE for it in pieces) else WEIGHT
                entries = self._write_pieces(self._runtime, step, [it for it in pieces if it.key == key])
                with self._runtime.together():
                    if is_main:
                        state, buffers = {"step": step}, self._shards.buffers()
                        files.commit(claim, step, entries, state=state, buffers=buffers, frozen=self._frozen, rename=False)
            folder = final if is_saved else files.temporary_of(claim, step)
            with self._runtime.together():
                reader = Reader(folder, run_dir=claim.path) if is_main else None
            yield reader.contents(reader.finished_key()) if reader else {}
        finally:
            if is_main and not is_saved:
                with suppress(SamerunError):  # the next start removes the folder
                    files.discard(claim, files.temporary_of(claim, step))

    def restore(self, folder: Path) -> None:
        """Load the state of a checkpoint that `find` returned. Called by all ranks, on a freshly prepared model."""
        # If a later start has taken the folder over and removed this checkpoint, the error names that as the reason.
        with self._runtime.together(), self._claim.errors(folder, "read"):
            reader = Reader(folder)
            self._shards.allocate_state(reader.keys(), reader.state["optimizer"], reader.state.get("optimizer_counts", ()))
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
        self._metrics.sources.load(reader.state.get("seen_by_source", {}))
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
            "seen_by_source": dict(self._metrics.sources.seen),
            "skipped_in_row": self._metrics.skipped_in_row,
            "optimizer": self._shards.scalars(),
            "optimizer_counts": self._shards.counts(),
            "gradient_scaler": None if scaler is None else scaler.state_dict(),
        }


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


def find(runtime: Runtime, place: Path) -> Path | None:
    """Return the newest whole checkpoint of a run folder, if any, or `place` itself if it is a checkpoint.

    All ranks check the files together. Raises CheckpointError, on all ranks, if every checkpoint there is damaged.
    """

    def check(folder: Path) -> None:
        with runtime.together():
            files.verify(folder, part=(runtime.launched.rank, runtime.launched.world_size))

    return files.first_whole(runtime.from_main(files.candidates(place)), check, reports=runtime.is_main)


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path
    step: int
    """Steps before it."""
    note: str | None
    """The effect of another length of the run on the remaining learning rates, if any."""
    newest: Path | None = None
    """The newest checkpoint that was there, which may be damaged."""


def check_same_run(
    folder: Path,
    recipe: Recipe,
    data: Mapping[str, str],
    length: Length,
    *,
    sources: Mapping[str, str],
    may_differ: bool = False,
) -> Resumed:
    """Check that a run of this recipe and length, over data with these facts, can resume from the checkpoint in `folder`.

    `sources` are the texts of the user's task file and of the files it imports, which can differ only if `may_differ` is set.
    Raises CheckpointError with the differences if the checkpoint is of another run or of another version of Samerun, and if it
    is past the end of this run.
    """
    state = Reader(folder).state
    defaults = recipe_file.flat(recipe_file.build({"task": recipe.task}))  # of keys that are newer than the checkpoint
    before, now = {**defaults, **recipe_file.renamed(state["recipe"])}, dict(recipe_file.flat(recipe))
    for values in (before, now):  # the path of a task file can change; `sources` has its text
        values["task"] = task_file.name_of(values["task"])
    models = [(key, before[key], it) for key, it in recipe_file.hub_places(recipe).items() if hub.differ(before[key], it)]
    before, now = (recipe_file.without_places(values, recipe.task) for values in (before, now))
    by_step = recipe_file.marked("by_step", recipe.task)
    may_change = recipe_file.marked("not_learnt", recipe.task) | by_step | _LENGTH | _SCHEDULE | {_SKIP}
    if None not in (before.get("train.stop_after_evaluations_without_gain"), recipe.train.stop_after_evaluations_without_gain):
        may_change -= _STOPPING
    pairs = [(key, before.get(key, _NO_KEY), now.get(key, _NO_KEY)) for key in {**now, **before} if key not in may_change]
    pairs += [*models, *((key, state["data"].get(key), data.get(key)) for key in {**state["data"], **data})]
    differing = [  # as JSON, in which the order of parameter groups counts
        f"{key} was {then!r} and is {present!r}" for key, then, present in pairs if json.dumps(then) != json.dumps(present)
    ]
    if differing:
        raise CheckpointError(
            f"{folder} belongs to another run or another version of Samerun: {listed(differing, _MOST_DIFFERENCES)}. "
            f"Undo these changes, or start a new run in another --run-dir, with these weights by train.init_from={folder}."
        )
    earlier: Mapping[str, str] = state.get("task_sources", {})
    changed = sorted(name for name in earlier.keys() | sources.keys() if earlier.get(name) != sources.get(name))
    if changed and not may_differ:
        raise CheckpointError(
            f"{folder} belongs to a run with another version of the task: {listed(changed)} changed since. Undo the change, "
            "start a new run in another --run-dir, or give --changed-task if the change does not affect training."
        )
    step: int = state["step"]
    if step > length.total_steps:
        raise CheckpointError(
            f"{folder} is at step {step}, and this run has only {length.total_steps} steps: give train.steps={step} or more, "
            "or --resume from an earlier checkpoint with another --run-dir."
        )
    for key in (_SKIP, *by_step):
        then, present = ((skipped_upto if key == _SKIP else changes_upto)(values[key], step) for values in (before, now))
        if then != present:
            raise CheckpointError(
                f"{folder} is at step {step}, and {key} was {before[key]} and is {now[key]}, which differ in steps that were "
                "taken already: change later steps only, or give --resume an earlier checkpoint, with another --run-dir."
            )
    return Resumed(folder, step, _rates_note(folder, step, recipe, before, now, length))


def _rates_note(
    folder: Path, step: int, recipe: Recipe, before: Mapping[str, Any], now: Mapping[str, Any], length: Length
) -> str | None:
    """Return what a new length or schedule changes in the learning rates of a run resumed after `step`; None: neither is new.

    `before` and `now` are the recipe's values by key. Raises CheckpointError if a step that was taken has another rate by the
    new ones. If the length alone is new, that is only noted, since all rates of a cosine, linear or polynomial schedule depend
    on it; but not of a wsd schedule, which an earlier checkpoint continues.
    """
    train = replace(recipe.train, epochs=before["train.epochs"], steps=before["train.steps"])
    optim = replace(recipe.optim, **{key: before[f"optim.{key}"] for key in schedule.KEYS})
    steps_before = schedule.total_steps(train, steps_per_epoch=length.steps_per_epoch)
    changes = [f"{key} was {before[key]!r} and is {now[key]!r}" for key in sorted(_SCHEDULE) if before[key] != now[key]]
    is_only_length = not changes
    if steps_before != length.total_steps:
        changes.insert(0, f"the run is {length.total_steps:,} steps long instead of {steps_before:,}")
    if not changes:
        return None
    one, other = (
        partial(
            schedule.lr_at,
            optim=it,
            global_batch_size=recipe.train.global_batch_size,
            steps_per_epoch=length.steps_per_epoch,
            total_steps=total_steps,
        )
        for it, total_steps in ((optim, steps_before), (recipe.optim, length.total_steps))
    )
    first = schedule.first_difference(one, other, steps=min(steps_before, length.total_steps))
    said = ", ".join(changes)
    if first is None:
        return f"{said}, which changes no learning rate"
    if first >= step:
        return f"{said}, which changes learning rates from step {first + 1:,} on"
    if is_only_length and recipe.optim.schedule != "wsd":
        return (
            f"{said}: under optim.schedule={recipe.optim.schedule} this changes all learning rates from step "
            f"{max(step, first) + 1:,} on (optim.schedule_steps={steps_before} keeps them)"
        )
    earlier = f", or give --resume a checkpoint of step {first} or earlier, with another --run-dir"
    raise CheckpointError(
        f"{folder} is at step {step}, and {said}, which changes the learning rate of step {first + 1:,}, a step taken "
        f"already: undo the change{earlier if first else ''}."
    )


# ---- Frozen parameters -------------------------------------------------------------------------------------------------------


def settle_frozen(runtime: Runtime, claim: Claim, model: torch.nn.Module, resumed: Path | None) -> FileEntry | None:
    """Give the model, not prepared yet, the frozen parameters of the checkpoint `resumed`, and write them to the run folder.

    They are written once, and each checkpoint names the file by its digest. So a checkpoint has only the trained parameters,
    and a resumed run has the same frozen weights even if the file of its initial weights is gone.

    Returns, on the main process, the file for checkpoints to name; None: all parameters are trained.
    Raises CheckpointError, on all ranks, if the checkpoint's run froze others, or they cannot be read or written.
    """
    every = model_tensors.local_pieces(model)
    frozen = {name: every[name] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen = dict(sorted(frozen.items(), key=lambda named: -named[1].values.dtype.itemsize))  # the order of a file
    entry = None
    with runtime.together():
        if resumed is not None:
            reader = Reader(resumed)
            entry = reader.frozen
            before = {name: it.shape for name, it in entry.tensors[FROZEN].items()} if entry else {}
            now = {name: it.shape for name, it in frozen.items()}
            differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if differing:
                raise CheckpointError(
                    f"{resumed} belongs to a run that froze {len(before)} parameters, and this run freezes {len(frozen)}; only "
                    f"one of them freezes {listed(differing)}. Freeze the same parameters (train.freeze, or the task's model), "
                    "or start a new run in another --run-dir."
                )
            for it in frozen.values():
                reader.read_into(it)
    if not frozen:
        return None
    if runtime.from_main(entry is not None and (claim.path / entry.file).exists()):
        return entry
    with runtime.together():
        is_sharded = model_tensors.is_sharded(model)
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


def _gathered(gather: Callable[[Any], list[Any]], it: Piece) -> torch.Tensor:
    """Return the whole of a parameter, 1-D, on all ranks; `gather` returns every rank's value."""
    whole = torch.empty(prod(it.shape), dtype=it.values.dtype)
    for region, values in filter(None, gather((it.region, it.values.cpu()) if it.copies[1] == 0 else None)):
        region.rows(whole).copy_(values.view(region.runs, region.run))
    return whole
