"""A start of a run, before its first step: finds the checkpoint to resume from, and records this start and its origin.

All ranks call these functions together; the main process writes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from app import tasks
from app.building import Parts
from app.checkpoints import checkpoint, step_folders
from app.checkpoints.checkpoint import Resumed, check_same_run
from app.distributed import handshake
from app.environment.launched import SchedulerJob
from app.errors import CheckpointError, RunFolderError
from app.metrics.trackers import Trackers, tracked
from app.recipe import recipe_file
from app.runs import ledger, run_folder
from app.runs.claim import Claim, claim


def launched_preset(given: str | None) -> Path | None:
    """Return the preset file that this process was started with, or None if it was started without one.

    `accelerate launch` passes on what the preset contains, but not its name: the command line of the parent process has it.
    `samerun launch`, where it starts the process itself, has `given` the file.
    """
    try:
        parent = psutil.Process().parent()
        command, folder = (parent.cmdline(), parent.cwd()) if parent else ([], "")
    except psutil.Error:  # the parent has ended, or belongs to another user: then its name is not known
        return None
    named = [following for word, following in pairwise(command) if word == "--config_file"]
    named += [word.partition("=")[2] for word in command if word.startswith("--config_file=")]
    path = Path(folder, named[0]) if named else Path(given or "")
    return path if path.is_file() else None


def source_commit() -> str | None:
    """Return the git commit of this program's checkout, with `+changes` if files differ from it; None outside git."""
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+changes", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


@dataclass(frozen=True)
class Opened:
    """The run folder, ready to be written into."""

    claim: Claim
    """Writes into it; only the main process has files open."""
    resumed: Resumed | None
    """The checkpoint that the run resumes from."""
    trackers: Trackers
    """Started trackers; none except on the main process."""
    preset: str | None
    """The preset's name, on the main process, if the command line that launched it has one."""


def find_checkpoint(parts: Parts, options: Namespace) -> Resumed | None:
    """Return what --resume asks for, checked to be whole and of the same run, or None to start from the beginning.

    With --changed-task the user's task file may differ from the checkpoint's. Raises CheckpointError, on all ranks, for a
    checkpoint that cannot be used.
    """
    run_dir, resume = options.run_dir, options.resume
    if resume == checkpoint.NEVER or (resume == checkpoint.AUTO and run_dir is None):
        return None
    runtime, recipe = parts.runtime, parts.loaded.recipe
    place = Path(run_dir if resume == checkpoint.AUTO else resume)
    with runtime.together():
        if runtime.is_main and run_dir is not None:
            run_folder.refuse_links(Path(run_dir))
    folder = checkpoint.find(runtime, place)
    with runtime.together():
        if folder is not None:
            sources, may_differ = tasks.sources(recipe.task), options.changed_task
            return check_same_run(folder, recipe, parts.data.facts, parts.length, sources=sources, may_differ=may_differ)
        if resume != checkpoint.AUTO:
            raise CheckpointError(
                f"--resume is {resume}, where there is no checkpoint: give auto, never, or the path of a checkpoint."
            )
        if runtime.is_main:
            run_folder.check_may_begin_again(place)
    return None


def open_run_folder(
    parts: Parts, options: Namespace, *, trackers: Sequence[str], job: SchedulerJob, origin: Resumed | str | None
) -> Opened:
    """Claim the run folder on the main process, write what is known at the start, and start the trackers.

    With --resume auto the folder may contain a run already, which continues, or starts anew if it has no checkpoint yet.

    `origin` is the checkpoint that the run continues from, or the place of its initial weights. Another start may save until
    the folder is claimed: its checkpoint is then found. Comes after all that can be wrong with a run, so that a corrected one
    can use the same folder.
    """
    runtime, loaded, task = parts.runtime, parts.loaded, parts.task
    hosts = runtime.gather(f"{socket.gethostname()} {runtime.device}")
    ours: Claim | None = None
    is_newer, may_exist = False, options.resume == checkpoint.AUTO
    with runtime.together():
        if runtime.is_main:
            folder, errors = run_folder.choose(options.run_dir, loaded.name, may_exist=may_exist), runtime.launched.errors
            ours = claim(folder, errors.name if errors else None)
            committed = step_folders.committed(ours.path)
            if not committed:
                run_folder.refuse_finished(ours.path)
            is_newer = bool(committed) and not (isinstance(origin, Resumed) and committed[0] == origin.folder)
    if runtime.from_main(is_newer) and may_exist:
        origin = find_checkpoint(parts, options) or origin
    resumed = origin if isinstance(origin, Resumed) else None
    first_step = resumed.step if resumed else 0
    started, preset = Trackers(), launched_preset(runtime.launched.preset_file) if runtime.is_main else None
    with runtime.together():
        if ours is not None:
            logged = run_folder.last_steps(ours.path)
            ours.remove(run_folder.OUTCOME)
            for complaint in ours.go_on_after(first_step):
                print(f"note: {complaint}", flush=True)  # noqa: T201 - the user must know
            if preset is not None:
                ours.write_text(run_folder.PRESET, preset.read_text())
            before = _before(origin, ours.path / run_folder.RUN)
            ours.write_json(run_folder.RUN, {**_describe(parts, preset, hosts), **before})
            ours.write_text(run_folder.RECIPE, recipe_file.to_yaml(loaded.recipe))
            scores = [f"{split}_{name}" for split in parts.data.scored for name in dict.fromkeys([task.monitor[0], "loss"])]
            run = tracked(ours, project=loaded.name, first_step=first_step, logged=logged, scores=scores)
            started.start(trackers, run, recipe_file.flat(loaded.recipe))
            start = ledger.Start(
                from_step=first_step,
                total_steps=parts.length.total_steps,
                training_samples=len(parts.data.train),
                world_size=runtime.launched.world_size,
                preset=preset.stem if preset else None,
                resumed_from=str(resumed.folder) if resumed else None,
                job=job.name,
                submitted=job.submitted,
                allocated=job.allocated,
                launched=round(psutil.Process().create_time(), 3),
            )
            ours.append(run_folder.LEDGER, ledger.line(start))
    path, place = runtime.from_main(None if ours is None else (ours.path, ours.place))
    return Opened(ours or Claim(path, place), resumed, started, preset.stem if preset else None)


def _before(origin: Resumed | str | None, earlier: Path) -> dict[str, Any]:
    """Return what run.json records of earlier starts; `earlier` is the file of the previous start, if there was one."""
    if not isinstance(origin, Resumed):
        return {"init_from": origin} if origin else {}
    found = {"resumed_from": str(origin.folder), "resumed_step": origin.step}
    try:
        before = run_folder.read_json(earlier) if earlier.exists() else {}
    except RunFolderError as error:  # after a power loss
        print(f"note: {error} It is written again, without the values of the run's first start.", flush=True)  # noqa: T201
        before = {}
    return {"init_from": before["init_from"], **found} if "init_from" in before else found


def _describe(parts: Parts, preset: Path | None, hosts: list[str]) -> dict[str, Any]:
    runtime, recipe, task = parts.runtime, parts.loaded.recipe, parts.task
    launched, plan, own = runtime.launched, runtime.plan, {}
    if recipe.task not in tasks.SHIPPED:  # what reports need to know, because they do not read its file
        own = {"task_digest": tasks.digest(recipe.task), "not_learnt": sorted(recipe_file.not_learnt(recipe.task))}
    return {
        "recipe": parts.loaded.name,
        "task": recipe.task,
        **own,
        "monitor": [*task.monitor],
        "unit": task.count_unit,
        "recipe_digest": recipe_file.digest(recipe),
        "preset": preset.stem if preset else None,
        "strategy": launched.strategy,
        "mixed_precision": launched.mixed_precision,
        "tf32": runtime.numerics.tf32,
        "deterministic": runtime.numerics.deterministic,
        "world_size": launched.world_size,
        **launched.divided(),
        "ranks": hosts,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "global_batch_size": plan.global_batch_size,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "commit": source_commit(),
        "versions": {"python": sys.version.split()[0], **handshake.versions()},
    }
