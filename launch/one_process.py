"""The one process of a run, started without an `accelerate launch` before it.

For one process that launcher imports torch, two seconds of CPU and 220 MB, to set a few variables of the environment. Here they
are set without torch, by the same rules; a test compares them with what the launcher itself gives. What is not known here is
left to it. Facts: accelerate 1.15, `commands/launch.py` (`_validate_launch_command`) and `utils/launch.py`; torch 2.14,
`distributed/elastic/agent/server/local_elastic_agent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.environment.topology import Topology
from app.environment.variables import PRESET_FILE
from launch import parallelism
from launch.preset import Preset, compiler
from launch.run_module import program

_COMPILERS = ("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS")
_NO_COMPILER = {
    "backend": "NO",
    "mode": "default",
    "use_fullgraph": "False",
    "use_dynamic": "False",
    "use_regional_compilation": "False",
}
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")
"""MPI's variables for the number of processes on this node."""
# Set by torchrun for a group of one, which keeps its own store at any port, as no other process needs it.
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
    found = variables(topology, preset, environment, mixed_precision=mixed_precision)
    if found is None:
        return None
    found[PRESET_FILE] = str(preset.path)
    return ["env", *(f"{name}={value}" for name, value in found.items()), *program(module), *app_args]


def variables(
    topology: Topology, preset: Preset, environment: Mapping[str, str], *, mixed_precision: str | None = None
) -> dict[str, str] | None:
    """Return what `accelerate launch` would set for the one process, or None where that is not known."""
    compiling = _NO_COMPILER | {key: str(value) for key, value in compiler(preset.settings).items()}
    compiling["backend"] = compiling["backend"].upper()
    is_known = compiling.keys() == _NO_COMPILER.keys() and compiling["backend"] in _COMPILERS
    # Keys of a preset that only Accelerate's launcher understands.
    is_known &= preset.settings.get("debug", False) is False and parallelism.SECTION not in preset.settings
    threads = _threads(topology.threads_per_process, environment, use_cpu=preset.use_cpu)
    if topology.world_size != 1 or not is_known or preset.variables or threads is None:
        return None
    found = {"ACCELERATE_MIXED_PRECISION": mixed_precision or preset.mixed_precision, "OMP_NUM_THREADS": str(threads)}
    found |= {f"ACCELERATE_DYNAMO_{name.upper()}": value for name, value in compiling.items()}
    if preset.distributed_type == "MULTI_GPU":
        own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
        return None if topology.hosts else found | _GROUP_OF_ONE | own  # torchrun begins each line with the rank and its host
    if preset.distributed_type != "NO":
        return None
    spinning = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"} if preset.use_cpu else {}
    return found | {"ACCELERATE_USE_CPU": str(preset.use_cpu)} | spinning


def _threads(given: int | None, environment: Mapping[str, str], *, use_cpu: bool) -> int | None:
    """Return the CPU threads of the process: as given, else 1, and on the CPU all cores divided by MPI's processes."""
    if given:
        return given
    if (text := environment.get("OMP_NUM_THREADS")) is not None:
        return int(text) if text.isdecimal() and int(text) else None
    if not use_cpu:
        return 1
    local_size = next((environment[name] for name in _LOCAL_SIZE if name in environment), "1")
    if not local_size.isdecimal() or not int(local_size):
        return None
    try:
        import psutil  # not at the top: a login node may not have it
    except ImportError:
        return None
    cores = psutil.cpu_count(logical=False)
    return max(1, cores // int(local_size)) if cores else None
