"""`samerun submit`: check a job as far as possible without torch, write its script, and submit it to Slurm or PBS.

What would fail after hours in the queue is reported here, all together: recipe and preset, every combination of a sweep, the
batch on the processes of the job, and paths. The script is kept in runs/submitted/, next to its log.

The script holds plain directives for the scheduler, then one command, quoted for the shell. It decides nothing: what differs
between nodes or tasks, the command reads from its environment itself. It holds no value of the environment that it was made in,
so no token and no password.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from app.environment.slurm_variables import for_a_new_job, gpus_of
from app.environment.topology import Degrees, Topology
from app.errors import PresetError, RecipeError, SubmitError, TopologyError, UsageError
from app.options import Parser, positive, value_reader
from app.recipe import optimizers
from app.recipe.recipe_file import load as load_recipe
from app.recipe.recipe_file import replaced
from app.recipe.schema import BatchPlan
from launch import cases, preset
from launch.cases import Combination
from launch.node_command import accelerate_argv
from launch.preset import Preset
from launch.run_module import program
from launch.schedulers import detect
from launch.start import containers, launch, resolved

Scheduler = Literal["slurm", "pbs"]
_SUBMITTERS: dict[Scheduler, tuple[str, ...]] = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}
"""The command that takes the path of a script and prints the id of the job. Slurm is first, as its sites often have a qsub that
calls sbatch."""
_HINT = "or give --data-on-nodes if only the nodes of the job have it"
_RUNS = Path("runs")
_SCRIPTS = _RUNS / "submitted"
# Options of a user that replace a request of ours under another name.
_REPLACES = {
    "--no-requeue": "--requeue",
    "--oversubscribe": "--exclusive",
    "-s": "--exclusive",
    "--mem-per-cpu": "--mem",
    "--mem-per-gpu": "--mem",
}


def submit(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun submit` with these arguments. Prints the job's id, or with --dry-run its script. Raises SamerunError."""
    if argv[:1] == ["--task-of"]:  # in a task of an array
        sweep, run_dir, *launch_argv = argv[1:]
        index, combination = cases.array_task(sweep, environment)
        say(f"task {index} of the array: {' '.join(combination.overrides)}")
        launch_argv = ["--run-dir", str(Path(run_dir) / combination.name), *launch_argv, *combination.overrides]
        return launch.launch(launch_argv, environment, say=say)
    ours, passed_on = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = _parser().parse_all(ours, after_dashes=resolved.options())
    scheduler, text, file = _check(options, passed_on, environment, say)
    if options.dry_run:
        sys.stdout.write(text)
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    command = [*_SUBMITTERS[scheduler], str(file)]
    finished = subprocess.run(command, env=for_a_new_job(environment), capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SubmitError(
            f"`{shlex.join(command)}` ended with exit code {finished.returncode} and submitted no job: "
            f"{finished.stderr.strip() or 'no reason given'}. The script is kept: {file}"
        )
    job_id = finished.stdout.strip().partition(";")[0]  # with several clusters, sbatch names the cluster as well
    say(f"{'Slurm' if scheduler == 'slurm' else 'PBS'} job {job_id}, submitted by {file}")
    sys.stdout.write(f"{job_id}\n")
    return 0


def _check(
    options: argparse.Namespace, passed_on: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Scheduler, str, Path]:
    """Return the scheduler, the job's script and the path for it, and report what it will run.

    Raises SubmitError with everything that is wrong, one problem a line.
    """
    available = [name for name, (program, *_) in _SUBMITTERS.items() if shutil.which(program, path=environment.get("PATH"))]
    scheduler: Scheduler = options.scheduler or (available[0] if available else "slurm")
    problems = []
    if scheduler not in available and not (options.scheduler and options.dry_run):
        programs = _SUBMITTERS[scheduler][0] if options.scheduler else "neither sbatch nor qsub"
        problems.append(f"{programs} is not on the PATH: submit on a login node, or give --scheduler with --dry-run")
    problems += [
        f"{option!r} is no option of a scheduler: it must be one line that begins with -, as in a script"
        for option in options.scheduler_options
        if not option.startswith("-") or not option.isprintable()
    ]
    if options.spares or options.min_nodes:
        problems += filter(None, [resolved.spares_problem(options, options.nodes, is_slurm=scheduler == "slurm")])
    sweep: Sequence[Combination] = ()
    try:
        sweep = cases.combinations(options.array, fixed=options.overrides) if options.array is not None else ()
    except SubmitError as error:
        problems += str(error).splitlines()
    topology, chosen, degrees = _topology(options, environment, problems)
    # The run gets its number of processes, as this number was checked.
    words = ["--processes-per-node", str(topology.processes_per_node), "--recipe", options.recipe]
    defaults = resolved.read([])[0]
    kept = ("preset", "tensor_parallel", "context_parallel", "replicas", "max_requeues", "max_restarts", "spares", "min_nodes")
    for option in (*kept, *containers.OPTIONS):
        if (value := getattr(options, option)) != getattr(defaults, option):
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += [f"--container-option={option}" for option in options.container_options]
    words += [*passed_on, *options.overrides]
    overrides = options.overrides
    try:
        launching, _, training = resolved.read(["--run-dir", "runs", *words])
        overrides = training.overrides
        in_image, resume = options.container_image is not None, launching.resume
        problems += map(str, resolved.problems(training, run_dir=None, resume=resume, inputs={}, in_image=in_image))
    except UsageError as error:
        problems.append(str(error))
    name = options.job_name or re.sub(r"[^A-Za-z0-9._+-]+", "_", Path(options.recipe).stem).lstrip("._+-") or "samerun"
    started = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    stems = itertools.chain([started], (f"{started}-{number}" for number in itertools.count(2)))
    stem = next(stem for stem in stems if not (_SCRIPTS / f"{stem}.sh").exists())
    run_dir = Path(options.run_dir or _RUNS / stem)
    problems += containers.problems(options, run_dir=run_dir, is_slurm=scheduler == "slurm")
    problems += [f"{problem}. Correct it, {_HINT}" for problem in containers.missing(options) if not options.data_on_nodes]
    run_folders = [run_dir / combination.name for combination in sweep] or [run_dir]
    batches: dict[str, None] = {}
    recipe_problems: dict[str, list[str]] = {}
    for index, changed in enumerate([combination.overrides for combination in sweep] or [()]):
        found, recipe = recipe_problems.setdefault(f"task {index} of --array", []), None
        try:
            recipe = load_recipe(options.recipe, replaced(overrides, changed)).recipe
            if chosen and (refusal := optimizers.refusal(recipe.optim.name, chosen.strategy, degrees.tensor_parallel)):
                found.append(refusal)
            ranks, parts = topology.world_size // degrees.processes_per_rank, degrees.processes_per_rank
            batches[str(BatchPlan.of(recipe, ranks, processes_per_rank=parts))] = None
        except RecipeError as error:
            found += error.problems
            recipe = recipe or error.recipe
        if recipe and not options.data_on_nodes:  # variables in a path have their values on the nodes
            inputs = {key: path for key, path in recipe.inputs.items() if path is None or "$" not in path}
            found += [f"{problem}, {_HINT}" for problem in resolved.missing(inputs)]
    problems += [*cases.grouped(recipe_problems), *filter(None, map(resolved.unwritable, (_SCRIPTS, run_dir)))]
    problems += [
        f"{folder} holds a finished run (it has a result.json): choose another --run-dir, or delete the folder"
        for folder in run_folders
        if os.access(folder / "result.json", os.F_OK)  # an unfinished run is resumed
    ]
    if problems:
        raise SubmitError("\n".join(problems))

    starts = ["submit", "--task-of", options.array] if options.array else ["launch", "--run-dir"]
    log = str(_SCRIPTS / (f"{stem}-{{index}}.out" if sweep else f"{stem}.out"))
    text = _script(
        options,
        scheduler,
        name=name,
        log=log,
        tasks=[combination.name for combination in sweep],
        command=[*program("launch.cli"), *starts, str(run_dir), *words],
    )
    for batch in batches:
        say(batch)
    for index, folder in enumerate(run_folders):
        task = f"task {index}, {' '.join(sweep[index].overrides)}: " if sweep else ""
        say(f"{task}run folder {folder}, log {log.format(index=index)}")
    return scheduler, text, _SCRIPTS / f"{stem}.sh"


def _topology(
    options: argparse.Namespace, environment: Mapping[str, str], problems: list[str]
) -> tuple[Topology, Preset | None, Degrees]:
    """Return the processes of the job, with a placeholder for the rendezvous, the preset, and how it shards the model.

    Without --preset it is the one that `samerun launch` takes. What is wrong is added to `problems`.
    """
    by_hand, origin = options.processes_per_node, "--processes-per-node"
    if options.gpus_per_node:
        by_hand, origin = sum(gpus_of(options.gpus_per_node).values()), "--gpus-per-node"
    origins = {"num_nodes": "--nodes", "processes_per_node": origin if by_hand else "default"}
    topology = Topology(
        num_nodes=options.nodes, processes_per_node=by_hand or 1, head_address="the-first-node", port=1, origins=origins
    )
    chosen, degrees = None, Degrees()
    try:
        if options.num_processes is not None:
            each = detect.processes_per_node(options.num_processes, options.nodes, by_hand)
            origins = {**origins, "processes_per_node": "--num_processes"}
            topology = replace(topology, processes_per_node=each, origins=origins)
        chosen = preset.from_options(options) or resolved.default_preset(topology, environment)
        sizes = preset.requested_sizes(options)
        degrees = chosen.degrees(topology, sizes)
        accelerate_argv(topology, chosen, [], sizes=sizes)
    except (PresetError, TopologyError) as error:
        problems += str(error).splitlines()
    return topology, chosen, degrees


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return a reader of option values that refuses all others."""
    return value_reader(str, lambda text: re.fullmatch(pattern, text, re.ASCII) is not None, expected)


def _script(
    options: argparse.Namespace, scheduler: Scheduler, *, name: str, log: str, tasks: Sequence[str], command: Sequence[str]
) -> str:
    """Return the text of the script of a job, or of an array of `tasks`, in the order of the indices.

    An option of the user's replaces the request for the same thing. `{index}` in `log` becomes the scheduler's word for the
    index of an array task. The values have been checked: only `command` may have spaces or line breaks.
    """
    is_slurm = scheduler == "slurm"
    prefix = "#SBATCH" if is_slurm else "#PBS"
    requests = (_slurm_requests if is_slurm else _pbs_requests)(options, name, log, f"0-{len(tasks) - 1}" if tasks else None)
    given = {_REPLACES.get(_key(option), _key(option)) for option in options.scheduler_options}
    lines = [
        "#!/bin/sh",
        f"# Written by `samerun submit` for {_SUBMITTERS[scheduler][0]}.",
        *(f"{prefix} {request}" for request in requests if _key(request) not in given),
        *(f"{prefix} {option}" for option in options.scheduler_options),
        *(["# The tasks of the array, by their run folders:"] if tasks else []),
        *(f"#   {task}" for task in tasks),
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        # A job of PBS has the PATH of a login shell; pbs_tmrsh, which reaches the other nodes, is in PBS's own folder.
        *(["PATH=$PBS_O_PATH:$PATH:/opt/pbs/bin"] if not is_slurm else []),
        f"exec {shlex.join(command)}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _key(option: str) -> str:
    """Return what an option sets: `--mem` for `--mem=0`, `-l select` for `-l select=2:ncpus=8`, `-q` for `-q debug`."""
    words = option.replace("=", " ").split()
    return " ".join(words[:2]) if words[:1] == ["-l"] else words[0] if words else ""


def _slurm_requests(options: argparse.Namespace, name: str, log: str, indices: str | None) -> list[str]:
    requests = {
        "--job-name": name,
        "--nodes": options.nodes + options.spares,
        "--no-kill": "" if options.spares or options.min_nodes else None,  # the run continues without a lost node
        "--ntasks-per-node": 1,
        "--exclusive": "",
        "--mem": "0",
        "--gpus-per-node": options.gpus_per_node,
        "--cpus-per-task": options.cpus_per_node,
        "--time": options.time,
        "--account": options.account,
        "--partition": options.partition,
        "--array": indices,
        "--output": log.format(index="%a"),
        "--requeue": "",  # after a lost node; at the end of its time the run does it itself
        "--open-mode": "append",  # a requeued job continues its log instead of replacing it
    }
    return [f"{option}={value}" if value else option for option, value in requests.items() if value is not None]


def _pbs_requests(options: argparse.Namespace, name: str, log: str, indices: str | None) -> list[str]:
    cpus = f":ncpus={options.cpus_per_node}" if options.cpus_per_node else ""
    gpus = f":ngpus={options.gpus_per_node}" if options.gpus_per_node else ""
    requests = {
        "-N ": name,
        "-l select=": f"{options.nodes}{cpus}{gpus}",
        "-l place=": "scatter:excl",  # else two chunks may be placed on one node
        "-l walltime=": options.time,
        "-A ": options.account,
        "-q ": options.partition,
        "-J ": indices,
        "-j ": "oe",
        "-o ": log.format(index="^array_index^"),
    }
    return [f"{option}{value}" for option, value in requests.items() if value is not None]


def _parser() -> Parser:
    gpus = r"(?:[\w.-]+:)?[1-9]\d*"
    gpus_option = _matching(f"{gpus}(?:,{gpus})*", "a whole number, 1 or more, such as 4 (for Slurm also a100:4)")
    time_limit = r"(?!0+:00:00)\d+:[0-5]\d:[0-5]\d"
    time_option = _matching(time_limit, "hours:minutes:seconds, more than 0, such as 01:30:00")
    word = _matching(r"\w[\w.+@,-]*", "a word of letters, digits and _.+@,-")  # files are named after the job
    parser = Parser("submit", "Check a job, write its script to runs/submitted/ and submit it to Slurm or PBS. The job gets "
        "whole nodes.", usage="%(prog)s --nodes N --time HH:MM:SS [options] [key=value ...]",
        epilog="Other options of `samerun launch` follow after `--`. The script of an array calls `samerun submit --task-of "
        "SWEEP RUN_FOLDERS ...`, which runs `samerun launch ...` with the array task's combination of values.")  # fmt: skip
    parser.add_argument("--nodes", type=positive, required=True, metavar="N", help="number of nodes")
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument("--gpus-per-node", type=gpus_option, metavar="N", help="GPUs on each node, one process per GPU; for "
        "Slurm also with a type, such as a100:4")  # fmt: skip
    processes.add_argument("--processes-per-node", type=positive, metavar="N", help="processes on each node of a job without "
        "GPUs (default: 1)")  # fmt: skip
    parser.add_argument("--cpus-per-node", type=positive, metavar="N", help="CPUs on each node (default: Slurm all of them, "
        "PBS the site's default)")  # fmt: skip
    parser.add_argument("--time", type=time_option, required=True, metavar="HH:MM:SS", help="time limit of the job, or of each "
        "task of an array")  # fmt: skip
    parser.add_argument("--account", type=word, metavar="NAME", help="account to charge")
    parser.add_argument("--partition", type=word, metavar="NAME", help="partition or queue")
    parser.add_argument("--job-name", type=word, metavar="NAME", help="job name (default: the recipe's name)")
    parser.add_argument("--scheduler", choices=_SUBMITTERS, help="default: the one whose sbatch or qsub is on the PATH")
    resolved.add_run_options(parser)
    containers.add_options(parser)
    parser.add_argument("--array", metavar="SWEEP", help="run a sweep: one array task per combination, such as "
        "'optim.lr=0.1,0.2;seed=0,1'")  # fmt: skip
    parser.add_argument("--data-on-nodes", action="store_true", help="do not check data.path and the paths for a container: "
        "only compute nodes have them")  # fmt: skip
    parser.add_argument("--sbatch-option", "--qsub-option", dest="scheduler_options", metavar="OPTION", action="append",
        default=[], help="one more #SBATCH or #PBS line, such as --sbatch-option=--constraint=a100 or --qsub-option='-l "
        "filesystems=home'; may be repeated")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check like `samerun launch --dry-run`, print script and stop")
    parser.take_accelerates_words()
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that override the file's")
    return parser
