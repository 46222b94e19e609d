"""The sizes of other ways to shard than over all processes: copies of the model (HSDP) and tensor parallelism.

Presets say it by Accelerate's own keys, `parallelism_config_*`, which `accelerate launch` hands on as variables of the
environment. A size of -1, as the shipped ones have it, is derived from the topology. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from app.errors import PresetError, TopologyError

KEY = "parallelism_config_"
"""Prefix of a size's name in a preset, and after `--` on Accelerate's command line."""
_IN_USE = "ACCELERATE_USE_PARALLELISM_CONFIG"
_PREFIX = KEY.upper()
DERIVED = -1
"""The size that is derived from the topology."""
UNSUPPORTED = {
    "cp_size": "context parallelism is not supported",
    "sp_size": "sequence parallelism is not supported",
    "pp_size": "pipelines are not supported (examples/gpipe shows one)",
}


class Degrees(NamedTuple):
    """The sizes of tensor parallelism and of copies of a model."""

    replicas: int = 1
    """Copies of it, each of which is sharded over world_size / replicas neighboring ranks; 1: no copies."""
    tensor_parallel: int = 1
    """Neighboring ranks that compute the same samples together, each with a part of every large matrix."""


def read(environ: Mapping[str, str], strategy: str, *, world_size: int, per_node: int) -> Degrees:
    """Return the degrees of `world_size` processes, `per_node` on each node, as the environment specifies.

    Raises PresetError for what is not supported, and TopologyError for sizes that do not divide the processes.
    """
    if environ.get(_IN_USE, "false").lower() not in ("true", "1"):
        return Degrees()
    sizes = {name: _size(environ, name) for name in ("dp_replicate_size", "dp_shard_size", "tp_size", *UNSUPPORTED)}
    for name, size in sizes.items():
        if size != 1 and (name in UNSUPPORTED or strategy != "fsdp2"):
            needs = f"the preset's strategy is {strategy}, and this size needs distributed_type FSDP, fsdp_version 2"
            raise PresetError(f"{KEY}{name} is {size}: {UNSUPPORTED.get(name, needs)}. Leave it out of the preset")
    return derived(
        replicas=sizes["dp_replicate_size"],
        shards=sizes["dp_shard_size"],
        tensor_parallel=sizes["tp_size"],
        world_size=world_size,
        per_node=per_node,
        origins={name: _PREFIX + name.upper() for name in sizes},
    )


def derived(
    *, replicas: int, shards: int, tensor_parallel: int, world_size: int, per_node: int, origins: Mapping[str, str]
) -> Degrees:
    """Return the degrees that follow from a preset's sizes: of one process both are 1.

    Raises PresetError for both at once, and TopologyError for sizes that do not divide the processes.
    """
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": tensor_parallel}
    named = {name: f"{KEY}{name} is {size} ({origins.get(name, 'default')})" for name, size in sizes.items()}
    if replicas != 1 and tensor_parallel != 1:
        raise PresetError(
            f"{named['dp_replicate_size']} and {named['tp_size']}: replicas cannot be combined with tensor "
            "parallelism; remove one of them"
        )
    copies = world_size // per_node if replicas == DERIVED else replicas
    parts = per_node if tensor_parallel == DERIVED else tensor_parallel
    for name, size in {"dp_replicate_size": copies, "tp_size": parts}.items():
        if world_size % size:
            raise TopologyError(
                f"{named[name]}, which does not divide the {world_size} "
                f"process{'es' if world_size > 1 else ''}: choose another size, or another number of processes"
            )
    left = world_size // (copies * parts)
    if shards not in (1, DERIVED, left):
        raise TopologyError(f"{named['dp_shard_size']}, but {world_size} processes leave {left} for each copy: remove it")
    if copies > 1 and left == 1:
        raise TopologyError(
            f"{named['dp_replicate_size']}, and there are {world_size} processes: with one process per copy "
            "nothing is sharded. Use more processes per node, or multi_node.yaml, which keeps whole copies"
        )
    return Degrees(copies, parts)


def _size(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(_PREFIX + name.upper(), "1")
    if text != str(DERIVED) and not (text.isdecimal() and int(text)):
        raise PresetError(
            f"{KEY}{name} is {text!r} ({_PREFIX}{name.upper()}): it must be a whole number, at least 1, or -1, which derives it"
        )
    return int(text)
