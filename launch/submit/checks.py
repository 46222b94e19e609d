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
from app.environment.slurm_variables import gpus_of
from app.environment.topology import Topology
from app.errors import PresetError, RecipeError, TopologyError
from app.recipe import optimizers
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import load as load_recipe
from app.recipe.recipe_file import replaced
from app.recipe.schema import Recipe
from launch import parallelism, preset
from launch.node_command import accelerate_argv
from launch.start import run_checks
from launch.submit import script
from launch.submit.array import Combination
from launch.submit.script import SUBMITTERS, Scheduler

# What a scheduler's option must not say, because one of ours does and is checked, or because it is told to the user.
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
    """Whether it is a whole number, not less than `least`."""
    return text is not None and text.isascii() and text.isdecimal() and int(text) >= least


def form_problems(options: argparse.Namespace) -> Iterator[str]:
    """What is missing, and what is not of the form it must have."""
    yield from _count_problems(options, "nodes", "processes_per_node", "cpus_per_node", least=1)
    yield from _count_problems(options, "max_requeues", "max_restarts", least=0)
    if options.nodes is None:
        yield "--nodes is not given: give the number of nodes of the job"
    gpus = options.gpus_per_node
    if gpus is not None and not all(gpus_by_type(gpus).values()):
        yield f"--gpus-per-node is {gpus!r}: it must be a whole number, at least 1, such as 4 (for Slurm also a100:4)"
    if options.time is None:
        yield "--time is not given: give the time limit of the job, such as 01:30:00 (hours:minutes:seconds)"
    elif not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", options.time, re.ASCII) or not options.time.strip("0:"):
        yield f"--time is {options.time!r}: it must be hours:minutes:seconds, more than 0, such as 01:30:00"
    for name in ("account", "partition", "job_name"):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(r"\w[\w.+@,-]*", value, re.ASCII):
            yield f"--{name.replace('_', '-')} is {value!r}: it must be a word of letters, digits and _.+@,-"
        elif name == "job_name" and value is not None and set("@,") & set(value):
            yield f"--job-name is {value!r}: it must be a word of letters, digits and _.+-, because files are named after it"


def gpus_by_type(gpus_per_node: str) -> dict[str, int]:
    """Return the GPUs of each type that --gpus-per-node asks for, or no GPU if it cannot be read."""
    try:
        return gpus_of(gpus_per_node)
    except ValueError:
        return {gpus_per_node: 0}


def _count_problems(options: argparse.Namespace, *names: str, least: int) -> Iterator[str]:
    for name in names:
        value = getattr(options, name)
        if value is not None and not is_count(value, least=least):
            yield f"--{name.replace('_', '-')} is {value!r}: it must be a whole number, at least {least}"


def choose_scheduler(options: argparse.Namespace, environment: Mapping[str, str]) -> Scheduler:
    """Return where the job goes: Slurm where sbatch is on the PATH, as its sites often have a qsub that calls sbatch."""
    there: list[Scheduler] = [name for name in SUBMITTERS if _is_there(name, environment)]
    scheduler: Scheduler = options.scheduler or (there[0] if there else "slurm")
    return scheduler


def scheduler_problems(options: argparse.Namespace, scheduler: Scheduler, environment: Mapping[str, str]) -> Iterator[str]:
    """What keeps the job from being handed over, and which of the scheduler's own options cannot be taken over."""
    command = SUBMITTERS[scheduler][0]
    if options.scheduler is None and not any(_is_there(name, environment) for name in SUBMITTERS):
        yield "neither sbatch nor qsub is on the PATH: submit on a login node, or give --scheduler with --dry-run"
    elif not options.dry_run and not _is_there(scheduler, environment):
        yield f"--scheduler is {scheduler}, but {command} is not on the PATH: submit on a login node, or use --dry-run"
    elif not options.dry_run and scheduler == "pbs" and "SGE_ROOT" in environment:
        yield "SGE_ROOT is set, so this qsub is Grid Engine's, which is not supported: set SAMERUN_HOSTS in your own script"
    if scheduler == "pbs" and any(gpus_by_type(options.gpus_per_node or "0")):
        yield (
            f"--gpus-per-node is {options.gpus_per_node!r}: for PBS it must be a number; give the type with "
            "--qsub-option='-l select=...'"
        )
    for option in options.qsub_option if scheduler == "slurm" else options.sbatch_option:
        yield f"{option!r} is an option of another scheduler, but the job is submitted with {command}: remove it"
    for option in options.sbatch_option if scheduler == "slurm" else options.qsub_option:
        ours = _OURS[scheduler].get(script.key(option))
        if ours:
            yield f"--{command}-option is {option!r}: use {ours} instead"
        elif not option.startswith("-") or not option.isprintable():
            yield f"--{command}-option is {option!r}: it must be one line that begins with -, as in a script"


def _is_there(scheduler: Scheduler, environment: Mapping[str, str]) -> bool:
    return shutil.which(SUBMITTERS[scheduler][0], path=environment.get("PATH")) is not None


def preset_problems(options: argparse.Namespace, topology: Topology | None) -> list[str]:
    """What is wrong with the preset, by itself and, where the size of the job could be read, on as many processes."""
    try:
        chosen = _preset(options)
        if chosen and topology:
            accelerate_argv(topology, chosen, [], sizes=parallelism.asked_by(options))
    except (PresetError, TopologyError) as error:
        return str(error).splitlines()
    return []


def _preset(options: argparse.Namespace) -> preset.Preset | None:
    """The one that is named, or that `samerun launch` takes for the sizes that are asked for; None: another, of DDP."""
    name = options.preset or parallelism.preset_for(parallelism.asked_by(options))
    return preset.load(name) if name else None


def _strategy(options: argparse.Namespace) -> str:
    try:
        chosen = _preset(options)
    except PresetError:  # which is said of the preset
        return "ddp"
    return chosen.strategy if chosen else "ddp"


def degrees(options: argparse.Namespace, topology: Topology | None) -> Degrees:
    """Return by how much the model is divided; what is wrong with that is said of the preset."""
    try:
        chosen = _preset(options)
        asked = parallelism.asked_by(options)
        return parallelism.of_launch(chosen.name, chosen.sizes, topology, asked) if chosen and topology else Degrees()
    except (PresetError, TopologyError):
        return Degrees()


def divide(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    topology: Topology | None,
    degrees: Degrees,
    combinations: Sequence[Combination],
) -> tuple[list[str], list[str]]:
    """Return the batch plans as text, and all problems of the recipe, each once for a whole sweep.

    A problem of some tasks names them. Without a topology (its size could not be read) the batch is not divided.
    """
    batches: dict[str, None] = {}
    found: dict[str, list[int]] = {}
    changes = [combination.overrides for combination in combinations] or [()]
    strategy = _strategy(options)
    for index, changed in enumerate(changes):
        problems: Sequence[str] = ()
        try:
            recipe = load_recipe(options.recipe, replaced(overrides, changed)).recipe
            problems = [] if options.data_on_nodes else list(_of_inputs(recipe))
            problems += filter(None, [optimizers.refusal(recipe.optim.name, strategy)])
            if topology:
                divided = degrees.tensor_parallel
                batches[str(BatchPlan.of(recipe, topology.world_size // divided, tensor_parallel=divided))] = None
        except RecipeError as error:
            problems = [*problems, *error.problems]
        for problem in problems:
            found.setdefault(problem, []).append(index)
    return list(batches), [
        problem if len(tasks) == len(changes) else f"{problem} (task {', '.join(map(str, tasks))} of --array)"
        for problem, tasks in found.items()
    ]


def _of_inputs(recipe: Recipe) -> Iterator[str]:
    """What of the recipe's inputs is not there. What variables stand for is only known on the nodes."""
    known = {key: path for key, path in recipe.inputs.items() if path is None or "$" not in path}
    return (f"{problem}, or give --data-on-nodes if only the nodes of the job have it" for problem in run_checks.missing(known))


def folder_problems(folders: Sequence[Path]) -> Iterator[str]:
    """Which folders cannot be made and written, or hold a finished run. An unfinished one goes on."""
    yield from run_checks.unwritable(folders)
    for folder in folders:
        if os.access(folder / "result.json", os.F_OK):
            yield f"{folder} holds a finished run (it has a result.json): choose another --run-dir, or delete the folder"
