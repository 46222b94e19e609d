"""The `parallelism_config` of a preset: its legal keys, and the sizes that follow from them in a launch.

Accelerate hands its keys on if they have their whole prefix, and drops others without a word; on its command line they count
only where the file has the section (accelerate 1.15, `commands/launch.py`, `_validate_launch_command`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.environment import degrees
from app.environment.degrees import DERIVED, KEY, UNSUPPORTED, Degrees
from app.environment.topology import Topology
from app.errors import PresetError

SECTION = "parallelism_config"
OPTIONS = {"dp_replicate_size": "--replicas", "tp_size": "--tensor-parallel"}
"""Our option for each size."""
PRESETS = {"dp_replicate_size": "hsdp", "tp_size": "tensor_parallel"}
"""The shipped preset that has each size."""
_SIZES = (*OPTIONS, "dp_shard_size")
_OF_UNSUPPORTED = ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
                   "sp_attn_implementation")  # fmt: skip
"""Settings of what is not supported. `accelerate config` writes them anyway."""


def problems(section: Any, kind: Any) -> Iterator[str]:
    """Yield what is wrong with the section of a preset whose distributed_type is `kind`, a sentence each."""
    if section is not None and not isinstance(section, dict):
        yield f"{SECTION} is {section!r}: it must hold `key: value` lines"
    for key, value in section.items() if isinstance(section, dict) else ():
        name = key.removeprefix(KEY)
        if name in _OF_UNSUPPORTED and name != key:
            continue
        if name in UNSUPPORTED:
            if value != 1:
                yield f"{key} is {value!r}: {UNSUPPORTED[name]}; remove it"
        elif name not in _SIZES:
            yield f"{key}: unknown key of a preset; known are {', '.join(KEY + size for size in _SIZES)}"
        elif name == key:
            yield f"{key} is {value!r}: Accelerate ignores it without its prefix; write {KEY}{key}: {value}"
        elif type(value) is not int or (value < 1 and value != DERIVED):
            yield f"{key} is {value!r}: it must be a whole number, at least 1, or -1, which derives it from the topology"
    if kind != "FSDP" and any(size != 1 for size in sizes_of(section).values()):
        yield (
            f"{SECTION}: distributed_type is {kind}, and these sizes need FSDP; remove the section, or change distributed_type"
        )


def sizes_of(section: Any) -> dict[str, int]:
    """Return the sizes that a section sets, by their names without the prefix."""
    return {name: section[KEY + name] for name in _SIZES if isinstance(section, dict) and KEY + name in section}


def preset_for(asked: Mapping[str, int]) -> str | None:
    """Return the shipped preset that has the sizes of the command line; None: it has none."""
    return next((PRESETS[name] for name in asked), None)


def asked_by(options: Any) -> dict[str, int]:
    """Return the sizes that the options of a launch set."""
    given = {name: getattr(options, option[2:].replace("-", "_")) for name, option in OPTIONS.items()}
    return {name: int(size) for name, size in given.items() if size is not None}


def of_launch(preset: str, sizes: Mapping[str, int], topology: Topology, asked: Mapping[str, int]) -> Degrees:
    """Return the degrees of a preset with these sizes, of which the command line replaces those in `asked`.

    Raises PresetError for a size that the preset does not have, and TopologyError for one that does not divide the processes.
    """
    for name, size in asked.items():
        if name not in sizes:
            raise PresetError(
                f"{OPTIONS[name]} is {size}, but preset {preset} has no {KEY}{name}, so Accelerate would "
                f"ignore it: use preset {PRESETS[name]}"
            )
    found = {**sizes, **asked}
    if not found:  # called for each of thousands of nodes
        return Degrees()
    return degrees.derived(
        replicas=found.get("dp_replicate_size", 1),
        shards=found.get("dp_shard_size", 1),
        tensor_parallel=found.get("tp_size", 1),
        world_size=topology.world_size,
        per_node=topology.processes_per_node,
        origins={name: OPTIONS[name] if name in asked else f"preset {preset}" for name in found},
    )


def data_ranks(preset: str, sizes: Mapping[str, int], topology: Topology) -> int:
    """Return how many ranks divide the global batch under a preset, as it is. Raises TopologyError."""
    return topology.world_size // of_launch(preset, sizes, topology, {}).tensor_parallel
