"""Commands that start the processes of one node: by `accelerate launch`, or one process without it.

    python run_module.py accelerate.commands.launch --config_file PRESET --num_processes N ... run_module.py app.train ...

is `accelerate launch ... -m app.train ...` with this very interpreter, and whatever the working folder holds (`run_module.py`);
an `accelerate` on the PATH may belong to another environment, or be missing where the environment is not activated. The same
topology and preset give the same command.

For one process that launcher imports torch, two seconds of CPU and 220 MB, to set a few variables of the environment.
`one_process_argv` sets them without torch, by the same rules; a test compares them with what the launcher itself gives. What it
does not know is left to the launcher. Facts: accelerate 1.15, `commands/launch.py` (`_validate_launch_command`) and
`utils/launch.py`; torch 2.14, `distributed/elastic/agent/server/local_elastic_agent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from app.environment.launched import NO_FP16_ON_CPU
from app.environment.topology import KEY, MICRO_BATCH, PRESET_FILE, Topology
from app.errors import PresetError
from launch.preset import PARALLELISM, Preset
from launch.run_module import ACCELERATE, program

_BOTH_STREAMS = "3"
"""torchrun's value for stdout and stderr."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""Signals that torchrun (2.13 and later) passes on to its processes. By default it dies of the last two."""
# Set by Accelerate for a preset that compiles nothing.
_NO_COMPILER = {
    "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}  # fmt: skip
# Set by torchrun for a group of one, which keeps its own store at any port, as no other process needs it.
_GROUP_OF_ONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}  # fmt: skip


def accelerate_argv(
    topology: Topology,
    preset: Preset,
    app_args: Sequence[str],
    *,
    module: str = "app.train",
    mixed_precision: str | None = None,
    node_rank: int | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
    micro_batch: int | None = None,
) -> list[str]:
    """Return the arguments of the `accelerate launch` that starts this node's processes of `module`, program first.

    `node_rank` stands for another node, `mixed_precision` replaces the preset's, `sizes` replace the sizes in its
    parallelism_config, and `micro_batch` is the most samples of a pass if the recipe leaves that to the launcher. Where the
    names of the hosts are known, each line of a process begins with its rank and host. With one process, the presets for
    several work unchanged: their process is a group of one, with a RANK and a WORLD_SIZE like any other (only the option
    --multi_gpu refuses it, which a file does not set).

    Raises PresetError for a preset that starts one process where the topology has more (Accelerate would start it silently),
    for fp16 under a preset that asks for the CPU, for a file that contradicts the launch and for sizes that the preset does not
    have; TopologyError for sizes that do not divide the processes.
    """
    if preset.is_single_process and topology.world_size > 1:
        raise PresetError(
            f"preset {preset.name} starts 1 process, and this run has {topology.world_size}: "
            f"{topology.described('processes_per_node')}, {topology.described('num_nodes')}. Use a preset for several "
            "processes, such as multi_gpu, or 1 process"
        )
    if preset.use_cpu and mixed_precision == "fp16":
        raise PresetError(f"--mixed-precision is fp16, and preset {preset.name} asks for the CPU: {NO_FP16_ON_CPU}")
    if problem := preset.contradiction(topology, mixed_precision or preset.mixed_precision):
        raise PresetError(f"preset {preset.path}: {problem}")
    preset.degrees(topology, sizes)
    node_rank = topology.node_rank if node_rank is None else node_rank
    label_lines = bool(topology.hosts) and not preset.is_single_process
    variables = []
    if topology.threads_per_process is not None:
        # Not --num_cpu_threads_per_process, which Accelerate drops under DeepSpeed; torchrun would then set 1.
        variables.append(f"OMP_NUM_THREADS={topology.threads_per_process}")
    if micro_batch is not None:
        variables.append(f"{MICRO_BATCH}={micro_batch}")
    if label_lines:
        # One log for many: each line names its process. torchrun has a name for the host since torch 2.14 only.
        variables.append(f"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank ${{rank}} on {topology.hosts[node_rank]}] ")
    compiler = preset.compiler()
    if preset.strategy == "deepspeed" and compiler.get("backend"):
        # Accelerate (1.15, `prepare_deepspeed_cmd_env`) hands on how to compile under every type but this.
        variables += [f"ACCELERATE_DYNAMO_{key.upper()}={value}" for key, value in compiler.items()]
    if not preset.is_single_process:
        variables.append(f"PET_SIGNALS_TO_HANDLE={_SIGNALS}")

    argv = ["env", *variables] if variables else []
    argv += [*program(ACCELERATE), "--config_file", str(preset.path), "--num_processes", str(topology.world_size)]
    if not preset.is_single_process:
        argv += ["--num_machines", str(topology.num_nodes)]
        if topology.num_nodes > 1:
            argv += ["--machine_rank", str(node_rank), "--main_process_ip", topology.head_address]
        argv += ["--main_process_port", str(topology.port)]
        argv += ["--tee", _BOTH_STREAMS] if label_lines else []
    if mixed_precision is not None:
        argv += ["--mixed_precision", mixed_precision]
    for name, size in sizes.items():
        argv += [f"--{KEY}{name}", str(size)]
    return [*argv, *program(module)[1:], *app_args]


def one_process_argv(
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
    variables = one_process_variables(topology, preset, environment, mixed_precision=mixed_precision)
    if variables is None:
        return None
    variables[PRESET_FILE] = str(preset.path)
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *program(module), *app_args]


def one_process_variables(
    topology: Topology, preset: Preset, environment: Mapping[str, str], *, mixed_precision: str | None = None
) -> dict[str, str] | None:
    """Return what `accelerate launch` would set for the one process, or None where that is not known."""
    # Keys of a preset that only Accelerate's launcher understands.
    is_known = preset.compiler() in ({}, {"backend": "NO"})
    is_known &= preset.settings.get("debug", False) is False and PARALLELISM not in preset.settings
    if topology.world_size != 1 or not is_known or preset.strategy != "ddp":
        return None
    precision = mixed_precision or preset.mixed_precision
    threads = _threads(topology.threads_per_process, environment, use_cpu=preset.use_cpu)
    found = {"ACCELERATE_MIXED_PRECISION": precision, "OMP_NUM_THREADS": threads, **_NO_COMPILER}
    if not preset.is_single_process:
        own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
        return None if topology.hosts else found | _GROUP_OF_ONE | own  # torchrun begins each line with the rank and its host
    spinning = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"} if preset.use_cpu else {}
    return found | {"ACCELERATE_USE_CPU": str(preset.use_cpu)} | spinning


def _threads(given: int | None, environment: Mapping[str, str], *, use_cpu: bool) -> str:
    """Return the CPU threads of the process: as given, else 1, and on the CPU all cores."""
    if given is not None or "OMP_NUM_THREADS" in environment:
        return str(given or environment["OMP_NUM_THREADS"])
    if not use_cpu:
        return "1"
    import psutil  # not at the top: a login node may not have it

    return str(psutil.cpu_count(logical=False) or 1)
