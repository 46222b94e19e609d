"""The command that starts the processes of one node. Pure: the same topology and preset give the same command.

    python run_module.py accelerate.commands.launch --config_file PRESET --num_processes N ... run_module.py app.train ...

is `accelerate launch ... -m app.train ...` with this very interpreter, and whatever the working folder holds (`run_module.py`);
an `accelerate` on the PATH may belong to another environment, or be missing where the environment is not activated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from app.environment.launched import NO_FP16_ON_CPU
from app.environment.topology import Topology
from app.errors import PresetError
from launch import parallelism
from launch.preset import Preset, contradiction
from launch.run_module import ACCELERATE, program

_BOTH_STREAMS = "3"
"""torchrun's word for stdout and stderr."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""Those that torchrun (2.13 and later) passes on to its processes. By default it dies of the last two."""


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

    `node_rank` makes them those of another node, `mixed_precision` replaces the preset's, and `sizes` those of its
    parallelism_config. Where the names of the hosts are
    known, each line of a process begins with its rank and host. With one process, the presets for
    several work as they are: their process is a group of one, with a RANK and a WORLD_SIZE like any other (only the option
    --multi_gpu refuses it, which a file does not set). Raises PresetError for a preset that starts one process where the
    topology has more: Accelerate would start it without a word. And for fp16 under one that asks for the CPU. And for
    sizes that it has not; TopologyError for those that do not divide the processes.
    """
    if preset.is_single_process and topology.world_size > 1:
        raise PresetError(
            f"preset {preset.name} starts 1 process, and this run has {topology.world_size}: "
            f"{topology.described('processes_per_node')}, {topology.described('num_nodes')}. Use a preset for several "
            "processes, such as multi_gpu, or 1 process"
        )
    if preset.use_cpu and mixed_precision == "fp16":
        raise PresetError(f"--mixed-precision is fp16, and preset {preset.name} asks for the CPU: {NO_FP16_ON_CPU}")
    contradicting = contradiction(
        preset,
        num_nodes=topology.num_nodes,
        processes_per_node=topology.processes_per_node,
        precision=mixed_precision or preset.mixed_precision,
    )
    if contradicting:
        raise PresetError(f"preset {preset.path}: {contradicting}")
    parallelism.of_launch(preset.name, preset.sizes, topology, sizes)
    argv = [*program(ACCELERATE), "--config_file", str(preset.path)]
    node_rank = topology.node_rank if node_rank is None else node_rank
    label_lines = bool(topology.hosts) and not preset.is_single_process
    variables = _variables(topology, node_rank, label_lines)
    variables += [f"{name}={value}" for name, value in preset.variables.items()]
    if not preset.is_single_process:
        variables.append(f"PET_SIGNALS_TO_HANDLE={_SIGNALS}")
    if variables:
        argv = ["env", *variables, *argv]
    argv += ["--num_processes", str(topology.world_size)]
    if not preset.is_single_process:
        argv += ["--num_machines", str(topology.num_nodes), *_meeting_point(topology, node_rank)]
        argv += ["--tee", _BOTH_STREAMS] if label_lines else []
    if mixed_precision is not None:
        argv += ["--mixed_precision", mixed_precision]
    argv += parallelism.argv(sizes)
    return [*argv, *program(module)[1:], *app_args]


def _variables(topology: Topology, node_rank: int, label_lines: bool) -> list[str]:
    variables = []
    if topology.threads_per_process is not None:
        # Not --num_cpu_threads_per_process, which Accelerate drops under DeepSpeed; torchrun would then set 1.
        variables.append(f"OMP_NUM_THREADS={topology.threads_per_process}")
    if label_lines:
        # One log for many: each line says whose it is. torchrun has a name for the host since torch 2.14 only.
        variables.append(f"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[rank ${{rank}} on {topology.hosts[node_rank]}] ")
    return variables


def _meeting_point(topology: Topology, node_rank: int) -> list[str]:
    port = ["--main_process_port", str(topology.port)]
    if topology.num_nodes == 1:
        return port
    return ["--machine_rank", str(node_rank), "--main_process_ip", topology.head_address, *port]
