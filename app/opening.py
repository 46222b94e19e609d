"""A start of a run, before its first step: what it goes on from, and what it writes into the run folder about itself.

All ranks call these functions together; the main process writes.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app import handshake, ledger, recipe_file, run_folder
from app.checkpoints import checkpoint
from app.checkpoints.initial_weights import Initial
from app.checkpoints.resumable import Resumed, check_same_run
from app.data.open import Data
from app.errors import CheckpointError
from app.launched import Job
from app.recipe_file import LoadedRecipe
from app.runtime import Runtime
from app.schedule import Length
from app.trackers.tracked import tracked
from app.trackers.trackers import Trackers


@dataclass(frozen=True)
class Opened:
    """The run folder, ready to be written into."""

    folder: Path
    trackers: Trackers
    """Started; none on other processes than the main one."""


def find_checkpoint(
    runtime: Runtime, loaded: LoadedRecipe, data: Data, length: Length, run_dir: str | None, resume: str
) -> Resumed | None:
    """Return what --resume asks for, checked to be whole and of the same run, or None to start from the beginning.

    Raises CheckpointError, on all ranks, for one that cannot be used.
    """
    if resume == checkpoint.NEVER or (resume == checkpoint.AUTO and run_dir is None):
        return None
    place = Path(run_dir if resume == checkpoint.AUTO and run_dir else resume)
    folder = checkpoint.find(runtime, place)
    if folder is None and resume == checkpoint.AUTO:
        with runtime.together():
            if runtime.is_main:
                run_folder.check_may_begin_again(place)
        return None
    with runtime.together():
        if folder is None:
            raise CheckpointError(f"--resume is {resume}, and there is no checkpoint: give auto, never, or the path of one.")
        return check_same_run(folder, loaded.recipe, data.facts, length)


def open_run_folder(
    runtime: Runtime,
    loaded: LoadedRecipe,
    wanted: str | None,
    *,
    trackers: Sequence[str],
    origin: Resumed | Initial | None,
    may_exist: bool,
) -> Opened:
    """Make the run folder on the main process, write what is known at the start, and start the trackers.

    With `may_exist` the folder may hold a run already, which goes on, or starts anew where it had no checkpoint yet.

    `origin` is what the run goes on from or begins with. Comes after all that can be wrong with a run, so that a mended one
    can use the same folder.
    """
    hosts = runtime.gather(f"{socket.gethostname()} {runtime.device}")
    path: Path | None = None
    started = Trackers()
    with runtime.together():
        if runtime.is_main:
            step = origin.step if isinstance(origin, Resumed) else 0
            logged = run_folder.last_steps(Path(wanted)) if wanted and may_exist else {}  # before it forgets any
            path = run_folder.create(wanted, loaded.name, resumed_step=step if may_exist else None)
            run_folder.claim(path, runtime.incarnation)
            preset = run_folder.launched_preset()
            if preset is not None:
                run_folder.write_text(path / run_folder.PRESET, preset.text)
            before = _before(origin, path / run_folder.RUN)
            run_folder.write_json(path / run_folder.RUN, {**_describe(runtime, loaded, preset, hosts), **before})
            run_folder.write_text(path / run_folder.RECIPE, recipe_file.to_yaml(loaded.recipe))
            run = tracked(path, project=loaded.name, first_step=step, logged=logged)
            started.start(trackers, run, recipe_file.flat(loaded.recipe))
    return Opened(runtime.from_main(path), started)


def _before(origin: Resumed | Initial | None, earlier: Path) -> dict[str, Any]:
    """What run.json says of the time before this start; `earlier` is the file of the start before, if there was one."""
    if isinstance(origin, Resumed):
        told = run_folder.read_json(earlier) if earlier.exists() else {}
        begun_with = {"init_from": told["init_from"]} if "init_from" in told else {}
        return {**begun_with, "resumed_from": str(origin.folder), "resumed_step": origin.step}
    return {"init_from": str(origin.place)} if origin else {}


def _describe(runtime: Runtime, loaded: LoadedRecipe, preset: run_folder.Preset | None, hosts: list[str]) -> dict[str, Any]:
    plan = runtime.plan
    return {
        "recipe": loaded.name,
        "recipe_digest": recipe_file.digest(loaded.recipe),
        "preset": preset.name if preset else None,
        "strategy": runtime.launched.strategy,
        "mixed_precision": runtime.launched.mixed_precision,
        "world_size": plan.world_size,
        "ranks": hosts,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "global_batch_size": plan.global_batch_size,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "commit": run_folder.source_commit(),
        "versions": {"python": sys.version.split()[0], **handshake.versions()},
    }


def record_start(
    runtime: Runtime, run_dir: Path, *, total_steps: int, training_samples: int, resumed: Resumed | None, job: Job
) -> None:
    """Write into the run's ledger, on the main process, where this start begins and since when it was waited for."""
    with runtime.together():
        if runtime.is_main:
            start = ledger.Start(
                from_step=resumed.step if resumed else 0,
                total_steps=total_steps,
                training_samples=training_samples,
                world_size=runtime.plan.world_size,
                preset=run_folder.read_json(run_dir / run_folder.RUN)["preset"],
                resumed_from=str(resumed.folder) if resumed else None,
                job=job.name,
                submitted=job.submitted,
                allocated=job.allocated,
                launched=round(psutil.Process().create_time(), 3),
            )
            ledger.append(run_dir, start)
