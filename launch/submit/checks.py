"""Checks of a job before it is submitted. Each check returns its problems, one sentence each, and raises nothing.

The options are those of `launch/submit/submit.py`, as the user wrote them. Standard library and PyYAML only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from app.environment.degrees import Degrees
from app.environment.launched import Strategy
from app.environment.slurm_variables import gpus_of
from app.environment.topology import Topology
from app.errors import PresetError, RecipeError, TopologyError
from app.recipe import optimizers
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import load as load_recipe
from app.recipe.recipe_file import replaced
from launch import parallelism, preset
from launch.node_command import accelerate_argv
from launch.start import run_checks
from launch.submit import script
from launch.submit.array import Combination
from launch.submit.script import SUBMITTERS, Scheduler

# Options of a scheduler that a user must not give, with ours that replaces each and is checked.
_LOG = "the log beside the script"
_OURS: Mapping[Scheduler, Mapping[str, str]] = {
    "slurm": {
        "--nodes": "--nodes", "-N": "--nodes", "--gpus-per-node": "--gpus-per-node", "--time": "--time", "-t": "--time",
        "--account": "--account", "-A": "--account", "--partition": "--partition", "-p": "--partition",
        "--job-name": "--job-name", "-J": "--job-name", "--array": "--array", "-a": "--array", "--output": _LOG, "-o": _LOG,
    },
    "pbs": {
        "-N": "--job-name", "-l walltime": "--time", "-A": "--account", "-q": "--partition", "-J": "--array", "-o": _LOG,
    },
}  # fmt: skip


def is_count(text: str | None, *, least: int = 1) -> bool:
    """Return whether a text is a whole number, not less than `least`."""
    return text is not None and text.isascii() and text.isdecimal() and int(text) >= least


def form_problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield which options are missing, and which do not have the form that they must have."""
    counts = {"nodes": 1, "processes_per_node": 1, "cpus_per_node": 1, "max_requeues": 0, "max_restarts": 0}
    for name, least in counts.items():
        value = getattr(options, name)
        if value is not None and not is_count(value, least=least):
            yield f"--{name.replace('_', '-')} is {value!r}: it must be a whole number, at least {least}"
    if options.nodes is None:
        yield "--nodes is not given: give the number of nodes of the job"
    gpus = options.gpus_per_node
    if gpus is not None and not all(gpus_by_type(gpus).values()):
        yield f"--gpus-per-node is {gpus!r}: it must be a whole number, at least 1, such as 4 (for Slurm also a100:4)"
    if options.time is None:
        yield "--time is not given: give the time limit of the job, such as 01:30:00 (hours:minutes:seconds)"
    elif not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", options.time, re.ASCII) or not options.time.strip("0:"):
        yield f"--time is {options.time!r}: it must be hours:minutes:seconds, more than 0, such as 01:30:00"
    # Files are named after the job.
    for name, signs in {"account": "_.+@,-", "partition": "_.+@,-", "job_name": "_.+-"}.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(rf"\w[\w{signs}]*", value, re.ASCII):
            yield f"--{name.replace('_', '-')} is {value!r}: it must be a word of letters, digits and {signs}"


def gpus_by_type(gpus_per_node: str) -> dict[str, int]:
    """Return the GPUs of each type that --gpus-per-node asks for, or no GPU if it cannot be read."""
    try:
        return gpus_of(gpus_per_node)
    except ValueError:
        return {gpus_per_node: 0}


def on_path(environment: Mapping[str, str]) -> list[Scheduler]:
    """Return the schedulers whose command is on the PATH. Slurm is first, as its sites often have a qsub that calls sbatch."""
    return [name for name, command in SUBMITTERS.items() if shutil.which(command[0], path=environment.get("PATH"))]


def scheduler_problems(options: argparse.Namespace, scheduler: Scheduler, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what keeps the job from being submitted, and which of the scheduler's own options cannot be used."""
    command = SUBMITTERS[scheduler][0]
    available = on_path(environment)
    if options.scheduler is None and not available:
        yield "neither sbatch nor qsub is on the PATH: submit on a login node, or give --scheduler with --dry-run"
    elif not options.dry_run and scheduler not in available:
        yield f"--scheduler is {scheduler}, but {command} is not on the PATH: submit on a login node, or use --dry-run"
    elif not options.dry_run and scheduler == "pbs" and "SGE_ROOT" in environment:
        yield "SGE_ROOT is set, so this qsub is Grid Engine's, which is not supported: set SAMERUN_HOSTS in your own script"
    if scheduler == "pbs" and any(gpus_by_type(options.gpus_per_node or "0")):
        yield (
            f"--gpus-per-node is {options.gpus_per_node!r}: for PBS it must be a number; give the type with "
            "--qsub-option='-l select=...'"
        )
    own, foreign = options.sbatch_option, options.qsub_option
    if scheduler == "pbs":
        own, foreign = foreign, own
    for option in foreign:
        yield f"{option!r} is an option of another scheduler, but the job is submitted with {command}: remove it"
    for option in own:
        if ours := _OURS[scheduler].get(script.key(option)):
            yield f"--{command}-option is {option!r}: use {ours} instead"
        elif not option.startswith("-") or not option.isprintable():
            yield f"--{command}-option is {option!r}: it must be one line that begins with -, as in a script"


def sharding(options: argparse.Namespace, topology: Topology | None, problems: list[str]) -> tuple[Strategy, Degrees]:
    """Return how the preset shards the model; what is wrong with the preset is added to `problems`.

    Without --preset it is the one that `samerun launch` takes: DDP, unless the options ask for sizes. Without a topology (the
    size of the job could not be read), or if something is wrong, the model is on one rank.
    """
    asked = parallelism.asked_by(options)
    name = options.preset or parallelism.preset_for(asked)
    strategy: Strategy = "ddp"
    degrees = Degrees()
    try:
        if name:
            chosen = preset.load(name)
            strategy = chosen.strategy
            if topology:
                degrees = parallelism.of_launch(chosen.name, chosen.sizes, topology, asked)
                accelerate_argv(topology, chosen, [], sizes=asked)
    except (PresetError, TopologyError) as error:
        problems += str(error).splitlines()
    return strategy, degrees


def divide(
    options: argparse.Namespace,
    overrides: Sequence[str],
    combinations: Sequence[Combination],
    *,
    topology: Topology | None,
    strategy: Strategy,
    degrees: Degrees,
) -> tuple[list[str], list[str]]:
    """Return the batch plans as text, and all problems of the recipe, each once for a whole sweep.

    A problem of some tasks names them. Without a topology the batch is not divided.
    """
    batches: dict[str, None] = {}
    found: dict[str, list[int]] = {}
    changes = [combination.overrides for combination in combinations] or [()]
    for index, changed in enumerate(changes):
        problems: list[str] = []
        try:
            recipe = load_recipe(options.recipe, replaced(overrides, changed)).recipe
            if not options.data_on_nodes:  # variables in a path have their values on the nodes
                inputs = {key: path for key, path in recipe.inputs.items() if path is None or "$" not in path}
                suffix = ", or give --data-on-nodes if only the nodes of the job have it"
                problems += (f"{problem}{suffix}" for problem in run_checks.missing(inputs))
            if refusal := optimizers.refusal(recipe.optim.name, strategy):
                problems.append(refusal)
            if topology:
                ranks = topology.world_size // degrees.tensor_parallel
                batches[str(BatchPlan.of(recipe, ranks, tensor_parallel=degrees.tensor_parallel))] = None
        except RecipeError as error:
            problems += error.problems
        for problem in problems:
            found.setdefault(problem, []).append(index)
    return list(batches), [
        problem if len(tasks) == len(changes) else f"{problem} (task {', '.join(map(str, tasks))} of --array)"
        for problem, tasks in found.items()
    ]


def folder_problems(folders: Sequence[Path]) -> Iterator[str]:
    """Yield which folders cannot be created and written, or hold a finished run. An unfinished run is resumed."""
    yield from run_checks.unwritable(folders)
    for folder in folders:
        if os.access(folder / "result.json", os.F_OK):
            yield f"{folder} holds a finished run (it has a result.json): choose another --run-dir, or delete the folder"
