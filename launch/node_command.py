"""The command that starts the processes of one node. Pure: the same topology and preset give the same command.

    python run_module.py accelerate.commands.launch --config_file PRESET --num_processes N ... run_module.py app.train ...

is `accelerate launch ... -m app.train ...` with this very interpreter, and whatever the working folder holds (`run_module.py`);
an `accelerate` on the PATH may belong to another environment, or be missing where the environment is not activated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from app.environment.degrees import KEY
from app.environment.launched import NO_FP16_ON_CPU
from app.environment.topology import Topology
from app.errors import PresetError
from launch import parallelism
from launch.preset import Preset, contradiction
from launch.run_module import ACCELERATE, program

_BOTH_STREAMS = "3"
"""torchrun's value for stdout and stderr."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""Signals that torchrun (2.13 and later) passes on to its processes. By default it dies of the last two."""


def accelerate_argv(  # noqa: PLR0913  (keyword-only after the parts)
    topology: Topology,
    preset: Preset,
    app_args: Sequence[str],
    *,
    module: str = "app.train",
    mixed_precision: str | None = None,
    node_rank: int | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[str]:
    """Return the arguments of the `accelerate launch` that starts this node's processes of `module`, program first.

    `node_rank` stands for another node, `mixed_precision` replaces the preset's, and `sizes` replace those of its
    parallelism_config. Where the names of the hosts are known, each line of a process begins with its rank and host. With one
    process, the presets for several work unchanged: their process is a group of one, with a RANK and a WORLD_SIZE like any
    other (only the option --multi_gpu refuses it, which a file does not set).

    Raises PresetError for a preset that starts one process where the topology has more (Accelerate would start it silently),
    for fp16 under a preset that asks for the CPU and for sizes that the preset does not have; TopologyError for sizes that do
    not divide the processes.
    """
    _check(topology, preset, mixed_precision, sizes)
    node_rank = topology.node_rank if node_rank is None else node_rank
    label_lines = bool(topology.hosts) and not preset.is_single_process
    variables = []
    if topology.threads_per_process is not None:
        # Not --num_cpu_threads_per_process, which Accelerate drops under DeepSpeed; torchrun would then set 1.
        variables.append(f"OMP_NUM_THREADS={topology.threads_per_process}")
    if label_lines:
        # One log for many: each line names its process. torchrun has a name for the host since torch 2.14 only.
        variables.append(f"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank ${{rank}} on {topology.hosts[node_rank]}] ")
    variables += [f"{name}={value}" for name, value in preset.variables.items()]
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


def _check(topology: Topology, preset: Preset, mixed_precision: str | None, sizes: Mapping[str, int]) -> None:
    if preset.is_single_process and topology.world_size > 1:
        raise PresetError(
            f"preset {preset.name} starts 1 process, and this run has {topology.world_size}: "
            f"{topology.described('processes_per_node')}, {topology.described('num_nodes')}. Use a preset for several "
            "processes, such as multi_gpu, or 1 process"
        )
    if preset.use_cpu and mixed_precision == "fp16":
        raise PresetError(f"--mixed-precision is fp16, and preset {preset.name} asks for the CPU: {NO_FP16_ON_CPU}")
    if problem := contradiction(preset, topology, mixed_precision or preset.mixed_precision):
        raise PresetError(f"preset {preset.path}: {problem}")
    parallelism.of_launch(preset.name, preset.sizes, topology, sizes)
