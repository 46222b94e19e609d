"""`samerun submit`: check a job as far as possible without torch, write its script, and submit it to Slurm or PBS.

What would fail after hours in the queue is reported here, all together: recipe and preset, every combination of a sweep, the
batch on the processes of the job, paths, and the form of the options. The script is kept in runs/submitted/, next to its log.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.environment.slurm_variables import for_a_new_job
from app.environment.topology import Topology
from app.errors import SubmitError, UsageError
from app.options import Parser
from launch.run_module import program
from launch.start import launch, run_checks
from launch.submit import array, checks, script
from launch.submit.array import Combination
from launch.submit.script import SUBMITTERS, JobRequest, Scheduler

_RUNS = Path("runs")
_SCRIPTS = _RUNS / "submitted"
_OF_LAUNCH = ("recipe", "preset", "run_dir", "processes_per_node", "num_processes", "max_requeues", "max_restarts",
              "tensor_parallel", "replicas")  # fmt: skip
"""Options of `samerun launch` that the script gives itself."""
_SCHEDULERS = {"slurm": "Slurm", "pbs": "PBS"}


def submit(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun submit` with these arguments. Prints the job's id, or with --dry-run its script. Raises SamerunError."""
    if argv[:1] == ["--task-of"]:  # in a task of an array
        sweep, run_dir, *launch_argv = argv[1:]
        index, combination = array.chosen(sweep, environment)
        say(f"task {index} of the array: {' '.join(combination.overrides)}")
        launch_argv = ["--run-dir", str(Path(run_dir) / combination.folder), *launch_argv, *combination.overrides]
        return launch.launch(launch_argv, environment, say=say)
    ours, passed_on = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = _parser().parse_all(ours, also=launch.options())
    _divide_total(options)
    job, file = _check(options, passed_on, environment, say)
    if options.dry_run:
        sys.stdout.write(script.render(job))
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script.render(job))
    command = [*SUBMITTERS[job.scheduler], str(file)]
    finished = subprocess.run(command, env=for_a_new_job(environment), capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise SubmitError(
            f"`{shlex.join(command)}` ended with exit code {finished.returncode} and submitted no job: "
            f"{finished.stderr.strip() or 'no reason given'}. The script is kept: {file}"
        )
    job_id = finished.stdout.strip().partition(";")[0]  # with several clusters, sbatch names the cluster as well
    say(f"{_SCHEDULERS[job.scheduler]} job {job_id}, submitted by {file}")
    sys.stdout.write(f"{job_id}\n")
    return 0


def _divide_total(options: argparse.Namespace) -> None:
    """Take --num_processes, Accelerate's number of all processes, as the number on each node."""
    total = options.num_processes
    by_hand = _processes_per_node(options) if options.processes_per_node or options.gpus_per_node else ""
    if total is None or not checks.is_count(options.nodes):
        return
    each, left = divmod(total, int(options.nodes))
    if left or by_hand not in ("", str(each)):
        of_each = f", and the options ask for {by_hand} per node" if by_hand else ""
        raise SubmitError(
            f"--num_processes is {total}, the total number of processes, on {options.nodes} nodes{of_each}: "
            "remove it, and give --gpus-per-node or --processes-per-node"
        )
    options.processes_per_node = None if options.gpus_per_node else str(each)


def _processes_per_node(options: argparse.Namespace) -> str:
    return str(options.processes_per_node or sum(checks.gpus_by_type(options.gpus_per_node or "1").values()))


def _check(
    options: argparse.Namespace, passed_on: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[JobRequest, Path]:
    """Return the job and the path of its script, and report what it will run.

    Raises SubmitError with everything that is wrong, one problem a line.
    """
    available = checks.on_path(environment)
    scheduler: Scheduler = options.scheduler or (available[0] if available else "slurm")
    problems = [*checks.form_problems(options), *checks.scheduler_problems(options, scheduler, environment)]
    combinations: Sequence[Combination] = ()
    try:
        combinations = array.parse(options.array, fixed=options.overrides) if options.array is not None else ()
    except SubmitError as error:
        problems += str(error).splitlines()
    overrides = [*options.overrides, *_check_passed_on(passed_on, problems)]
    topology = _topology(options)
    strategy, degrees = checks.sharding(options, topology, problems)
    batches, found = checks.divide(options, overrides, combinations, topology=topology, strategy=strategy, degrees=degrees)
    name = options.job_name or re.sub(r"[^A-Za-z0-9._+-]+", "_", Path(options.recipe).stem).lstrip("._+-") or "samerun"
    started = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    stems = itertools.chain([started], (f"{started}-{number}" for number in itertools.count(2)))
    stem = next(stem for stem in stems if not (_SCRIPTS / f"{stem}.sh").exists())
    run_dir = Path(options.run_dir or _RUNS / stem)
    run_folders = [run_dir / combination.folder for combination in combinations] or [run_dir]
    problems += [*found, *checks.folder_problems([_SCRIPTS, *run_folders])]
    if problems:
        raise SubmitError("\n".join(problems))

    # The run gets its number of processes, as this number was checked.
    words = ["--processes-per-node", _processes_per_node(options), "--recipe", options.recipe]
    for option in ("preset", "tensor_parallel", "replicas", "max_requeues", "max_restarts"):
        value = getattr(options, option)
        words += [f"--{option.replace('_', '-')}", str(value)] if value is not None else []
    starts = ["submit", "--task-of", options.array] if options.array else ["launch", "--run-dir"]
    job = JobRequest(
        scheduler=scheduler,
        name=name,
        nodes=int(options.nodes),
        gpus_per_node=options.gpus_per_node,
        cpus_per_node=int(options.cpus_per_node) if options.cpus_per_node else None,
        time=options.time,
        account=options.account,
        partition=options.partition,
        log=str(_SCRIPTS / (f"{stem}-{{index}}.out" if combinations else f"{stem}.out")),
        tasks=[combination.folder for combination in combinations],
        options=options.sbatch_option if scheduler == "slurm" else options.qsub_option,
        folder=str(Path.cwd()),
        command=[*program("launch.cli"), *starts, str(run_dir), *words, *passed_on, *options.overrides],
    )
    for batch in batches:
        say(batch)
    for index, folder in enumerate(run_folders):
        task = f"task {index}, {' '.join(combinations[index].overrides)}: " if combinations else ""
        say(f"{task}run folder {folder}, log {job.log.format(index=index)}")
    return job, _SCRIPTS / f"{stem}.sh"


def _check_passed_on(passed_on: Sequence[str], problems: list[str]) -> list[str]:
    """Return the recipe values among the words after `--`; what the launch would refuse in the rest is added to `problems`."""
    try:
        launching, _, training = launch.read(passed_on)
    except UsageError as error:
        problems.append(str(error))
        return []
    defaults = vars(launch.read([])[0])
    ours = [name for name in _OF_LAUNCH if vars(launching)[name] != defaults[name]]
    problems += [f"--{name.replace('_', '-')} is given after --: give it before --, where it is checked" for name in ours]
    problems += map(str, run_checks.problems(training, run_dir=None, resume=launching.resume))
    return list(training.overrides)


def _topology(options: argparse.Namespace) -> Topology | None:
    """Return the processes of the job, with a placeholder for the rendezvous; None if their number cannot be read."""
    processes_per_node = _processes_per_node(options)
    if not checks.is_count(options.nodes) or not checks.is_count(processes_per_node):
        return None
    by = "--processes-per-node" if options.processes_per_node else "--gpus-per-node" if options.gpus_per_node else "default"
    return Topology(
        num_nodes=int(options.nodes),
        processes_per_node=int(processes_per_node),
        head_address="the-first-node",
        port=1,
        origins={"num_nodes": "--nodes", "processes_per_node": by},
    )


def _parser() -> Parser:
    parser = Parser(
        prog="samerun submit",
        usage="%(prog)s --nodes N --time HH:MM:SS [options] [key=value ...] [-- options of samerun launch or app.train]",
        description="Check a job, write its script to runs/submitted/ and submit it to Slurm or PBS. The job gets whole nodes.",
        epilog="The script of an array calls `samerun submit --task-of SWEEP RUN_FOLDERS ...`, which runs `samerun launch "
        "...` with the array task's combination of values.",
    )
    parser.add_argument("--nodes", metavar="N", help="number of nodes")
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument(
        "--gpus-per-node",
        metavar="G",
        help="GPUs on each node, one process per GPU; for Slurm also with a type, such as a100:4",
    )
    processes.add_argument(
        "--processes-per-node", metavar="P", help="processes on each node of a job without GPUs (default: 1)"
    )
    parser.add_argument(
        "--cpus-per-node", metavar="C", help="CPUs on each node (default: Slurm all of them, PBS the site's default)"
    )
    parser.add_argument("--time", metavar="HH:MM:SS", help="time limit of the job, or of each task of an array")
    parser.add_argument("--account", metavar="A", help="account to charge")
    parser.add_argument("--partition", metavar="Q", help="partition or queue")
    parser.add_argument("--job-name", metavar="J", help="job name (default: the recipe's name)")
    parser.add_argument("--scheduler", choices=SUBMITTERS, help="default: the one whose sbatch or qsub is on the PATH")
    parser.add_argument(
        "--preset", metavar="P", help="name of a shipped preset, or path (default: chosen as by samerun launch)"
    )
    launch.add_sizes(parser)
    parser.add_argument("--recipe", metavar="R", default="digits", help="name of a shipped recipe, or path (default: digits)")
    parser.add_argument("--run-dir", metavar="D", help="run folder; for a sweep, the folder of its run folders (default: "
        "runs/<name>-<time>)")  # fmt: skip
    parser.add_argument("--max-requeues", metavar="N", help="how often the job may be requeued after its time limit or a "
        "preemption (default: 20)")  # fmt: skip
    parser.add_argument("--max-restarts", metavar="N", help="how often the run may be restarted within the job after a crash "
        "(default: 0)")  # fmt: skip
    parser.add_argument(
        "--array", metavar="SWEEP", help="run a sweep: one array task per combination, such as 'optim.lr=0.1,0.2;seed=0,1'"
    )
    parser.add_argument(
        "--data-on-nodes", action="store_true", help="do not check data.path here: only the compute nodes have it"
    )
    parser.add_argument("--sbatch-option", metavar="OPTION", action="append", default=[], help="one more #SBATCH line, such "
        "as --sbatch-option=--constraint=a100; may be repeated")  # fmt: skip
    parser.add_argument("--qsub-option", metavar="OPTION", action="append", default=[], help="one more #PBS line, such as "
        "--qsub-option='-l filesystems=home'; may be repeated")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the script and stop")
    parser.take_accelerates_words()
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that override the file's")
    return parser
