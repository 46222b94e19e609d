"""`samerun launch`: detect the machine or job, check the run as far as possible without torch, run it, and see it through.

On one machine what is run is `accelerate launch`, or the one process that it would start (`one_process.py`). In an allocation
it is, by the scheduler's command, `samerun launch` once on every node, which runs the `accelerate launch` of that node when all
have met (`rendezvous.py`). From where it was typed, the run is watched (`supervise.py`) and started again where that is wanted
(`attempts.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from app.environment.degrees import KEY, UNSUPPORTED
from app.environment.launched import end_time_s
from app.environment.topology import Topology
from app.errors import STOPPED, PresetError, TopologyError
from app.options import Parser, not_negative, positive
from app.recipe import optimizers
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import load as load_recipe
from app.runs import failure, run_folder
from launch import parallelism, preset
from launch.preset import PRECISIONS, Preset
from launch.schedulers import detect, local
from launch.schedulers.job import ATTEMPT, Allocation, Job
from launch.start import attempts, explain, run_checks, supervise
from launch.start.attempts import OutcomeFile
from launch.start.rendezvous import find_token, meet, new_token, without_token
from launch.start.resolved import Resolved


def launch(argv: list[str], environment: Mapping[str, str], *, say: Callable[[str], None]) -> int:
    """Run `samerun launch` with these arguments and return its exit code. Raises SamerunError."""
    resolved = checked(argv, environment)
    options = resolved.options
    if resolved.topology.node_rank == 0:  # or each node would say the same
        explain.introduce(resolved, say)
    if options.explain:
        sys.stdout.writelines(explain.explanation(resolved, environment))
    if options.dry_run:
        sys.stdout.writelines(explain.commands(resolved))
    if options.explain or options.dry_run:
        return 0
    if resolved.is_task:
        return _run_task(replace(resolved, topology=_met(resolved, environment, say)), environment, say)
    is_new = resolved.run_dir is None or not Path(resolved.run_dir).exists()
    run_dir = run_folder.choose(resolved.run_dir, resolved.loaded.name, may_exist=True)
    resolved = replace(resolved, run_dir=resolved.run_dir or str(run_dir))
    say(shlex.join(resolved.command()))
    try:
        return attempts.run(_attempts(resolved, environment, say), say)
    finally:
        if not (run_dir / run_folder.STARTS).exists():  # what was wrong was found before the run began to write
            shutil.rmtree(run_dir / failure.FOLDER, ignore_errors=True)
            with suppress(OSError):
                if is_new:
                    run_dir.rmdir()


def checked(argv: list[str], environment: Mapping[str, str]) -> Resolved:
    """Return what these arguments come to here. Raises SamerunError for what would end the run, as far as it can be known."""
    options, passed_on, training = read(argv)
    resolved = _resolve(options, passed_on, argv, environment, overrides=training.overrides)
    if not resolved.is_task:  # or each node would look again
        if not resolved.job:  # or the time is that of the job
            end_time_s(environment)
        inputs = resolved.loaded.recipe.inputs
        if resolved.is_started_elsewhere:  # perhaps only the nodes have the data
            inputs = {key: path for key, path in inputs.items() if path is None or key.startswith("train.")}
        for problem in run_checks.problems(training, run_dir=resolved.run_dir, resume=resolved.resume(), inputs=inputs):
            raise problem
    resolved.accelerate_argv()  # what cannot be is refused here, not on every node
    return resolved


def _run_task(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run the processes of this node."""
    command = resolved.accelerate_argv()
    say(shlex.join(command))
    told = resolved.with_threads(without_token(resolved.times(environment).told(environment)))
    alone = resolved.alone(told)
    folder = OutcomeFile(Path(resolved.run_dir)) if resolved.run_dir and resolved.writes_outcome else None
    is_lost = _is_lost(environment)
    pass_on = supervise.to_ranks if alone is None else supervise.to_rank
    ending = supervise.run(alone or command, told, pass_on=pass_on, watched=False, is_lost=is_lost)
    outcome = folder.of_success(ending.exit_code) if folder else None
    # Where `samerun launch` started this, it reads the outcome itself.
    is_stopped = outcome is not None and outcome.outcome == "stopped" and ATTEMPT not in environment
    return STOPPED if is_stopped and ending.exit_code == 0 else ending.exit_code


def _is_lost(environment: Mapping[str, str]) -> Callable[[], bool]:
    """Return what tells whether the ssh that started this is gone. Daemons of batch systems may be restarted meanwhile."""
    parent = os.getppid()
    return lambda: "SSH_CONNECTION" in environment and os.getppid() != parent


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], argparse.Namespace]:
    """Return the launcher's own options, the words that it passes on to app.train, and what those say.

    Raises UsageError for what is an option of neither.
    """
    parser = _parser()
    options, passed_on = parser.parse_known_args(argv)
    parser.refuse_empty(options)
    return options, passed_on, run_checks.of_training(passed_on, command="launch", its_options=parser.options())


def options() -> list[str]:
    """Return the names of all options of `samerun launch` itself."""
    return _parser().options()


def _attempts(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> attempts.Plan:
    """What is run from here, a batch script or this machine, until the run is over."""
    times = resolved.times(environment)
    if resolved.job and times.ends_s is None:
        say(f"the end of the job's time is unknown ({times.origin}), so the run cannot stop and save before it")
    told = resolved.with_threads(times.told(environment))
    pass_on = supervise.to_ranks if resolved.alone(told) is None else supervise.to_rank
    if resolved.is_started_elsewhere:
        pass_on = supervise.to_srun if resolved.start()[0] == "srun" else supervise.to_itself
    assert resolved.run_dir is not None
    by_hand = [] if resolved.options.run_dir else ["--run-dir", resolved.run_dir]
    return attempts.Plan(
        command=lambda again: resolved.alone(told, again=again) or resolved.command(again=again),
        environment={**told, **(new_token() if resolved.is_started_elsewhere else {})},
        pass_on=pass_on,
        run_dir=Path(resolved.run_dir),
        job=resolved.job,
        max_restarts=resolved.options.max_restarts,
        max_requeues=resolved.options.max_requeues,
        writes_outcome=resolved.writes_outcome and not resolved.is_started_elsewhere,
        by_hand=shlex.join(["samerun", "launch", *by_hand, *resolved.argv]),
        # The kernel kills for the host's memory, with GPUs too: offloading to it, or more devices in it, would not help.
        memory_remedy=resolved.preset.sharding(resolved.degrees).what_to_change(
            resolved.topology.world_size,
            micro_batch=resolved.plan.micro_batch,
            checkpoint_activations=resolved.loaded.recipe.train.checkpoint_activations,
            on_cpu=True,
        ),
    )


def _met(resolved: Resolved, environment: Mapping[str, str], say: Callable[[str], None]) -> Topology:
    """The topology when its nodes have met: with another port, if a program is at the one made from the job's id."""
    topology = resolved.topology
    if topology.num_nodes == 1:
        return topology
    key = find_token(environment, resolved.run_dir, resolved.job.name if resolved.job else "")
    port = meet(topology, key, only_port=resolved.options.port is not None)
    if port != topology.port and topology.node_rank == 0:
        say(f"{topology.described('port')} is in use on {topology.hosts[0]}: the run uses {port}")
    return replace(topology, port=port)


def _resolve(
    options: argparse.Namespace,
    passed_on: list[str],
    argv: list[str],
    environment: Mapping[str, str],
    *,
    overrides: Sequence[str],
) -> Resolved:
    divide_total(options, environment, nodes=options.nodes)
    asked = {"processes": options.processes, "processes_per_node": options.processes_per_node, "nodes": options.nodes}
    allocation = detect.find(environment, **asked)
    job = detect.job(environment) if allocation else None
    _refuse_restarts_by_a_task(allocation, options, environment)
    asked_sizes = parallelism.asked_by(options)
    named = options.preset or parallelism.preset_for(asked_sizes)
    chosen = preset.load(named) if named else None
    topology = allocation.topology if allocation else _this_machine(chosen, options.processes, environment)
    if options.port is not None:
        topology = replace(topology, port=options.port, origins={**topology.origins, "port": "--port"})
    origin = "--preset" if options.preset else "the preset for replicas or tensor parallelism; --preset overrides it"
    if chosen is None:
        chosen, origin = default_preset(topology, environment), "chosen for these processes; --preset overrides it"
    # What every process would refuse after its slow imports is refused now.
    loaded = load_recipe(options.recipe or "digits", overrides)
    if refusal := optimizers.refusal(loaded.recipe.optim.name, chosen.strategy):
        raise PresetError(refusal)
    degrees = parallelism.of_launch(chosen.name, chosen.sizes, topology, asked_sizes)
    data_ranks = topology.world_size // degrees.tensor_parallel
    run_dir, run_dir_origin = _run_dir(options, job, loaded.name)
    return Resolved(
        allocation=allocation,
        job=job,
        topology=topology,
        preset=chosen,
        preset_origin=origin,
        recipe=options.recipe or "digits",
        recipe_origin="--recipe" if options.recipe else "default",
        loaded=loaded,
        run_dir=run_dir,
        run_dir_origin=run_dir_origin,
        plan=BatchPlan.of(loaded.recipe, data_ranks, tensor_parallel=degrees.tensor_parallel),
        degrees=degrees,
        options=options,
        argv=argv,
        passed_on=passed_on,
    )


def divide_total(options: argparse.Namespace, environment: Mapping[str, str], *, nodes: int | None = None) -> None:
    """Take --num_processes, Accelerate's number of all processes, as the number on this machine or on each node."""
    if options.num_processes is None:
        return
    allocation = detect.find(environment, nodes=nodes)
    num_nodes = allocation.topology.num_nodes if allocation else 1
    each, left = divmod(options.num_processes, num_nodes)
    if left:
        raise TopologyError(
            f"--num_processes is {options.num_processes}, the total number of processes, on {num_nodes} "
            f"nodes: it must be a multiple of {num_nodes}, because every node gets the same number"
        )
    by_hand = options.processes if options.processes_per_node is None else options.processes_per_node
    if by_hand not in (None, each):
        raise TopologyError(f"--num_processes is {options.num_processes}, {each} per node, but the options also say {by_hand}")
    if by_hand is None:
        options.processes, options.processes_per_node = (None, each) if allocation else (each, None)


def _run_dir(options: argparse.Namespace, job: Job | None, recipe_name: str) -> tuple[str | None, str]:
    """The run folder, the same for every start that is to go on, and where its name comes from; None: a new one."""
    if options.run_dir:
        return options.run_dir, "--run-dir"
    if job is not None:
        return f"runs/{recipe_name}-{job.name}", "recipe and job"
    return None, "a new one of recipe and time"


def _refuse_restarts_by_a_task(
    allocation: Allocation | None, options: argparse.Namespace, environment: Mapping[str, str]
) -> None:
    if allocation and allocation.is_task and options.max_restarts and ATTEMPT not in environment:
        raise TopologyError(
            f"--max-restarts is {options.max_restarts}, but a task started by srun cannot restart the other "
            "nodes: leave out srun, because `samerun launch` calls it itself in a batch script or salloc"
        )


def _this_machine(chosen: Preset | None, processes: int | None, environment: Mapping[str, str]) -> Topology:
    if chosen and processes is None and (chosen.is_single_process or chosen.num_processes):
        return local.find(environment, processes=chosen.num_processes or 1, origin=f"preset {chosen.name}")
    return local.find(environment, processes=processes)


def default_preset(topology: Topology, environment: Mapping[str, str]) -> Preset:
    """Return the preset for these processes where the user names none."""
    if topology.num_nodes > 1:
        return preset.load("multi_node")
    if topology.world_size > 1:
        return preset.load("multi_gpu")
    # Nodes may have accelerators that this machine has not; single_gpu runs on the CPU where there is none.
    has_accelerator = bool(topology.hosts) or local.count_accelerators(environment)[0] > 0
    return preset.load("single_gpu" if has_accelerator else "cpu")


def add_sizes(parser: Parser) -> None:
    """Add the options for the sizes of tensor parallelism and of copies of a model."""
    parser.add_argument("--tensor-parallel", type=positive, metavar="N", help="tensor parallelism: N neighbouring processes "
        "share each sample and split every large matrix (default: the preset's; in tensor_parallel all processes of a node)"
                        )  # fmt: skip
    parser.add_argument("--replicas", type=positive, metavar="N", help="hybrid sharding: N copies of the model, each sharded "
        "over equally many processes (default: the preset's; in hsdp one per node)")  # fmt: skip
    for name, why in UNSUPPORTED.items():
        parser.add_argument(f"--{KEY}{name}", type=functools.partial(_refused, why), help=argparse.SUPPRESS)


def _refused(why: str, value: str) -> None:
    if value != "1":
        raise argparse.ArgumentTypeError(f"it is {value}: {why}; leave it out")


def _parser() -> Parser:
    parser = Parser(
        prog="samerun launch",
        usage="%(prog)s [options] [app.train options] [key=value ...]",
        description="Train a recipe, on this machine or across all nodes of the current Slurm or PBS job: check it, print the "
        "command that runs it, and run it.",
        epilog="Other options and key=value are passed to app.train; `samerun train --help` lists them and all recipe keys. "
        "Accelerate's spellings work too: --config_file, --num_processes (over all nodes), --num_machines, "
        "--main_process_port, --mixed_precision, --parallelism_config_tp_size, --parallelism_config_dp_replicate_size.",
    )
    parser.add_argument("--preset", help="name of a shipped preset, or path of an Accelerate config file (default: multi_node "
                        "for several nodes, multi_gpu for several processes on one, else single_gpu, or cpu where there is "
                        "no accelerator)")  # fmt: skip
    parser.add_argument("--processes", type=int, help="processes on this machine (default: one per accelerator, at least one)")
    parser.add_argument("--processes-per-node", type=int, metavar="N", help="processes on each node of an allocation "
        "(default: one per GPU; without GPUs, the job's tasks per node)")  # fmt: skip
    parser.add_argument("--nodes", type=int, metavar="N", help="use only the first N nodes of the allocation (default: all)")
    parser.add_argument("--port", type=int, help="TCP port of the rendezvous on node 0 (default: derived from the job id; on "
        "one node any free port)")  # fmt: skip
    parser.add_argument("--recipe", help="name of a shipped recipe, or path of a YAML file (default: digits)")
    parser.add_argument("--run-dir", help="folder that the run writes to (default: in a job runs/<recipe>-<job>, else "
        "runs/<recipe>-<time>)")  # fmt: skip
    parser.add_argument("--resume", metavar="auto|never|PATH", help="resume from a checkpoint. auto: from the newest in the "
        "run folder, if there is one; PATH: a run folder or a checkpoint (default: auto, except where each start has a new "
        "run folder)")  # fmt: skip
    parser.add_argument("--max-restarts", type=not_negative, default=0, metavar="N", help="restart the run up to N times "
        "after a crash, within the same job: a killed process, a hang, a lost connection (default: 0)"
                        )  # fmt: skip
    parser.add_argument("--max-requeues", type=not_negative, default=20, metavar="N", help="requeue the job up to N times "
        "after its time limit or a preemption (default: 20)")  # fmt: skip
    add_sizes(parser)
    parser.add_argument(
        "--mixed-precision",
        choices=PRECISIONS,
        help="overrides the preset's precision (no: fp32, the default of all shipped presets)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the command of every node and stop")
    parser.add_argument("--explain", action="store_true", help="print every value with its origin and stop")
    parser.take_accelerates_words()
    return parser
