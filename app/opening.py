"""A start of a run, before its first step: finds the checkpoint to resume from, and records this start and its origin.

All ranks call these functions together; the main process writes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app import tasks
from app.checkpoints import checkpoint, step_folders
from app.checkpoints.initial_weights import Initial
from app.checkpoints.resumable import Resumed, check_same_run
from app.data.samples import Splits
from app.distributed import handshake
from app.distributed.runtime import Runtime
from app.environment.launched import SchedulerJob
from app.errors import CheckpointError, RunFolderError
from app.metrics.tracked_run import tracked
from app.metrics.trackers import Trackers
from app.optim.schedule import Length
from app.recipe import recipe_file, recipe_keys
from app.recipe.recipe_file import LoadedRecipe
from app.runs import ledger, run_folder
from app.runs.claim import Claim, claim
from app.task import Task


@dataclass(frozen=True)
class PresetFile:
    """The preset file this process was launched with."""

    name: str
    """File name without its ending."""
    text: str


def launched_preset(told: str | None) -> PresetFile | None:
    """Return the preset that this process was started with, or None if it was started without one.

    `accelerate launch` hands on what the preset says, but not its name: the command line of the parent process has it.
    `samerun launch`, where it starts the process itself, has `told` the file.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent else []
        directory = parent.cwd() if parent else ""
    except psutil.Error:  # the parent is gone, or belongs to somebody else: then its name is not known
        return None
    for position, word in enumerate(command):
        if word == "--config_file" and position + 1 < len(command):
            path = Path(directory, command[position + 1])
        elif word.startswith("--config_file="):
            path = Path(directory, word.partition("=")[2])
        else:
            continue
        return _preset_file(path)
    return _preset_file(Path(told)) if told else None


def _preset_file(path: Path) -> PresetFile | None:
    return PresetFile(path.stem, path.read_text()) if path.is_file() else None


def source_commit() -> str | None:
    """Return the git commit of this program's checkout, with `+changes` if files differ from it; None outside git."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit or None


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


def find_checkpoint(  # noqa: PLR0913  (keyword-only after the parts)
    runtime: Runtime,
    loaded: LoadedRecipe,
    data: Splits,
    length: Length,
    run_dir: str | None,
    resume: str,
    *,
    changed_task: bool = False,
) -> Resumed | None:
    """Return what --resume asks for, checked to be whole and of the same run, or None to start from the beginning.

    `changed_task`: the user's task file may be another than it was.

    Raises CheckpointError, on all ranks, for one that cannot be used.
    """
    if resume == checkpoint.NEVER or (resume == checkpoint.AUTO and run_dir is None):
        return None
    place = Path(run_dir if resume == checkpoint.AUTO and run_dir else resume)
    with runtime.together():
        if runtime.is_main and run_dir is not None:
            run_folder.refuse_links(Path(run_dir))
    folder = checkpoint.find(runtime, place, state=checkpoint.RESUMED)
    if folder is None and resume == checkpoint.AUTO:
        with runtime.together():
            if runtime.is_main:
                run_folder.check_may_begin_again(place)
        return None
    with runtime.together():
        if folder is None:
            raise CheckpointError(
                f"--resume is {resume}, where there is no checkpoint: give auto, never, or the path of a checkpoint."
            )
        sources = tasks.sources(loaded.recipe.task)
        return check_same_run(folder, loaded.recipe, data.facts, length, sources=sources, may_differ=changed_task)


def open_run_folder(  # noqa: PLR0913  (keyword-only after the parts)
    runtime: Runtime,
    loaded: LoadedRecipe,
    task: Task,
    data: Splits,
    wanted: str | None,
    *,
    trackers: Sequence[str],
    origin: Resumed | Initial | None,
    look_again: Callable[[], Resumed | None] | None,
) -> Opened:
    """Claim the run folder on the main process, write what is known at the start, and start the trackers.

    With `look_again` the folder may hold a run already, which goes on, or starts anew where it had no checkpoint yet.

    `origin` is what the run goes on from or begins with; another start may save until the folder is claimed, and then it is
    what `look_again` finds. Comes after all that can be wrong with a run, so that a mended one can use the same folder.
    """
    hosts = runtime.gather(f"{socket.gethostname()} {runtime.device}")
    ours: Claim | None = None
    saved_since = False
    with runtime.together():
        if runtime.is_main:
            folder, errors = run_folder.choose(wanted, loaded.name, may_exist=look_again is not None), runtime.launched.errors
            ours = claim(folder, errors.name if errors else None)
            saved_since = _is_newer(ours.path, origin)
    if runtime.from_main(saved_since) and look_again is not None:
        origin = look_again() or origin
    started, preset = Trackers(), launched_preset(runtime.launched.preset_file) if runtime.is_main else None
    with runtime.together():
        if ours is not None:
            logged = _take_up(ours, origin)
            if preset is not None:
                ours.write_text(run_folder.PRESET, preset.text)
            before = _before(origin, ours.path / run_folder.RUN)
            ours.write_json(run_folder.RUN, {**_describe(runtime, loaded, task, preset, hosts), **before})
            ours.write_text(run_folder.RECIPE, recipe_file.to_yaml(loaded.recipe))
            scores = [f"{split}_{name}" for split in data.scored for name in dict.fromkeys([task.monitor[0], "loss"])]
            run = tracked(ours, project=loaded.name, first_step=_steps_before(origin), logged=logged, scores=scores)
            started.start(trackers, run, recipe_file.flat(loaded.recipe))
    path, place = runtime.from_main(None if ours is None else (ours.path, ours.place))
    resumed = origin if isinstance(origin, Resumed) else None
    return Opened(ours or Claim(path, place), resumed, started, preset.name if preset else None)


def _is_newer(path: Path, origin: Resumed | Initial | None) -> bool:
    """Whether a run folder, now that it is claimed, has another newest checkpoint than `origin`.

    Raises RunFolderError if a run without checkpoints came to its end there in the meantime.
    """
    found = step_folders.committed(path)
    if not found:
        run_folder.refuse_finished(path)
    return bool(found) and not (isinstance(origin, Resumed) and found[0] == origin.folder)


def _take_up(ours: Claim, origin: Resumed | Initial | None) -> dict[str, int]:
    """Drop later steps from the folder's files, and return the last steps they had. Prints what cannot be read."""
    logged = run_folder.last_steps(ours.path)
    ours.remove(run_folder.OUTCOME)
    for complaint in ours.go_on_after(_steps_before(origin)):
        print(f"note: {complaint}", flush=True)  # noqa: T201 - the user must know
    return logged


def _steps_before(origin: Resumed | Initial | None) -> int:
    return origin.step if isinstance(origin, Resumed) else 0


def _before(origin: Resumed | Initial | None, earlier: Path) -> dict[str, Any]:
    """What run.json records of earlier starts; `earlier` is the file of the previous start, if there was one."""
    if not isinstance(origin, Resumed):
        return {"init_from": origin.place} if origin else {}
    told: dict[str, Any] = {}
    if earlier.exists():
        try:
            told = run_folder.read_json(earlier)
        except RunFolderError as error:
            print(f"note: {error} It is written again, without the values of the run's first start.", flush=True)  # noqa: T201
    begun_with = {"init_from": told["init_from"]} if "init_from" in told else {}
    return {**begun_with, "resumed_from": str(origin.folder), "resumed_step": origin.step}


def _describe(
    runtime: Runtime, loaded: LoadedRecipe, task: Task, preset: PresetFile | None, hosts: list[str]
) -> dict[str, Any]:
    plan, (monitored, good_end) = runtime.plan, task.monitor
    return {
        "recipe": loaded.name,
        "task": loaded.recipe.task,
        **_of_own_task(loaded.recipe.task),
        "monitor": [monitored, good_end],
        "unit": task.count_unit,
        "recipe_digest": recipe_file.digest(loaded.recipe),
        "preset": preset.name if preset else None,
        "strategy": runtime.launched.strategy,
        "mixed_precision": runtime.launched.mixed_precision,
        "tf32": runtime.numerics.tf32,
        "deterministic": runtime.numerics.deterministic,
        "world_size": runtime.launched.world_size,
        **runtime.launched.divided(),
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


def _of_own_task(task: str) -> dict[str, Any]:
    """What reports need to know of a task, because they do not read its file."""
    if task in tasks.SHIPPED:
        return {}
    return {"task_digest": tasks.digest(task), "not_learnt": sorted(recipe_keys.not_learnt(task))}


def record_start(runtime: Runtime, opened: Opened, *, total_steps: int, training_samples: int, job: SchedulerJob) -> None:
    """Record in the run's ledger, on the main process, where this start begins and when its job was submitted and allocated."""
    with runtime.together():
        if runtime.is_main:
            start = ledger.Start(
                from_step=opened.resumed.step if opened.resumed else 0,
                total_steps=total_steps,
                training_samples=training_samples,
                world_size=runtime.launched.world_size,
                preset=opened.preset,
                resumed_from=str(opened.resumed.folder) if opened.resumed else None,
                job=job.name,
                submitted=job.submitted,
                allocated=job.allocated,
                launched=round(psutil.Process().create_time(), 3),
            )
            opened.claim.append(run_folder.LEDGER, ledger.line(start))
