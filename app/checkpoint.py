"""Saving and resuming a run: what `Shards` finds in memory, in the files of `checkpoint_files`, by all ranks together.

A checkpoint belongs to the run: any preset on any number of processes takes it up at the next unseen sample. What decides
what is learnt has to be as it was (`check_same_run`); the rest, such as the number of epochs or the logging, may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from app import checkpoint_files as files
from app import recipe_file
from app.errors import CheckpointError
from app.recipe import Recipe
from app.runtime import Runtime
from app.shards import Shards

NEVER, AUTO = "never", "auto"
"""Words of --resume; anything else is the path of a run folder or of one of its checkpoints."""

# Beside what is not learnt at all: how long, and where the same data lies.
_MAY_CHANGE = (*recipe_file.NOT_LEARNT, "train.epochs", "train.steps", "data.path")


class Checkpoints:
    """The checkpoints of one run, written into its run folder and read from there or from another run's."""

    def __init__(
        self,
        runtime: Runtime,
        run_dir: Path,
        recipe: Recipe,
        *,
        model: torch.nn.Module,
        shards: Shards,
        facts: Mapping[str, Any],
    ) -> None:
        """`model` is as `prepare` returned it, `shards` are its tensors; `facts` is what else state.json says of the run:

        `data`, the fingerprints of the data sets, for `check_same_run`, and `model`, what rebuilds it, for `samerun export`.
        """
        self._runtime, self._run_dir, self._recipe, self._model = runtime, run_dir, recipe, model
        self._shards, self._facts = shards, dict(facts)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the recipe wants a checkpoint when so many steps are done."""
        every = self._recipe.checkpoint.every_steps
        return every is not None and (is_last or step % every == 0)

    def save(self, step: int) -> None:
        """Write the state after so many steps and remove the checkpoints that are too old. Called by all ranks.

        Raises CheckpointError, on all ranks, if one could not write; the older checkpoints are as they were then.
        """
        runtime, folder = self._runtime, files.temporary_of(self._run_dir, step)
        runtime.average_buffers(self._model)
        with runtime.together():
            if runtime.is_main:
                files.begin(self._run_dir, step)
        try:
            with runtime.together():
                entry = files.write_pieces(folder, runtime.launched.rank, self._shards.owned_pieces())
            entries = runtime.gather(entry)
            with runtime.together():
                if runtime.is_main:
                    saved = files.commit(self._run_dir, step, entries, state=self._state(step), buffers=self._shards.buffers())
                    files.prune(saved, keep_last=self._recipe.checkpoint.keep_last)
        except CheckpointError:
            if runtime.is_main:
                files.discard(folder)  # what fills a disk must not stay
            raise

    def restore(self, folder: Path) -> None:
        """Take up the state of a checkpoint that `find` returned. Called by all ranks, on a freshly prepared model."""
        with self._runtime.together():
            reader = files.Reader(folder)
            self._shards.allocate_state(reader.keys(), reader.state["optimizer"])
            for piece in self._shards.pieces():
                reader.read_into(piece)
            _copy_buffers(reader.buffers(), self._shards.buffers())
            if (scaler := self._runtime.accelerator.scaler) is not None and reader.state["gradient_scaler"]:
                scaler.load_state_dict(reader.state["gradient_scaler"])
        self._shards.publish()

    def _state(self, step: int) -> dict[str, Any]:
        scaler = self._runtime.accelerator.scaler
        return {
            "step": step,
            "samples_seen": step * self._recipe.train.global_batch_size,
            "recipe": recipe_file.flat(self._recipe),
            **self._facts,
            "optimizer": self._shards.scalars(),
            "gradient_scaler": None if scaler is None else scaler.state_dict(),
        }


def find(runtime: Runtime, place: Path) -> Path | None:
    """Return the newest checkpoint of a run folder that is whole, or `place` itself if it is a checkpoint; None: has none.

    All ranks check the files together. Newer ones that are damaged are said. Raises CheckpointError, on all ranks, if every
    checkpoint there is damaged, or `place` is.
    """
    candidates = runtime.from_main([place] if files.is_checkpoint(place) else files.committed(place))
    damaged = []
    for folder in candidates:
        try:
            with runtime.together():
                files.verify(folder, part=(runtime.launched.rank, runtime.plan.world_size))
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            for sentence in damaged if runtime.is_main else []:
                print(f"passed over: {sentence}", flush=True)  # noqa: T201 - the user must know
            return Path(folder)
    if damaged:
        raise CheckpointError("\n".join(damaged) + "\nNo other checkpoint is there, and nothing is started from zero unasked.")
    return None


def check_same_run(folder: Path, recipe: Recipe, data: Mapping[str, str]) -> int:
    """Return the step of a checkpoint. Raises CheckpointError, naming all that differs, if it is of another run."""
    state = files.Reader(folder).state
    before, now = {**state["recipe"], **state["data"]}, {**recipe_file.flat(recipe), **data}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in now.items()}  # as JSON has it
    differing = [key for key in before if before[key] != plain.get(key) and not key.startswith(_MAY_CHANGE)]
    if differing:
        listed = "; ".join(f"{key} was {before[key]!r} and is {plain.get(key)!r}" for key in differing)
        raise CheckpointError(
            f"{folder} is of another run: {listed}. Take these back, or train from the start in another --run-dir."
        )
    step: int = state["step"]
    return step


def _copy_buffers(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    if source.keys() != target.keys():
        raise CheckpointError(f"the checkpoint has the buffers {sorted(source)}, and this run's model {sorted(target)}.")
    for name, buffer in target.items():
        buffer.copy_(source[name])
