"""The one process of a run, started without an `accelerate launch` before it.

For one process that launcher imports torch, two seconds of CPU and 220 MB, to set a few variables of the environment. Here they
are set without torch, by the same rules; a test compares them with what the launcher itself gives. What is not known here is
left to it. Facts: accelerate 1.15, `commands/launch.py` (`_validate_launch_command`) and `utils/launch.py`; torch 2.14,
`distributed/elastic/agent/server/local_elastic_agent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.environment.topology import Topology
from app.environment.variables import PRESET_FILE
from launch.preset import Preset, says_nothing
from launch.run_module import program

_UNDERSTOOD = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "num_processes", "num_machines",
    "main_training_function", "dynamo_backend", "dynamo_config",
}  # fmt: skip
_COMPILERS = ("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS")
_NO_COMPILER = {
    "backend": "NO",
    "mode": "default",
    "use_fullgraph": "False",
    "use_dynamic": "False",
    "use_regional_compilation": "False",
}
_BESIDE_IT = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""Where MPI tells how many processes share this node."""
# What torchrun gives the process of a group of one, which keeps the group's store itself, at any port: nobody looks for it.
_GROUP_OF_ONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}  # fmt: skip


def argv(
    topology: Topology,
    preset: Preset,
    app_args: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: str = "app.train",
    mixed_precision: str | None = None,
) -> list[str] | None:
    """Return the command of the one process of `module`, or None where `accelerate launch` has to start it.

    `environment` is what the process inherits.
    """
    told = variables(topology, preset, environment, mixed_precision=mixed_precision)
    if told is None:
        return None
    told[PRESET_FILE] = str(preset.path)
    return ["env", *(f"{name}={value}" for name, value in told.items()), *program(module), *app_args]


def variables(
    topology: Topology, preset: Preset, environment: Mapping[str, str], *, mixed_precision: str | None = None
) -> dict[str, str] | None:
    """Return what `accelerate launch` would set for the one process, or None where that is not known."""
    told = {"ACCELERATE_MIXED_PRECISION": mixed_precision or preset.mixed_precision}
    threads = str(topology.threads_per_process) if topology.threads_per_process else environment.get("OMP_NUM_THREADS")
    compiling = _compiling(preset.settings)
    # Accelerate's other keys, and those that a user's file may have and that change nothing.
    asked = {key: value for key, value in preset.settings.items() if (key, value) != ("debug", False)}
    foreign = [key for key, value in asked.items() if key not in _UNDERSTOOD and not says_nothing(key, value)]
    if topology.world_size != 1 or foreign or compiling is None or preset.variables:
        return None
    count = _threads(threads, environment, use_cpu=preset.use_cpu)
    if count is None:
        return None
    told |= {**compiling, "OMP_NUM_THREADS": str(count)}
    if preset.distributed_type == "MULTI_GPU":
        own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
        return None if topology.hosts else told | _GROUP_OF_ONE | own  # torchrun begins each line with the rank and its host
    # Left over by others: `app/environment/launched.py` then asks the launcher's command line for how many it was asked.
    if preset.distributed_type != "NO" or {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    spinning = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"} if preset.use_cpu else {}
    return told | {"ACCELERATE_USE_CPU": str(preset.use_cpu)} | spinning


def _compiling(settings: Mapping[str, Any]) -> dict[str, str] | None:
    """How to compile, where that is known."""
    section = settings.get("dynamo_config") or {}
    if "dynamo_backend" in settings:  # Accelerate then looks at nothing else
        section = {"backend": settings["dynamo_backend"]}
    if not isinstance(section, dict):
        return None
    asked = {key.removeprefix("dynamo_"): str(value) for key, value in section.items()}
    asked = {**_NO_COMPILER, **asked, "backend": asked.get("backend", "NO").upper()}
    if asked.keys() != _NO_COMPILER.keys() or asked["backend"] not in _COMPILERS:
        return None
    return {f"ACCELERATE_DYNAMO_{name.upper()}": value for name, value in asked.items()}


def _threads(given: str | None, environment: Mapping[str, str], *, use_cpu: bool) -> int | None:
    """The CPU threads of the process: as given, else 1, and on the CPU all cores divided by MPI's processes."""
    if given is not None:
        return int(given) if given.isdecimal() and int(given) else None
    if not use_cpu:
        return 1
    beside = next((environment[name] for name in _BESIDE_IT if name in environment), "1")
    if not beside.isdecimal() or not int(beside):
        return None
    try:
        import psutil  # not at the top: a login node may not have it
    except ImportError:
        return None
    cores = psutil.cpu_count(logical=False)
    return max(1, cores // int(beside)) if cores else None
