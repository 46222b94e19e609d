"""The launch, read from the environment that the launcher gave this process into a frozen value, and how the model is sharded.

This is the only module that reads the environment of a started process. What srun or MPI started one by one finds its place
here as well (`started_ranks.py`). `read` refuses environments in which several processes cannot find each other, or in which
Accelerate was asked for several processes and started one: each would train its own copy. Standard library only.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.environment import deepspeed_file, started_ranks, topology
from app.environment.slurm_variables import JOB
from app.environment.topology import END_TIME, ERRORS, LAUNCHER, PRESET_FILE, START_TIME, SUBMIT_TIME, number, said
from app.errors import PresetError, TopologyError

Strategy = Literal["ddp", "deepspeed", "fsdp2"]

PRECISIONS = ("no", "bf16", "fp16")
"""Precisions of the forward and backward pass, in Accelerate's words; `no` is float32."""
NO_FP16_ON_CPU = "fp16 needs a GPU: on a CPU Accelerate would silently train in float32; use no, or bf16"

_OF_ACCELERATE = re.compile(
    r"ACCELERATE_((USE|GRADIENT|DYNAMO|DEEPSPEED|FP8)_.*|MIXED_PRECISION|CONFIG_DS_FIELDS)|(FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_.*"
)
"""Variables that `accelerate launch` sets from a preset. Its other variables, such as ACCELERATE_LOG_LEVEL, are for users."""
_LONGEST_ALLOCATION_S = 10 * 365 * 24 * 3600.0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The process group that this process belongs to, by its environment."""

    world_size: int = 1
    """Processes."""
    rank: int = 0
    """Index of this process in 0..world_size-1."""
    local_rank: int = 0
    """Index of this process on its node."""
    local_world_size: int = 1
    """Processes on this node."""
    strategy: Strategy = "ddp"
    """The strategy of the processes (with one process and `ddp` there is nothing to do)."""
    replicas: int = 1
    """Copies of the model, each of which is sharded over world_size / replicas neighboring ranks; 1: no copies (fsdp2)."""
    tensor_parallel: int = 1
    """Neighboring ranks that compute the same samples together, each with a part of every large matrix (fsdp2)."""
    context_parallel: int = 1
    """Neighboring ranks that compute the same samples together, each with a part of every sequence (fsdp2)."""
    mixed_precision: str = "no"
    """The precision of the forward and backward pass, of PRECISIONS."""
    use_cpu: bool = False
    """True if the preset requests the CPU on a machine that may have something faster."""
    end_time_s: float | None = None
    """When the allocation ends, in Unix seconds, where that is known."""
    preset_file: str | None = None
    """The preset, where `samerun launch` started this process itself and no command line above it names one."""
    errors: Path | None = None
    """Folder in which this process records why it fails (app/runs/run_folder.py), where `samerun launch` has named one."""
    micro_batch: int | None = None
    """The most samples of a forward pass under train.max_micro_batch=auto, where `samerun launch` has chosen it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that Accelerate still needs in its environment: none where a launcher has set them."""

    @property
    def processes_per_rank(self) -> int:
        """Processes of each data-parallel rank, which compute the same samples together."""
        return self.tensor_parallel * self.context_parallel

    @property
    def data_ranks(self) -> int:
        """Ranks that divide the global batch among them: processes, or groups of them."""
        return self.world_size // self.processes_per_rank

    @property
    def data_rank(self) -> int:
        """Index of this process's group in 0..data_ranks-1; processes of one group get the same samples."""
        return self.rank // self.processes_per_rank

    def divided(self) -> dict[str, int]:
        """Return in which ways other than by samples the work is divided, by the names that reports use. Empty: in none."""
        found = {"replicas": self.replicas} if self.replicas > 1 else {}
        if self.processes_per_rank > 1:
            sizes = {"tensor_parallel": self.tensor_parallel, "context_parallel": self.context_parallel}
            found |= {"data_ranks": self.data_ranks, **{name: size for name, size in sizes.items() if size > 1}}
        return found


def read_job(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the scheduler's `job`, as it writes its number, and when it was `submitted` and `allocated`, in Unix seconds.

    What the environment does not show is None. Raises TopologyError for a time that is not a number.
    """
    job = next((environ[name] for name in (JOB.job_id, "PBS_JOBID", "LSB_JOBID", "JOB_ID") if name in environ), None)
    times = {"submitted": SUBMIT_TIME, "allocated": START_TIME}
    return {"job": job, **{key: float(number(environ, name)) if name in environ else None for key, name in times.items()}}


def read(environ: Mapping[str, str]) -> Launched:
    """Return what `environ` promises.

    Raises TopologyError where several processes were started, or asked for, without the environment that joins them, or where
    the end of the allocation cannot be right, and PresetError where the preset sets what the recipe decides.
    """
    started = started_ranks.translate(environ)
    group = {**environ, **(started.variables if started else {})}
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & group.keys():
        # Accelerate sets these for a single process only if num_processes or num_machines is above 1; `samerun launch` refuses
        # presets that would start one process where several were asked for.
        if {"MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"} <= environ.keys() and LAUNCHER not in environ:
            raise TopologyError(
                f"`accelerate launch` was asked for several processes and started one ({said(environ, *_TORCHRUN[-2:])}, and "
                "no RANK), as it does with distributed_type MULTI_CPU or NO. Use accelerate_configs/multi_gpu.yaml, which also "
                "runs on CPU without GPUs; if it was asked for one process, unset MASTER_ADDR and MASTER_PORT."
            )
        group |= _ALONE
    elif missing := [name for name in _TORCHRUN if name not in group]:
        raise TopologyError(
            f"the environment has {said(group, *sorted(group.keys() & set(_TORCHRUN)))} but not {', '.join(missing)}: a "
            f"process needs all of {', '.join(_TORCHRUN)} to find the others. Start the run with `accelerate launch` or "
            "`samerun launch`, or unset these variables."
        )
    rank, world_size, local_rank, _ = (number(group, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    local_world_size = number(group, "LOCAL_WORLD_SIZE", default=1)
    if rank >= world_size:
        raise TopologyError(f"RANK is {rank} and WORLD_SIZE is {world_size}: the rank must be in 0..{world_size - 1}.")
    _refuse_unsupported(environ)
    strategy = _strategy(environ)
    if started and strategy != "ddp":
        raise PresetError(
            f"{started.starter} started {world_size} processes, which can only run DDP, but the environment asks for "
            f"{strategy}: use {started.starter.split()[0]} to start `samerun launch --preset ...` once per node, which starts "
            "the processes of that node."
        )
    sizes = topology.read(environ, strategy, world_size=world_size, per_node=local_world_size)
    return Launched(
        world_size=world_size,
        rank=rank,
        local_rank=started.local_rank if started else local_rank,
        local_world_size=local_world_size,
        strategy=strategy,
        replicas=sizes.replicas,
        tensor_parallel=sizes.tensor_parallel,
        context_parallel=sizes.context_parallel,
        mixed_precision=environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        use_cpu=_is_true(environ, "ACCELERATE_USE_CPU"),
        end_time_s=end_time_s(environ),
        preset_file=environ.get(PRESET_FILE),
        errors=errors_folder(environ),
        micro_batch=number(environ, topology.MICRO_BATCH) if topology.MICRO_BATCH in environ else None,
        variables=started.variables if started else {},
    )


def without_leftovers(environ: Mapping[str, str], *, say: Callable[[str], None]) -> dict[str, str]:
    """Return the environment without what an earlier `accelerate launch`, or a script for one, left in it, and report that.

    Accelerate would believe it: it sets the variables of a preset's strategy, and unsets none of another. In a pod of Kubeflow,
    RANK and WORLD_SIZE count pods and not processes: they are left out too.
    """
    if "PET_NODE_RANK" in environ and "LOCAL_RANK" not in environ:
        environ = {name: value for name, value in environ.items() if name not in ("RANK", "WORLD_SIZE")}
    leftovers = sorted(filter(_OF_ACCELERATE.fullmatch, environ))
    if leftovers:
        say(f"the preset decides, so these variables of the shell are not passed on: {said(environ, *leftovers)}")
    return {name: value for name, value in environ.items() if name not in leftovers}


def errors_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in which a process records why it fails, if its launcher named one."""
    return Path(environ[ERRORS]) if ERRORS in environ else None


def end_time_s(environ: Mapping[str, str]) -> float | None:
    """Return when the allocation ends, in Unix seconds, if it is known. Raises TopologyError for a time that is none."""
    if END_TIME not in environ:
        return None
    end_s = number(environ, END_TIME)
    if 0 < end_s - time.time() < _LONGEST_ALLOCATION_S:
        return float(end_s)
    now = f"{time.time():.0f} by the clock of {socket.gethostname()}"
    raise TopologyError(
        f"{END_TIME} is {end_s}: it must be the end of the allocation in Unix seconds, and now is {now}. "
        "Unset it if it comes from another job; correct the clock if that is wrong."
    )


def _refuse_unsupported(environ: Mapping[str, str]) -> None:
    """Raise PresetError for a setting of the preset that the recipe decides, or that no run can have."""
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    is_fsdp, version = _is_true(environ, "ACCELERATE_USE_FSDP"), environ.get("FSDP_VERSION", "1")
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    refusals = (
        (accumulation not in ("auto", "1"),
         f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {accumulation}: accumulation is derived from train.global_batch_size. "
         "Remove it from preset and environment; to limit the samples of one forward pass, set train.max_micro_batch."),
        (clipping not in ("auto", "none"),
         f"the preset's gradient_clipping is {clipping}: it belongs to the recipe. Remove it, and set optim.clip_norm."),
        (_is_true(environ, "ACCELERATE_USE_MEGATRON_LM"),
         "the preset's distributed_type is MEGATRON_LM: use MULTI_GPU, DEEPSPEED or FSDP (fsdp_version: 2)."),
        (is_fsdp and version != "2",
         f"fsdp_version is {version} (preset, or FSDP_VERSION of the shell): use 2, as accelerate_configs/fsdp2.yaml does. If "
         "the preset is not one of FSDP, run `unset ACCELERATE_USE_FSDP`."),
        (is_fsdp and _is_true(environ, "FSDP_ACTIVATION_CHECKPOINTING"),
         "the preset's fsdp_activation_checkpointing is true: Accelerate recomputes layers with other random numbers, so with "
         "dropout the gradients are wrong. Remove it, and set train.checkpoint_activations=blocks."),
        (_is_true(environ, "ACCELERATE_USE_DEEPSPEED") and "ACCELERATE_CONFIG_DS_FIELDS" not in environ,
         "ACCELERATE_USE_DEEPSPEED is set in the shell, but the preset is not one of DeepSpeed: run `unset "
         "ACCELERATE_USE_DEEPSPEED`, or use a preset such as deepspeed_zero2."),
        (precision.lower() not in PRECISIONS,
         f"mixed_precision is {precision}, from the preset, the command line or ACCELERATE_MIXED_PRECISION: use one of "
         f"{', '.join(PRECISIONS)}. 8-bit numbers are not supported."),
    )  # fmt: skip
    for is_wrong, sentence in refusals:
        if is_wrong:
            raise PresetError(sentence)


def _strategy(environ: Mapping[str, str]) -> Strategy:
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        if file := environ.get(deepspeed_file.VARIABLE):
            deepspeed_file.read(file)  # refuses what the file must not set
        return "deepspeed"
    return "fsdp2" if _is_true(environ, "ACCELERATE_USE_FSDP") else "ddp"


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1")


@dataclass(frozen=True)
class Sharding:
    """The part of a model and its training state that each process keeps."""

    kind: Strategy = "ddp"
    """The strategy that synchronizes the processes; one process under `ddp` needs none."""
    stage: int = 0
    """DeepSpeed's ZeRO stage; 0: each process keeps everything."""
    offload: bool = False
    """True if any of it is kept in the host's memory."""
    replicas: int = 1
    """Copies of the model, each sharded over an equal number of processes (fsdp2)."""
    tensor_parallel: int = 1
    """Processes that split each large matrix (fsdp2)."""
    context_parallel: int = 1
    """Processes that split each sequence (fsdp2)."""

    @property
    def processes_per_rank(self) -> int:
        """Processes of each data-parallel rank."""
        return self.tensor_parallel * self.context_parallel

    def remedy(self, processes: int, *, on_cpu: bool) -> str:
        """Return what shards more than this does. `on_cpu`: the host computes, so that offloading to it gains nothing."""
        devices = "machines" if on_cpu else "devices"
        if self.kind == "ddp" and processes == 1:
            return f"several {devices} with --preset fsdp2"
        if self.replicas > 1 or (self.kind != "fsdp2" and self.stage < 3):
            return "--preset fsdp2"
        can_offload = self.processes_per_rank == 1 and not (self.offload or on_cpu)
        return f"more {devices}" + (", or --preset deepspeed_zero3_offload" if can_offload else "")

    def what_to_change(self, processes: int, *, micro_batch: int, checkpoint_activations: str, on_cpu: bool) -> str:
        """Return what to change in a run that ran out of memory."""
        changes = [f"train.max_micro_batch={micro_batch // 2}"] if micro_batch > 1 else []
        changes += ["train.checkpoint_activations=blocks"] if checkpoint_activations == "none" else []
        return f"Change {', or '.join([*changes, self.remedy(processes, on_cpu=on_cpu)])}"
