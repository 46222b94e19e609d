"""The meaning of the arguments of `samerun launch` on this machine or in this job: detected, checked as far as possible without
torch, and the commands that follow from it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app import tasks
from app.environment.launched import NO_FP16_ON_CPU, end_time_s
from app.environment.topology import MICRO_BATCH, Degrees, Topology, listed, number
from app.errors import CheckpointError, DataError, PresetError, RunFolderError, SamerunError, TopologyError, TrackerError
from app.files import hub
from app.options import Parser, add_recipe, add_resume, add_training, not_negative, positive, precision, trackers, whole
from app.options import parser as training_parser
from app.recipe import optimizers
from app.recipe.recipe_file import LoadedRecipe
from app.recipe.recipe_file import load as load_recipe
from app.recipe.schema import BatchPlan
from app.runs import run_folder
from launch import preset
from launch.node_command import accelerate_argv, one_process_argv
from launch.preset import PRECISIONS, Preset, requested_sizes
from launch.run_module import program
from launch.schedulers import detect, slurm
from launch.schedulers.hosts import ATTEMPT, Allocation, Job, Times, count_accelerators
from launch.schedulers.platforms import KUBEFLOWS
from launch.start import containers

_NOT_COUNTED = ("/dev/kfd", "/dev/dri", "/dev/dxg", "/dev/accel", "/System")
"""Files of machines that may have GPUs other than those that `count_accelerators` counts: AMD, Intel, WSL, and macOS."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """All that was found out and checked."""

    allocation: Allocation | None
    job: Job | None
    topology: Topology
    preset: Preset
    preset_origin: str
    loaded: LoadedRecipe
    run_dir: str | None
    plan: BatchPlan
    degrees: Degrees
    """Number of ranks that split the model."""
    options: argparse.Namespace
    argv: list[str]
    """As it was typed."""
    passed_on: list[str]
    """The words that are app.train's."""
    earlier_starts: int
    """Starts of the run before this one, after which it was restarted or requeued."""
    spares: tuple[str, ...] = ()
    """Nodes of the job that replace lost ones."""

    @property
    def survives_lost_nodes(self) -> bool:
        """True if the run continues on other nodes of its job after a node is lost."""
        return bool(self.options.spares or self.options.min_nodes)

    @property
    def is_task(self) -> bool:
        """True if this process runs the `accelerate launch` of its node, and no more."""
        return self.allocation is not None and self.allocation.is_task

    @property
    def is_started_elsewhere(self) -> bool:
        """True if the scheduler's command has to start `samerun launch` on every node."""
        return self.allocation is not None and bool(self.allocation.start)

    @property
    def writes_outcome(self) -> bool:
        """True if the main process of the run is on this node, and trains."""
        return self.topology.node_rank == 0 and "--print-recipe" not in self.passed_on

    def accelerate_argv(self, node_rank: int | None = None) -> list[str]:
        """Return the `accelerate launch` of this node, or of another."""
        return accelerate_argv(
            self.topology,
            self.preset,
            self._app_args(),
            mixed_precision=self.options.mixed_precision,
            node_rank=node_rank,
            sizes=requested_sizes(self.options),
            micro_batch=self.plan.micro_batch if self.plan.is_auto else None,
        )

    def local_argv(self, environment: Mapping[str, str]) -> list[str]:
        """Return what runs the processes of this node: an `accelerate launch`, or one process without it, if that is known."""
        precision, alone = self.options.mixed_precision, None
        if not requested_sizes(self.options):
            alone = one_process_argv(self.topology, self.preset, self._app_args(), environment, mixed_precision=precision)
        return alone or self.accelerate_argv()

    def _app_args(self) -> list[str]:
        app_args = ["--recipe", self.options.recipe]
        app_args += ["--run-dir", self.run_dir] if self.run_dir else []
        app_args += ["--resume", self.resume] if self.resume else []
        return [*app_args, *self.passed_on]

    def start_argv(self) -> list[str]:
        """Return what starts `samerun launch` on every node, with the options that it would not find by itself."""
        assert self.allocation is not None
        added = [] if self.options.processes_per_node else ["--processes-per-node", str(self.topology.processes_per_node)]
        added += ["--run-dir", self.run_dir] if self.run_dir and not self.options.run_dir else []
        inside = ["samerun"] if self.options.container_image else program("launch.cli")
        return [*self.allocation.start, *self.allocation.enter, *inside, "launch", *added, *self.argv]

    def resume_command(self) -> str:
        """Return what a user types to resume the run."""
        by_hand = [] if self.options.run_dir else ["--run-dir", str(self.run_dir)]
        return shlex.join(["samerun", "launch", *by_hand, *self.argv])

    def command(self) -> list[str]:
        """Return the command of a whole run, here or on all nodes."""
        return self.start_argv() if self.is_started_elsewhere else self.accelerate_argv()

    @property
    def resume(self) -> str | None:
        """The --resume of app.train. The user's option is for the first start only, as any other continues the run."""
        if self.run_dir is None or self.options.resume is None:
            return self.options.resume or ("auto" if self.run_dir else None)
        return "auto" if self.earlier_starts and Path(self.run_dir, "recipe.yaml").exists() else self.options.resume

    def with_threads(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with what torchrun would set under DeepSpeed, and announce in six lines; and without
        Kubeflow's variables, which torchrun would use where `accelerate launch` gives it no option."""
        environment = {name: value for name, value in environment.items() if name not in KUBEFLOWS}
        is_torchruns = self.preset.strategy == "deepspeed" and self.topology.processes_per_node > 1
        return {**({"OMP_NUM_THREADS": "1"} if is_torchruns and not self.is_started_elsewhere else {}), **environment}

    def times(self, environment: Mapping[str, str]) -> Times:
        """Return the times of the job: from the environment outside a job and in a task that has them from its starter, else
        from the scheduler, with the user's end if that is earlier."""
        own = Times.of(environment)
        found = own if self.job is None or (self.is_task and ATTEMPT in environment) else self.job.times()
        # With ATTEMPT the variable is another job's, whose rank submitted this one.
        is_earlier = ATTEMPT not in environment and time.time() < (own.ends_s or 0.0) < (found.ends_s or 1e12)
        return replace(found, ends_s=own.ends_s, origin=own.origin) if is_earlier else found

    def introduce(self, say: Callable[[str], None]) -> None:
        """Report what is run, and where."""
        say(f"preset {self.preset.name} ({self.preset_origin}), {self.topology.described('processes_per_node')}")
        if self.options.dry_run:  # else the run reports it, with the number of its samples
            say(str(self.plan))
        if self.allocation and self.allocation.start:
            where = f"{self.allocation.scheduler} on {listed(self.topology.hosts)}"
            say(f"{where}; {self.allocation.start_origin}, so {self.allocation.start[0]} starts it on each node")
        if self.spares:
            say(f"spare nodes: {listed(self.spares)}")

    def dry_run(self) -> Iterator[str]:
        """Yield the lines of --dry-run: the command of this process and, across an allocation, of each node."""
        yield shlex.join(self.command()) + "\n"
        # An image has its own Python and presets.
        are_known = self.is_started_elsewhere and not self.options.container_image
        for node_rank, host in enumerate(self.topology.hosts if are_known else ()):
            yield f"# node {node_rank}, {host}:\n{shlex.join(self.accelerate_argv(node_rank))}\n"

    def origins(self, environment: Mapping[str, str]) -> Iterator[str]:
        """Yield the values that were found, each with its origin."""
        names = ("num_nodes", "processes_per_node", "node_rank", "head_address", "port", "threads_per_process")
        yield from map(self.topology.described, names)
        if self.run_dir:
            yield f"run_dir is {self.run_dir} ({'--run-dir' if self.options.run_dir else 'recipe and job'})"
        if self.degrees.tensor_parallel > 1:
            yield "not checked by --dry-run: whether the model has a tensor parallel plan; the run checks it before training"
        times = self.times(environment)
        ends = "an unknown time" if times.ends_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(times.ends_s))
        yield f"the allocation ends at {ends} ({times.origin})"


def problems(
    training: argparse.Namespace,
    *,
    run_dir: str | None,
    resume: str | None,
    inputs: Mapping[str, str | None],
    in_image: bool = False,
) -> Iterator[SamerunError]:
    """Yield errors that the run would end with: how it is started is in `training`, but for its folder and --resume.

    `inputs` are the recipe's files and folders, as far as they must be on this machine. What only the training can know, such
    as whether a checkpoint is whole, is left to it.
    """
    try:
        trackers(training.trackers, in_image=in_image)
    except TrackerError as error:
        yield error
    if run_dir and (problem := unwritable(Path(run_dir))):
        yield RunFolderError(problem)
    holds_a_run = run_dir is not None and os.access(Path(run_dir, "recipe.yaml"), os.F_OK)
    if holds_a_run and resume != "auto":
        yield RunFolderError(
            f"--run-dir is {run_dir}, which already contains a run (it has a recipe.yaml): choose another, "
            "resume it with --resume auto, or delete the folder"
        )
    if resume not in (None, "auto", "never") and not Path(resume).is_dir():
        yield CheckpointError(
            f"--resume is {resume}: no such folder; give auto, never, or the path of a run folder or of a checkpoint"
        )
    init_from = inputs.get("train.init_from")
    yield from map(DataError, missing({key: path for key, path in inputs.items() if key != "train.init_from"}))
    # A resumed run does not read the weights that it began with, which may be gone since.
    if init_from and not holds_a_run and not os.access(os.path.expandvars(Path(init_from).expanduser()), os.F_OK):
        which = "give a file of weights, a run folder or a checkpoint, hub:OWNER/NAME or torchvision:NAME"
        yield CheckpointError(f"train.init_from is {init_from}: there is no such file or folder; {which}")


def missing(inputs: Mapping[str, str | None]) -> Iterator[str]:
    """Yield which files and folders, by their keys, do not exist, or cannot be read, or have no path."""
    for key, path in inputs.items():
        if path is None:
            yield f"{key} is not given, and the recipe has no data without it: give {key}=PATH"
        elif not os.access(os.path.expandvars(Path(path).expanduser()), os.R_OK):
            hint = f", or write hub:{path} for a model of the hub" if key == "model.path" and hub.parsed(f"hub:{path}") else ""
            yield f"{key} is {path!r}: no such file or folder, or it cannot be read. Correct it{hint}"


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be made or written, or None."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    if re.search("[\udc80-\udcff]", str(folder.absolute())):
        encoding = sys.getfilesystemencoding().upper()
        remedy = "choose another" + " or set PYTHONUTF8=1" * (encoding != "UTF-8")
        return f"--run-dir is {os.fsencode(folder)!r}, in {os.fsencode(Path.cwd())!r}, which is not {encoding}: {remedy}"
    if not nearest.is_dir():
        return f"{folder} cannot be made, because {nearest} is a file: choose another --run-dir"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{folder} cannot be written, because {nearest} is not writable: choose another --run-dir"
    return None


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], argparse.Namespace]:
    """Return the launcher's own options, the words that it passes on to app.train, and the options in those.

    Raises UsageError for what is an option of neither.
    """
    parser = _parser(with_training=not {"-h", "--help"}.isdisjoint(argv))  # for the help alone: they are passed on
    options, passed_on = parser.parse_known_args(argv)
    words = ["--recipe", options.recipe, *passed_on]
    return options, passed_on, training_parser("launch").parse_all(words, also=parser.options())


def options() -> list[str]:
    """Return the names of all options of `samerun launch`, the training's included."""
    return [*_parser().options(), *training_parser().options()]


def checked(argv: list[str], environment: Mapping[str, str]) -> Resolved:
    """Return what these arguments come to here. Raises SamerunError for what would end the run, as far as it can be known."""
    options, passed_on, training = read(argv)
    set_processes(options, environment, nodes=options.nodes)
    counts = {"processes": options.processes, "processes_per_node": options.processes_per_node, "nodes": options.nodes}
    allocation = detect.find(environment, **counts)
    spares: tuple[str, ...] = ()
    if (options.spares or options.min_nodes) and not (allocation and allocation.is_task):
        allocation, spares = _set_aside(allocation, options, environment)
    job = detect.job(environment) if allocation else None
    chosen = preset.from_options(options)
    origin = "--preset" if options.preset else "the preset for replicas or tensor parallelism; --preset overrides it"
    if allocation:
        topology = allocation.topology
    elif chosen and options.processes is None and (chosen.is_single_process or chosen.num_processes):
        processes = chosen.num_processes or 1
        topology = detect.this_machine(environment, processes=processes, origin=f"preset {chosen.name}")
    else:
        topology = detect.this_machine(environment, processes=options.processes)
    topology = with_port(topology, options.port)
    if chosen is None:
        chosen, origin = default_preset(topology, environment), "chosen for these processes; --preset overrides it"
    # What every process would refuse after its slow imports is refused now.
    loaded = load_recipe(options.recipe, training.overrides)
    is_auto = loaded.recipe.train.max_micro_batch == "auto"
    wishes = {"--max-restarts": options.max_restarts, "--spares": options.spares, "--min-nodes": options.min_nodes}
    wishes["train.max_micro_batch"] = "auto" if is_auto else None
    wish = next((f"{name} is {value}" for name, value in wishes.items() if value), None)
    if allocation and allocation.is_task and wish and ATTEMPT not in environment:
        if not job:  # of SkyPilot or Kubeflow
            raise TopologyError(f"{wish}, but `samerun launch` runs on each node and cannot restart the others: restart all")
        remedy = "leave out srun, because `samerun launch` calls it itself in a batch script or salloc"
        raise TopologyError(f"{wish}, but a task started by srun cannot restart the other nodes: {remedy}")
    has_gpu = count_accelerators(environment)[0] > 0 or any(map(os.path.exists, _NOT_COUNTED))
    if (options.mixed_precision or chosen.mixed_precision) == "fp16" and not allocation and not has_gpu:
        raise PresetError(f"mixed_precision is fp16, and there is no GPU here: {NO_FP16_ON_CPU}")
    degrees = chosen.degrees(topology, preset.requested_sizes(options))
    if refusal := optimizers.refusal(loaded.recipe.optim.name, chosen.strategy, degrees.tensor_parallel):
        raise PresetError(refusal)
    if degrees.processes_per_rank > 1 and loaded.recipe.task in tasks.WITHOUT_PARTS:
        task = loaded.recipe.task
        raise PresetError(f"preset {chosen.name} cannot split the models of task {task}: use fsdp2, which shards any model")
    earlier_starts = job.requeues if job else 0
    if allocation and allocation.is_task and ATTEMPT in environment:
        earlier_starts = int(environment[ATTEMPT].rpartition("-")[2])
    parts, run_dir = degrees.processes_per_rank, options.run_dir or (f"runs/{loaded.name}-{job.name}" if job else None)
    if not (allocation and allocation.is_task and ATTEMPT in environment):  # else this is in the container already
        allocation = containers.with_image(options, allocation, environment, run_dir=run_dir)
    most = None
    if allocation and allocation.is_task and MICRO_BATCH in environment:
        most = number(environment, MICRO_BATCH)
    elif run_dir:
        same = {"world_size": topology.world_size, "preset": chosen.name}
        same |= {name: size if size > 1 else None for name, size in degrees._asdict().items()}
        precision = options.mixed_precision or chosen.mixed_precision
        most = run_folder.last_micro_batch(Path(run_dir), mixed_precision=precision, **same)
    resolved = Resolved(
        allocation=allocation,
        job=job,
        topology=topology,
        preset=chosen,
        preset_origin=origin,
        loaded=loaded,
        # The same for every start that is to continue the run.
        run_dir=run_dir,
        plan=BatchPlan.of(loaded.recipe, topology.world_size // parts, processes_per_rank=parts, most=most),
        degrees=degrees,
        options=options,
        argv=argv,
        passed_on=passed_on,
        earlier_starts=earlier_starts,
        spares=spares,
    )
    if not resolved.is_task:  # or each node would look again
        if not job:  # or the time is that of the job
            end_time_s(environment)
        inputs = loaded.recipe.inputs
        in_image = options.container_image is not None
        if resolved.is_started_elsewhere:  # perhaps only the nodes have the data, or the containers the weights
            inputs = {key: it for key, it in inputs.items() if it is None or (key.startswith("train.") and not in_image)}
        for problem in problems(training, run_dir=resolved.run_dir, resume=resolved.resume, inputs=inputs, in_image=in_image):
            raise problem
    resolved.accelerate_argv()  # what cannot be is refused here, not on every node
    return resolved


def _set_aside(
    allocation: Allocation | None, options: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[Allocation, tuple[str, ...]]:
    """Return the allocation without its last nodes, and those: the spares. Raises TopologyError."""
    if options.nodes is not None:
        raise TopologyError(f"--nodes is {options.nodes}: remove it, since the run uses all nodes of the job but the --spares")
    hosts = allocation.topology.hosts if allocation else ()
    count = len(hosts) - options.spares
    is_slurm = allocation is not None and allocation.start[:1] == ("srun",)
    if problem := spares_problem(options, count, is_slurm=is_slurm):
        raise TopologyError(problem)
    assert allocation is not None
    used = slurm.on_hosts(allocation, hosts[:count], environment)
    origins = {**used.topology.origins, "num_nodes": f"{used.topology.origins['num_nodes']}, --spares {options.spares}"}
    return replace(used, topology=replace(used.topology, origins=origins)), hosts[count:]


def spares_problem(options: argparse.Namespace, nodes: int, *, is_slurm: bool) -> str | None:
    """Return why a run on this number of nodes cannot have its --spares and --min-nodes, or None."""
    wish = f"--spares is {options.spares}" if options.spares else f"--min-nodes is {options.min_nodes}"
    if not is_slurm:
        return f"{wish}, but only a Slurm job can continue without one of its nodes: remove it"
    if nodes < 2:
        return f"{wish}, but the run has fewer than 2 nodes: request more, since the first node cannot be replaced"
    if nodes < (options.min_nodes or 0):
        return f"--min-nodes is {options.min_nodes}, and the run has {nodes} nodes: give at most {nodes}"
    return None


def set_processes(options: argparse.Namespace, environment: Mapping[str, str], *, nodes: int | None = None) -> None:
    """Take --num_processes, Accelerate's number of all processes, as the number on this machine or on each node."""
    if options.num_processes is None:
        return
    allocation = detect.find(environment, nodes=nodes)
    by_hand = options.processes if options.processes_per_node is None else options.processes_per_node
    each = detect.processes_per_node(options.num_processes, allocation.topology.num_nodes if allocation else 1, by_hand)
    if by_hand is None:
        options.processes, options.processes_per_node = (None, each) if allocation else (each, None)


def with_port(topology: Topology, port: int | None) -> Topology:
    """Return the topology with the port of --port, if it is given."""
    return topology if port is None else replace(topology, port=port, origins={**topology.origins, "port": "--port"})


def default_preset(topology: Topology, environment: Mapping[str, str]) -> Preset:
    """Return the preset for these processes where the user names none."""
    if topology.num_nodes > 1:
        return preset.load("multi_node")
    if topology.world_size > 1:
        return preset.load("multi_gpu")
    # Nodes may have accelerators that this machine lacks; single_gpu runs on the CPU of a machine without any.
    has_accelerator = bool(topology.hosts) or count_accelerators(environment)[0] > 0
    return preset.load("single_gpu" if has_accelerator else "cpu")


def add_run_options(parser: Parser) -> None:
    """Add the options that `samerun launch` and `samerun submit` have."""
    add_recipe(parser, None)
    parser.add_argument("--preset", metavar="NAME|PATH", help="shipped preset, or Accelerate config file (default: multi_node "
                        "for several nodes, multi_gpu for several processes on one, else single_gpu, or cpu where there is "
                        "no accelerator)")  # fmt: skip
    parser.add_argument("--run-dir", metavar="PATH", help="folder that the run writes to, or of an array, the folder "
        "of its run folders (default: in a job runs/<recipe>-<job>, else runs/<recipe>-<time>)")  # fmt: skip
    parser.add_argument("--max-restarts", type=not_negative, default=0, metavar="N", help="restart the run up to N times "
        "after a crash, within the same job: a killed process, a hang, a lost connection (default: 0)")  # fmt: skip
    parser.add_argument("--spares", type=not_negative, default=0, metavar="N", help="Slurm: N more nodes than the run uses; "
        "they replace lost ones within the job (default: 0)")  # fmt: skip
    parser.add_argument("--min-nodes", type=positive, metavar="N", help="Slurm: continue with fewer nodes, at least N, if more "
        "are lost than there are spares (default: requeue the job)")  # fmt: skip
    parser.add_argument("--max-requeues", type=not_negative, default=20, metavar="N", help="requeue the job up to N times "
        "after its time limit or a preemption (default: 20)")  # fmt: skip
    parser.add_argument("--tensor-parallel", type=positive, metavar="N", help="tensor parallelism: N neighboring processes "
        "share each sample and split every large matrix (default: the preset's; in tensor_parallel all of a node)")  # fmt: skip
    parser.add_argument("--context-parallel", type=positive, metavar="N", help="context parallelism: N neighboring processes "
        "share each sample and split its sequence (default: the preset's; in context_parallel all of a node)")  # fmt: skip
    parser.add_argument("--replicas", type=positive, metavar="N", help="hybrid sharding: N copies of the model, each sharded "
        "over equally many processes (default: the preset's; in hsdp one per node)")  # fmt: skip


def add_processes(parser: Parser) -> None:
    """Add the options for the processes of this machine or of each node, and for the port."""
    parser.add_argument("--processes", type=whole, metavar="N", help="processes on this machine (default: one per accelerator, "
        "at least one)")  # fmt: skip
    parser.add_argument("--processes-per-node", type=whole, metavar="N", help="processes on each node of an allocation "
        "(default: one per GPU; without GPUs, the job's tasks per node)")  # fmt: skip
    parser.add_argument("--port", type=whole, metavar="N", help="TCP port of the rendezvous on node 0 (default: derived from "
        "the job id; on one node any free port)")  # fmt: skip


def _parser(*, with_training: bool = False) -> Parser:
    """Return the parser of the launcher's own options; its help also lists the training's."""
    parser = Parser("launch", "Train a recipe, on this machine or across all nodes of the current Slurm or PBS job: check it, "
        "print the command that runs it, and run it. Recipe values are given as key=value after the options; `samerun recipes "
        "--keys` lists the keys.", usage="%(prog)s [options] [key=value ...]",
        epilog="Accelerate's spellings work too, with _ or -: --config_file, --num_processes (over all nodes), "
        "--num_machines, --main_process_port, --mixed_precision, --parallelism_config_tp_size, "
        "--parallelism_config_dp_replicate_size.")  # fmt: skip
    add_run_options(parser)
    add_resume(parser, default=None, when="auto, except where each attempt has a new run folder")
    parser.add_argument("--mixed-precision", type=precision, choices=PRECISIONS, help="precision instead of "
        "the preset's (no: float32, the default of all shipped presets)")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="check recipe, preset, paths and processes without opening "
        "the data or building the model; print each value with its origin and the command of each node; and stop")  # fmt: skip
    add_processes(parser)
    containers.add_options(parser)
    parser.add_argument("--nodes", type=whole, metavar="N", help="use only the first N nodes of the allocation (default: all)")
    parser.take_accelerates_words()
    if with_training:
        add_training(parser.add_argument_group("options of the training, passed on to its processes"))
    return parser
