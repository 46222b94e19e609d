"""Train: `accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.train --recipe RECIPE [key=value ...]`.

Puts the parts together and runs them; decides nothing.
"""

from __future__ import annotations

import argparse
import os
import sys

from app import recipe_file
from app.batching import BatchPlan
from app.errors import SamerunError, leave_with, let_the_first_be_seen
from app.launched import Launched, read, read_job
from app.recipe_file import LoadedRecipe

_HANG_TIMEOUT_S = 540
"""Longer than a first step with its compilation takes, and less than the 600 s after which NCCL ends a process, which says
nothing of where it stood (docs.pytorch.org/docs/stable/distributed.html, `init_process_group`); gloo takes 1800 s."""


def main(argv: list[str] | None = None) -> None:
    """Run one training from the command line; ends the process with the error's exit code if it fails."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    launched = Launched()
    try:
        if arguments.print_recipe:
            sys.stdout.write(recipe_file.render(recipe_file.load(arguments.recipe, arguments.overrides)))
            return
        launched = read(os.environ)
        _train(launched, recipe_file.load(arguments.recipe, arguments.overrides), arguments)
    except SamerunError as error:
        leave_with(error, launched.rank)
    except Exception as error:
        port = os.environ.get("MASTER_PORT")
        let_the_first_be_seen(error, store_port=int(port) if port else None)
        raise


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="accelerate launch --config_file accelerate_configs/PRESET.yaml -m app.train",
        description="Train what a recipe says, on the processes that a preset starts.",
        epilog="recipe keys:\n\n" + recipe_file.reference() if {"-h", "--help"} & set(argv) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="digits", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder for all that the run writes (default: runs/<recipe>-<time>)")
    parser.add_argument(
        "--trackers",
        default="tensorboard",
        help="comma-separated Accelerate trackers, such as tensorboard,wandb; or none (default: tensorboard)",
    )
    parser.add_argument("--resume", default="never", metavar="auto|never|PATH", help="go on from a checkpoint: auto takes the "
                        "newest of --run-dir, if it has one; PATH is a run folder or a checkpoint (default: never)"
                        )  # fmt: skip
    parser.add_argument("--init-from", metavar="PATH", help="begin with these weights, as for fine-tuning: a safetensors "
                        "file, a run folder or a checkpoint; the last layer stays new if it is of other classes"
                        )  # fmt: skip
    parser.add_argument("--hang-timeout", type=int, default=_HANG_TIMEOUT_S, metavar="SECONDS", help="end the run, with the "
                        "stacks of all processes in RUN/stacks, when it stood still for so long; it has to be longer than any "
                        f"step, forward pass of an evaluation and save takes; 0: never (default: {_HANG_TIMEOUT_S})"
                        )  # fmt: skip
    parser.add_argument("--print-recipe", action="store_true", help="print every value and where it came from, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that replace those of the file")
    return parser.parse_intermixed_args(argv)


def _train(launched: Launched, loaded: LoadedRecipe, arguments: argparse.Namespace) -> None:
    recipe = loaded.recipe
    plan = BatchPlan.of(recipe, launched.world_size)
    # Only now the slow imports: what was wrong so far has been said.
    from app import building, ending, handshake, opening, session
    from app.checkpoints import initial_weights
    from app.loop import train
    from app.runtime import Runtime
    from app.watchdog import Watchdog

    runtime = Runtime(launched, plan, clip_norm=recipe.optim.clip_norm)
    handshake.check_group(runtime.accelerator, launched, plan)
    data = building.open_data(runtime, recipe)
    parts = session.agree(runtime, loaded, data)
    resumed = opening.find_checkpoint(runtime, loaded, data, parts.length, arguments.run_dir, arguments.resume)
    initial = initial_weights.take_up(runtime, parts.model, arguments.init_from, resumed=resumed.folder if resumed else None)
    opened = opening.open_run_folder(
        runtime,
        loaded,
        arguments.run_dir,
        trackers=arguments.trackers,
        origin=resumed or initial,
        may_exist=arguments.resume == "auto",
    )
    opening.record_start(
        runtime,
        opened.folder,
        total_steps=parts.length.total_steps,
        training_samples=len(data.train),
        resumed=resumed,
        job=read_job(os.environ),
    )
    training = session.prepare(runtime, loaded, data, parts, opened, resumed)
    with training.control:
        with Watchdog(runtime, opened.folder, timeout_s=arguments.hang_timeout):
            ended = train(training)
        ending.finish(training, data, opened.folder, ended)


if __name__ == "__main__":
    main()
