"""Train: `accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.train --recipe RECIPE [key=value ...]`.

Puts the parts together and runs them; decides nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from app import options
from app.distributed.watchdog import Lifeline, end_workers
from app.environment import host
from app.environment.launched import Launched, errors_folder, read, read_job
from app.environment.slurm_variables import own_environment
from app.environment.topology import LAUNCHER
from app.errors import (
    STOPPED,
    PresetError,
    RecipeError,
    SamerunError,
    exits_refused,
    is_of_a_lost_peer,
    leave_with,
    skip_destructors_if_failed,
)
from app.recipe import optimizers, recipe_file
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.schema import BatchPlan
from app.runs import run_folder
from app.runs.run_folder import Recorder


def main(argv: list[str] | None = None) -> None:
    """Run one training from the command line. The exit code is that of the error, or STOPPED if the run stopped early."""
    words = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is lost yet: it ends without a traceback
    failed = skip_destructors_if_failed()
    lifeline = Lifeline(os.environ).start()
    launched, recorder = Launched(), Recorder(errors_folder(os.environ))
    try:
        arguments = options.parser().parse_all(words)
        if arguments.print_recipe:
            sys.stdout.write(recipe_file.render(recipe_file.completed(recipe_file.load(arguments.recipe, arguments.overrides))))
            return
        launched = read(own_environment())
        host.guard_stdout(is_needed=False)  # a lost terminal, a closed pipe or a full disk ends no run
        with exits_refused(), host.imports_explained():
            loaded = recipe_file.completed(recipe_file.load(arguments.recipe, arguments.overrides))
            stopped = _train(launched, loaded, arguments, lifeline, recorder)
    except SamerunError as error:
        recorder.record(error, rank=launched.rank)
        leave_with(error, launched.rank)
    except Exception as error:
        recorder.record(error, rank=launched.rank)
        # Launchers end it before: else the log would end with tracebacks of all that lost the first or have the same error.
        time.sleep(10.0 if is_of_a_lost_peer(error) else min(launched.rank, 1))
        end_workers()
        failed.set()
        raise
    if stopped and LAUNCHER not in os.environ:  # `samerun launch` learns of it from the run folder
        if launched.rank != 0:
            time.sleep(1.0)  # a launcher ends the others when the first has ended so
        sys.exit(STOPPED)


def _train(
    launched: Launched, loaded: LoadedRecipe, options_given: argparse.Namespace, lifeline: Lifeline, recorder: Recorder
) -> bool:
    """Train, and return True if the run was stopped before its end."""
    recipe = recipe_file.with_commits_of(loaded.recipe, options_given.run_dir, options_given.resume)
    loaded = replace(loaded, recipe=recipe)
    found = launched.micro_batch
    plan = BatchPlan.of(recipe, launched.data_ranks, processes_per_rank=launched.processes_per_rank, most=found)
    if plan.is_auto and found is None:
        raise RecipeError(
            f"train.max_micro_batch is auto ({loaded.origins['train.max_micro_batch']}), for which the run must be started by "
            f"`samerun launch`: use it, or write a number, such as train.max_micro_batch={plan.micro_batch}"
        )
    if refusal := optimizers.refusal(recipe.optim.name, launched.strategy, launched.tensor_parallel):
        raise PresetError(refusal)
    if over := run_folder.finished(options_given.run_dir, options_given.resume, recipe_file.digest(recipe)):
        sys.stdout.write(f"{over}\n" if launched.rank == 0 else "")
        return False
    trackers = options.trackers(options_given.trackers)
    # Slow imports come after all checks that do not need them.
    from app import attempt, autopsy, session
    from app.checkpoints import initial_weights
    from app.distributed import handshake, numerics
    from app.distributed.runtime import Runtime
    from app.distributed.watchdog import Watchdog
    from app.init import model_tensors
    from app.loop import train
    from app.metrics.clock import waits_timed
    from app.planning.memory import out_of_memory_explained

    runtime = Runtime(
        launched,
        plan,
        clip_norm=recipe.optim.clip_norm,
        tf32=recipe.train.tf32,
        deterministic=recipe.train.deterministic,
        hang_timeout_s=options_given.hang_timeout,
        workers=options_given.workers,
    )
    with out_of_memory_explained(runtime, recipe):
        handshake.check_group(runtime.accelerator, launched, plan)
        parts = session.agree(runtime, loaded)
        resumed = attempt.find_checkpoint(parts, options_given)
        folder = resumed.folder if resumed else None
        initial = initial_weights.load(runtime, parts.task, parts.model, parts.loaded.recipe.train, resumed=folder)
        if resumed is None:
            model_tensors.check_finite(runtime, parts.model, initial or f"the task {recipe.task}")
        job, origin = read_job(os.environ), resumed or initial
        opened = attempt.open_run_folder(parts, options_given, trackers=trackers, job=job, origin=origin)
        recorder.folder = recorder.folder or opened.claim.path / run_folder.ERRORS / opened.claim.place.name
        training = session.prepare(parts, opened)
        if options_given.replay_until:
            training = session.as_replay(training, until=options_given.replay_until)
        # The lifeline lives as long as the process. With the whole training it would keep the loaders, for whose workers, which
        # hear no signal, Python would then wait at its end.
        with training.control as control:
            lifeline.spare_if(lambda: control.is_asked_to_stop)
            watchdog = Watchdog(runtime, opened.claim, recorder, timeout_s=options_given.hang_timeout)
            waits = waits_timed(training.model, training.metrics.clock, runtime.device)
            with waits, watchdog, numerics.refusals_named():
                if options_given.replay_samples:
                    ended = autopsy.examine(training, parts.data.train, Path(options_given.replay_samples))
                else:
                    ended = train(training)
            attempt.finish(training, parts.data, opened, ended)
    return ended.stopped_by.stop


if __name__ == "__main__":
    main()
