"""What the launcher promised this process, read from its environment into a frozen value, and how the run shards its model.

This is the only room that reads the environment of a started process. What srun or MPI started one by one finds its place
here as well (`started_ranks.py`). `read` refuses environments in which they started several processes that cannot find each
other, or in which Accelerate was asked for several processes and started one: each would train its own copy. At import,
standard library only.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.environment import deepspeed_file, degrees, started_ranks
from app.environment.slurm_variables import JOB
from app.environment.variables import END_TIME, ERRORS, PRESET_FILE, START_TIME, SUBMIT_TIME, check_threads, number, said
from app.errors import PresetError, TopologyError

Strategy = Literal["ddp", "deepspeed", "fsdp2"]

PRECISIONS = ("no", "bf16", "fp16")
"""Accelerate's words for those of the forward and backward pass that runs may have; `no` is float32."""
NO_FP16_ON_CPU = "fp16 needs a GPU: on a CPU Accelerate would silently train in float32; use no, or bf16"

_LONGEST_ALLOCATION_S = 10 * 365 * 24 * 3600.0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ACCELERATE_LAUNCH = ("accelerate-launch", "accelerate.commands.launch")
_ACCELERATE = ("accelerate", "accelerate.commands.accelerate_cli")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The process group that this process was told it belongs to."""

    world_size: int = 1
    """Processes."""
    rank: int = 0
    """Index of this process in 0..world_size-1."""
    local_rank: int = 0
    """Index of this process on its node."""
    local_world_size: int = 1
    """Processes on this node."""
    strategy: Strategy = "ddp"
    """How the processes cooperate (with one process and `ddp` there is nothing to do)."""
    replicas: int = 1
    """Copies of the model, each of which is sharded over world_size / replicas neighbouring ranks; 1: no copies (fsdp2)."""
    tensor_parallel: int = 1
    """Neighbouring ranks that compute the same samples together, each with a part of every large matrix (fsdp2)."""
    notes: tuple[str, ...] = ()
    """What the user should know of how a model is divided."""
    mixed_precision: str = "no"
    """The precision of the forward and backward pass, of PRECISIONS."""
    use_cpu: bool = False
    """Whether the preset asks for the CPU on a machine that may have something faster."""
    gradient_clipping: float | None = None
    """Clipping norm that the preset insists on; the recipe must agree."""
    end_time_s: float | None = None
    """When the allocation ends, in Unix seconds, where that is known."""
    visible_devices: str = ""
    """CUDA_VISIBLE_DEVICES."""
    preset_file: str | None = None
    """The preset, where `samerun launch` started this process itself and no command line above it names one."""
    errors: Path | None = None
    """Folder in which this process records why it fails (app/runs/failure.py), where `samerun launch` has named one."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What Accelerate still must be told by its environment: nothing where a launcher has."""

    @property
    def data_ranks(self) -> int:
        """Ranks that divide the global batch among them: processes, or groups of tensor-parallel ones."""
        return self.world_size // self.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Index of this process's group in 0..data_ranks-1; those of one group get the same samples."""
        return self.rank // self.tensor_parallel

    def divided(self) -> dict[str, int]:
        """Return in which ways other than by samples the work is divided, by the names that reports use. Empty: in none."""
        found = {"replicas": self.replicas} if self.replicas > 1 else {}
        if self.tensor_parallel > 1:
            found |= {"data_ranks": self.data_ranks, "tensor_parallel": self.tensor_parallel}
        return found


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """The scheduler's job that a process belongs to, as far as its environment tells."""

    name: str | None
    """The scheduler's number of the job, as it writes it."""
    submitted: float | None
    """When it was submitted, in Unix seconds."""
    allocated: float | None
    """When it started, this time, in Unix seconds."""


def read_job(environ: Mapping[str, str]) -> SchedulerJob:
    """Return the job that `environ` tells of. Raises TopologyError for a time that is none."""

    def time_of(name: str) -> float | None:
        return float(number(environ, name)) if name in environ else None

    return SchedulerJob(
        name=next((environ[name] for name in (JOB.job_id, "PBS_JOBID", "JOB_ID") if name in environ), None),
        submitted=time_of(SUBMIT_TIME),
        allocated=time_of(START_TIME),
    )


def ancestors() -> list[Sequence[str]]:
    """Return the command lines of the processes that led to this one, the last first."""
    import psutil  # not at the top: the launcher, which starts at once, reads this file

    try:
        return [process.cmdline() for process in psutil.Process().parents()]
    except psutil.Error:  # one has just ended
        return []


def read(environ: Mapping[str, str], *, started_by: Callable[[], Sequence[Sequence[str]]] = ancestors) -> Launched:
    """Return what `environ` promises. `started_by` is asked, as `ancestors` answers, only where it leaves a doubt.

    Raises TopologyError where several processes were started, or asked for, without the environment that joins them, or where
    the end of the allocation cannot be right, and PresetError where the preset sets what the recipe decides.
    """
    check_threads(environ)
    launched = _read(environ, started_by)
    return replace(
        launched,
        end_time_s=end_time_s(environ),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES", ""),
        preset_file=environ.get(PRESET_FILE),
        errors=errors_folder(environ),
    )


def errors_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in which a process records why it fails, if its launcher named one."""
    return Path(environ[ERRORS]) if ERRORS in environ else None


def _read(environ: Mapping[str, str], started_by: Callable[[], Sequence[Sequence[str]]]) -> Launched:
    started = started_ranks.translate(environ)
    if started is not None:
        return _of_started_rank(started, environ)
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        _refuse_one_for_several(environ, started_by)
        claims = _preset_claims(environ)
        return Launched(**claims, **asdict(degrees.read(environ, claims["strategy"], world_size=1, per_node=1)))
    missing = [name for name in _TORCHRUN if name not in environ]
    if missing:
        there = ", ".join(f"{name}={environ[name]}" for name in _TORCHRUN if name in environ)
        raise TopologyError(
            f"the environment has {there} but not {', '.join(missing)}: a process needs all of {', '.join(_TORCHRUN)} to find "
            "the others. Start the run with `accelerate launch` or `samerun launch`, or unset these variables."
        )
    number(environ, "MASTER_PORT")
    world_size, rank = number(environ, "WORLD_SIZE"), number(environ, "RANK")
    if not 0 <= rank < world_size:
        raise TopologyError(f"RANK is {rank} and WORLD_SIZE is {world_size}: the rank must be in 0..{world_size - 1}.")
    local_world_size = number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else 1
    claims = _preset_claims(environ)
    return Launched(
        world_size=world_size,
        rank=rank,
        local_rank=number(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        **claims,
        **asdict(degrees.read(environ, claims["strategy"], world_size=world_size, per_node=local_world_size)),
    )


def end_time_s(environ: Mapping[str, str]) -> float | None:
    """Return when the allocation ends, in Unix seconds, if it is known. Raises TopologyError for a time that is none."""
    text = environ.get(END_TIME)
    if text is None:
        return None
    try:
        left_s = float(text) - time.time()
    except ValueError:
        left_s = float("nan")
    if 0 < left_s < _LONGEST_ALLOCATION_S:
        return float(text)
    now = f"{time.time():.0f} by the clock of {socket.gethostname()}"
    raise TopologyError(
        f"{END_TIME} is {text!r}: it must be the end of the allocation in Unix seconds, and now is {now}. "
        "Unset it if it comes from another job; correct the clock if that is wrong."
    )


def _of_started_rank(started: started_ranks.StartedRank, environ: Mapping[str, str]) -> Launched:
    claims = _preset_claims(environ)
    if claims["strategy"] != "ddp":
        raise PresetError(
            f"{started.starter} started {started.world_size} processes, which can only run DDP, but the "
            f"environment asks for {claims['strategy']}: use {started.starter.split()[0]} to start `samerun "
            "launch --preset ...` once per node, which starts the processes of that node."
        )
    return Launched(
        world_size=started.world_size,
        rank=started.rank,
        local_rank=started.local_rank,
        local_world_size=started.local_world_size,
        variables=started.variables(),
        **claims,
    )


def _refuse_one_for_several(environ: Mapping[str, str], started_by: Callable[[], Sequence[Sequence[str]]]) -> None:
    # Accelerate sets both for a single process only if num_processes or num_machines is above 1. Scripts of jobs set them, too.
    if not {"MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"} <= environ.keys():
        return
    asked = next((number for number in map(_asked_for, started_by()) if number is not None), None)
    found = f"{said(environ, 'MASTER_ADDR', 'MASTER_PORT')}, and no RANK"
    if asked is None:
        raise TopologyError(
            f"the environment has {found}: `accelerate launch` sets these if it was asked for several "
            "processes but starts one. It does not say how many: if it was asked for one, unset MASTER_ADDR "
            "and MASTER_PORT."
        )
    if asked > 1:
        raise TopologyError(
            f"`accelerate launch` was asked for several processes and started one ({found}), as it does with "
            "distributed_type MULTI_CPU or NO. Use accelerate_configs/multi_gpu.yaml, which also runs on CPU "
            "without GPUs, or ask for 1 process."
        )


def _asked_for(command: Sequence[str]) -> int | None:
    """The number of processes, or of machines, that an `accelerate launch` was asked for, as it reads its command line."""
    names = [word.rpartition("/")[2] for word in command]
    is_it = [
        name in _ACCELERATE_LAUNCH or (name == "launch" and before in _ACCELERATE)
        for before, name in itertools.pairwise(["", *names])
    ]
    start = next(itertools.compress(itertools.count(), is_it), None)
    if start is None:
        return None
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    options = _validate_launch_command(launch_command_parser().parse_args(list(command[start + 1 :])))[0]
    return max(int(options.num_processes), int(options.num_machines or 1))


def _preset_claims(environ: Mapping[str, str]) -> dict[str, Any]:
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if accumulation not in ("auto", "1"):
        raise PresetError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {accumulation}, from the preset's "
            "gradient_accumulation_steps or the environment: accumulation is derived from "
            "train.global_batch_size. Remove it there; to limit the samples of one forward pass, set "
            "train.max_micro_batch in the recipe."
        )
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return {
        "strategy": _strategy(environ),
        "mixed_precision": _precision(environ),
        "use_cpu": _is_true(environ, "ACCELERATE_USE_CPU"),
        "gradient_clipping": None if clipping in ("auto", "none") else float(clipping),
    }


def _strategy(environ: Mapping[str, str]) -> Strategy:
    if _is_true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise PresetError("the preset's distributed_type is MEGATRON_LM: use MULTI_GPU, DEEPSPEED or FSDP (fsdp_version: 2).")
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        if file := environ.get(deepspeed_file.VARIABLE):
            deepspeed_file.read(file)  # refuses what the file must not say
        return "deepspeed"
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        if environ.get("FSDP_VERSION", "1") != "2":
            raise PresetError(
                f"the preset's fsdp_version is {environ.get('FSDP_VERSION', '1')}: use `fsdp_version: 2`, as "
                "accelerate_configs/fsdp2.yaml does."
            )
        if _is_true(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
            raise PresetError(
                "the preset's fsdp_activation_checkpointing is true: Accelerate recomputes layers with other "
                "random numbers, so with dropout the gradients are wrong. Remove it, and set "
                "train.checkpoint_activations=blocks."
            )
        return "fsdp2"
    return "ddp"


def _precision(environ: Mapping[str, str]) -> str:
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in PRECISIONS:
        raise PresetError(
            f"mixed_precision is {precision}, from the preset, the command line or ACCELERATE_MIXED_PRECISION: use one of "
            f"{', '.join(PRECISIONS)}. 8-bit numbers are not supported."
        )
    return precision


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1")


@dataclass(frozen=True)
class Sharding:
    """What each process keeps of a model and its training state."""

    kind: Strategy = "ddp"
    """What synchronizes the processes; one process under `ddp` needs nothing."""
    stage: int = 0
    """DeepSpeed's ZeRO stage; 0: each process keeps everything."""
    offload: bool = False
    """Whether any of it is kept in the host's memory."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of processes (fsdp2)."""
    tensor_parallel: int = 1
    """Processes that split each large matrix (fsdp2)."""

    def remedy(self, processes: int, *, on_cpu: bool) -> str:
        """Return what shards more than this does. `on_cpu`: the host computes, so that offloading to it gains nothing."""
        devices = "machines" if on_cpu else "devices"
        if self.kind == "ddp" and processes == 1:
            return f"several {devices} with --preset fsdp2"
        if self.replicas > 1 or (self.kind != "fsdp2" and self.stage < 3):
            return "--preset fsdp2"
        can_offload = self.tensor_parallel == 1 and not (self.offload or on_cpu)
        return f"more {devices}" + (", or --preset deepspeed_zero3_offload" if can_offload else "")

    def what_to_change(self, processes: int, *, micro_batch: int, checkpoint_activations: str, on_cpu: bool) -> str:
        """Return what to change in a run that ended for lack of memory."""
        changes = [f"train.max_micro_batch={micro_batch // 2}"] if micro_batch > 1 else []
        changes += ["train.checkpoint_activations=blocks"] if checkpoint_activations == "none" else []
        return f"Change {', or '.join([*changes, self.remedy(processes, on_cpu=on_cpu)])}"
