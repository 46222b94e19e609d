"""The end of an attempt: writes weights and result, or shows how to resume a stopped run."""

from __future__ import annotations

from typing import Any

from app import building, tasks
from app.checkpoints import step_folders, stored_weights
from app.checkpoints.sharded_state import unwrapped
from app.data.samples import Splits
from app.guard.control import NOTHING
from app.loop import Finished, Stopped, Training
from app.opening import Opened
from app.recipe import recipe_file
from app.runs import ledger, model_card, run_folder
from app.task import overrides


def finish(training: Training, data: Splits, opened: Opened, ended: Finished | Stopped) -> None:
    """Write the weights and the result, or show how to resume a stopped run; then close the process group."""
    claim, run_dir = opened.claim, opened.claim.path
    training.profile.close()
    if isinstance(ended, Stopped):
        saved = step_folders.path_of(run_dir, ended.step)
        words = (
            f"stopped after step {ended.step} of {training.length.total_steps}, because {ended.request.why}\n"
            f"saved as {saved}; resume it with the same command, --resume auto and --run-dir {run_dir}"
        )
        outcome, request, why_early = "stopped", ended.request, ""
    else:
        words = _write_result(training, data, opened, ended)
        outcome, request, why_early = "finished", NOTHING, ended.why_early
    with training.runtime.together():
        if training.runtime.is_main:
            claim.append(run_folder.LEDGER, ledger.line(ledger.End(step=ended.step, outcome=outcome)))
            claim.sync()
            training.control.record_outcome(ended.step, request, why_early=why_early)
    training.display.close()
    training.display.say(words)
    training.metrics.trackers.finish()
    claim.close()
    training.runtime.close(training.model, training.steps.optimizer, training.feed.batches)


def _write_result(training: Training, data: Splits, opened: Opened, ended: Finished) -> str:
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
            stored_weights.save(
                opened.claim,
                stored_weights.described(training.recipe, facts),
                stored_weights.merged(weights, task.adapters(unwrapped(training.model))),
                files,
            )
    steps = ended.step - training.first_step  # none if a finished run was resumed
    samples_per_s = steps * runtime.plan.global_batch_size / training_s if steps else None
    scored: dict[str, Any] = {}
    for scores in ended.scores.values():
        scored |= {**scores.as_metrics(), f"{scores.split}_samples": scores.samples, **scores.as_tables()}
    result = {
        "steps": ended.step,
        **({"stopped_early_at_step": ended.step, "stopped_early_because": ended.why_early} if ended.why_early else {}),
        "samples_seen": ended.step * runtime.plan.global_batch_size,
        **scored,
        "samples_per_s": samples_per_s,
        **training.metrics.units.result(training_s, steps=steps),
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
