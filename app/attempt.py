"""An attempt at a run: finds the checkpoint to resume from, opens the run folder, and at the end writes weights and result.

All ranks call these functions together; the main process writes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from app import building, tasks
from app.building import Parts
from app.checkpoints import checkpoint, step_folders, stored_weights
from app.checkpoints.checkpoint import Resumed, check_same_run
from app.checkpoints.sharded_state import unwrapped
from app.data.mixture import Mixture
from app.data.samples import Splits
from app.distributed import handshake, model_preparation
from app.errors import CheckpointError, RunFolderError
from app.loop import Ended, Training
from app.metrics.trackers import Trackers, tracked
from app.recipe import recipe_file
from app.runs import ledger, model_card, run_folder
from app.runs.claim import Claim, claim
from app.task import overrides


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


def typed_command() -> list[str]:
    """Return the command that the user typed: from the outermost parent process that is `samerun` or `accelerate launch`."""
    typed = sys.argv
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            names = ["samerun" if word == "launch.cli" else Path(word).name for word in words]
            for number, (name, command) in enumerate(pairwise(names[:6])):
                if name in ("samerun", "accelerate") and command in ("launch", "sweep", "scale", "parity", "train"):
                    typed = [name, *words[number + 1 :]]
                    break
    return typed


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
    if resume == checkpoint.AUTO:
        place = runtime.from_main(_began_at(place) or place)
    newest = next(iter(step_folders.candidates(place)), None)
    folder = checkpoint.find(runtime, place)
    with runtime.together():
        if folder is not None:
            sources, may_differ = tasks.sources(recipe.task), options.changed_task
            same = check_same_run(folder, recipe, parts.data.facts, parts.length, sources=sources, may_differ=may_differ)
            return replace(same, newest=newest)
        if resume != checkpoint.AUTO:
            raise CheckpointError(f"--resume is {resume}, where there is no checkpoint: give auto, never or the path of one.")
        if runtime.is_main:
            run_folder.refuse_finished(place)
            if (place / run_folder.RECIPE).exists():
                print(f"{place} has no checkpoint yet: the run starts from step 1", flush=True)  # noqa: T201
    return None


def _began_at(run_dir: Path) -> Path | None:
    """Return the checkpoint of another run that a run without checkpoints of its own has begun with, if it is there."""
    with suppress(RunFolderError, TypeError):
        about = run_folder.read_json(run_dir / run_folder.RUN)
        if "resumed_from" in about and not step_folders.committed(run_dir):
            origin = Path(about.get("directory", ""), about["resumed_from"])
            return origin if step_folders.is_checkpoint(origin) else None
    return None


def open_run_folder(
    parts: Parts, options: Namespace, *, trackers: Sequence[str], job: dict[str, Any], origin: Resumed | str | None
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
            is_newer = bool(committed) and not (isinstance(origin, Resumed) and committed[0] == origin.newest)
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
                shuffled=not isinstance(parts.data.train, Mixture),
                world_size=runtime.launched.world_size,
                preset=preset.stem if preset else None,
                resumed_from=str(resumed.folder) if resumed else None,
                **job,
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
        print(f"note: {error} It is written again, without the values of the run's first attempt.", flush=True)  # noqa: T201
        before = {}
    return {"init_from": before["init_from"], **found} if "init_from" in before else found


def _describe(parts: Parts, preset: Path | None, hosts: list[str]) -> dict[str, Any]:
    runtime, recipe, task = parts.runtime, parts.loaded.recipe, parts.task
    launched, plan, own = runtime.launched, runtime.plan, {}
    if recipe.task not in tasks.SHIPPED:  # what reports need to know, because they do not read its file
        own = {"task_digest": tasks.digest(recipe.task), "not_learnt": sorted(recipe_file.marked("not_learnt", recipe.task))}
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
        "data": parts.data.facts,
        "batch_norms": len(model_preparation.unsynchronized_batchnorms(parts.model)),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": typed_command(),
        "directory": str(Path.cwd()),
        "commit": source_commit(),
        "versions": {"python": sys.version.split()[0], **handshake.versions()},
    }


def finish(training: Training, data: Splits, opened: Opened, ended: Ended) -> None:
    """Write the weights and the result, or show how to resume a stopped run; then close the process group."""
    claim, is_stopped = opened.claim, ended.stopped_by.stop
    training.profile.close()
    if is_stopped and not ended.stopped_by.save:
        words = f"replayed up to step {ended.step}"
    elif is_stopped:
        words = (
            f"stopped after step {ended.step} of {training.length.total_steps}, because {ended.stopped_by.why}\n"
            f"saved as {step_folders.path_of(claim.path, ended.step)}; resume it with the same command, --resume auto and "
            f"--run-dir {claim.path}"
        )
    else:
        words = _write_result(training, data, opened, ended)
    with training.runtime.together():
        if training.runtime.is_main:
            end = ledger.End(step=ended.step, outcome="stopped" if is_stopped else "finished")
            claim.append(run_folder.LEDGER, ledger.line(end))
            claim.sync()
            training.control.record_outcome(ended.step, ended.stopped_by, why_early=ended.why_early)
    training.display.say(words)
    training.metrics.trackers.finish()
    claim.close()
    training.runtime.close(training.model, training.steps.optimizer, training.feed.batches)


def _write_result(training: Training, data: Splits, opened: Opened, ended: Ended) -> str:
    """Write weights and result, and return the last words of the run."""
    runtime, task, facts = training.runtime, training.task, data.train.facts
    training_s = training.metrics.clock.training_s
    with training.checkpoints.finished_weights(ended.step) as weights, runtime.together():
        if runtime.is_main:
            files: dict[str, bytes] = {}
            if overrides(task, "export_files"):
                metrics = {name: score for found in ended.scores.values() for name, score in found.as_metrics().items()}
                info: dict[str, Any] = {"recipe": recipe_file.flat(training.recipe), "steps": ended.step, "scores": metrics}
                info["run"] = run_folder.read_json(opened.claim.path / run_folder.RUN)
                card = tasks.card(training.recipe.task, facts, info["recipe"])
                files = {**task.export_files(facts, info), model_card.FILE: model_card.written(card, info)}
            written = stored_weights.for_files(weights, task, unwrapped(training.model))
            stored_weights.save(opened.claim, stored_weights.described(training.recipe, facts), written, files)
    steps = ended.step - training.first_step  # none if a finished run was resumed
    samples_per_s = steps * runtime.plan.global_batch_size / training_s if steps else None
    scored: dict[str, Any] = {}
    for scores in ended.scores.values():
        scored |= {**scores.as_metrics(), f"{scores.split}_samples": scores.samples}
        scored |= {f"{scores.split}_{name}": table for name, table in scores.tables.items()}
    result = {
        "steps": ended.step,
        **({"stopped_early_at_step": ended.step, "stopped_early_because": ended.why_early} if ended.why_early else {}),
        "samples_seen": ended.step * runtime.plan.global_batch_size,
        **scored,
        "samples_per_s": samples_per_s,
        **training.metrics.units.result(training_s, steps=steps),
        **training.metrics.sources.result(),
        "training_s": training_s,
        "world_size": runtime.launched.world_size,
        **runtime.launched.divided(),
        "preset": opened.preset,
    }
    with runtime.together():
        if runtime.is_main:
            for split, scores in list(ended.scores.items())[-1:]:  # the test split, or else validation
                if scores.rows is not None and overrides(task, "write_outputs"):
                    samples = building.scored_samples(training.recipe, data, split)
                    with opened.claim.staged(run_folder.predictions(split)) as folder:
                        folder.mkdir()
                        task.write_outputs(folder, samples, scores.rows)
            opened.claim.write_json(run_folder.RESULT, result)
    unit, speed = task.count_unit, result[f"{task.count_unit}_per_s"]
    words = "".join(f"{scores.in_words(task.monitor[0])} on {scores.samples:,} samples; " for scores in ended.scores.values())
    return f"{words}{'no steps were left' if speed is None else f'{speed:,.0f} {unit}/s'}\nrun folder {opened.claim.path}"
