"""Where a run happens: processes, nodes, meeting point, and groups of processes that hold copies or parts of the model.

A `Topology` is found by one of the modules of `launch/` from this machine or from a scheduler's environment, and turned
into an `accelerate launch` command line by `launch/node_command.py`. It says nothing of what is learnt. A value that cannot
be right is refused here, with the place it came from.

Standard library only: it is made on login nodes, before torch is there.

Presets give the sizes of these groups by Accelerate's own keys, `parallelism_config_*`, which `accelerate launch` hands on as
variables of the environment. A size of -1, as the shipped presets have it, is derived from the topology.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.errors import PresetError, TopologyError

HOST_SUFFIX = "SAMERUN_HOST_SUFFIX"
"""Variable: what turns a host's name into its name in the fast network, where a site has names for that (JUWELS: `i`)."""

END_TIME = "SAMERUN_END_TIME"
"""Variable: when the job's time is over, in Unix seconds. The ranks save and stop before it. Where no scheduler says it, a
user may: `SAMERUN_END_TIME=$(date -d '+2 hours' +%s)`."""
SUBMIT_TIME, START_TIME = "SAMERUN_SUBMIT_TIME", "SAMERUN_START_TIME"
"""Variables: when the job was submitted, and when it was started this time, in Unix seconds."""

LAUNCHER = "SAMERUN_LAUNCHER"
"""Variable: the `samerun launch` that sees to a process on its machine, as the id of its process, a dash and a random word."""

ERRORS = "SAMERUN_ERRORS"
"""Variable: the folder in which the processes of a start record why they fail (app/runs/run_folder.py)."""

PRESET_FILE = "SAMERUN_PRESET_FILE"
"""Variable: the preset of a process that `samerun launch` starts itself, with no `accelerate launch --config_file` above it."""

MICRO_BATCH = "SAMERUN_MICRO_BATCH"
"""Variable: the most samples of a forward pass, which `samerun launch` chooses under train.max_micro_batch=auto."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The processes of one run, as seen from one node. Raises TopologyError, naming every value that cannot be."""

    num_nodes: int = 1
    """Machines that take part."""
    processes_per_node: int = 1
    """Processes on each of them, the same number everywhere: `accelerate launch` divides the total evenly."""
    node_rank: int = 0
    """Index of this machine, 0 to num_nodes - 1."""
    head_address: str = "127.0.0.1"
    """Name or IP address of machine 0, where the processes meet; the others must be able to reach it."""
    port: int = 0
    """TCP port on machine 0. 0, on one machine only: `accelerate launch` takes a free one when it starts."""
    hosts: tuple[str, ...] = ()
    """Names of the machines in the order of their rank, where known."""
    threads_per_process: int | None = None
    """CPU threads of each process (OMP_NUM_THREADS). None: what the environment says."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where a value came from, by field name ("--processes", "CUDA_VISIBLE_DEVICES=0,1"); a field not in it is a default."""

    def __post_init__(self) -> None:
        is_one, nodes = self.num_nodes <= 1, self.described("num_nodes")
        is_rank = self.node_rank in range(max(self.num_nodes, 1))
        is_loopback = re.fullmatch(r"localhost(\.localdomain)?|127\.[\d.]+|::1", self.head_address) is not None
        is_reached = self.head_address != "" and (is_one or not is_loopback)
        counts = ("num_nodes", "processes_per_node", "threads_per_process")
        rules = [(name, getattr(self, name) is None or getattr(self, name) >= 1, "it must be at least 1") for name in counts]
        rules += [
            ("node_rank", is_rank, f"with {nodes} it must be 0 to {self.num_nodes - 1}"),
            ("port", 0 <= self.port <= 65535, "it must be a TCP port, 1 to 65535, or 0 for any free one"),
            ("port", is_one or self.port != 0, f"{self.num_nodes} nodes must use the same port"),
            ("head_address", is_reached, "it must be a name or address by which every node reaches node 0"),
            ("hosts", len(self.hosts) in (0, self.num_nodes), f"{nodes}, so there must be one name per node"),
        ]
        if problems := [f"{self.described(name)}: {rule}" for name, is_right, rule in rules if not is_right]:
            raise TopologyError("\n".join(problems))

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.num_nodes * self.processes_per_node

    def on_first(self, num_nodes: int | None) -> Topology:
        """Return the same on the first so many nodes (--nodes); None: on all. Raises TopologyError if there are fewer."""
        if num_nodes is None or num_nodes == self.num_nodes:
            return self
        if not 1 <= num_nodes < self.num_nodes:
            raise TopologyError(f"--nodes is {num_nodes}, and {self.described('num_nodes')}: give 1 to {self.num_nodes}")
        origins = {**self.origins, "num_nodes": "--nodes"}
        return replace(self, num_nodes=num_nodes, hosts=self.hosts[:num_nodes], origins=origins)

    def described(self, name: str) -> str:
        """One value with its origin, for messages: `processes_per_node is 2 (--processes)`."""
        value = getattr(self, name)
        return f"{name} is not set" if value is None else f"{name} is {value!r} ({self.origins.get(name, 'default')})"


def listed(names: Sequence[object], most: int = 8) -> str:
    """Return names of hosts or ranks with commas, the first `most` of them: `node1, node2 and 6 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


# ---- How values of the environment are read and shown -----------------------------------------------------------------------


def number(environment: Mapping[str, str], name: str, *, default: int = 0) -> int:
    """Return the whole number that a variable holds. Raises TopologyError for anything else."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise TopologyError(f"{name} is {text!r}: it must be a whole number")
    return int(text)


def said(environment: Mapping[str, str], *names: str) -> str:
    """Return the variables with their values, for messages: `SLURM_NODEID=1`."""
    return ", ".join(f"{name}={environment.get(name, '(not set)')}" for name in names)


def port_of_job(number: int, part: int = 0, *, apart: int = 97) -> int:
    """Return a TCP port, 12000 to 31999, that jobs on one head hardly share: below those that Linux deals out (32768 and up).

    Jobs meet only if their numbers differ by a multiple of 20000. `part` is the index of a task of an array, or of a step,
    whose ports lie so far `apart`, which has no factor in common with 20000: all of a job differ and, with 97, also from
    those of the jobs submitted after it for the next 96.
    """
    return 12000 + (number + apart * part) % 20000


def short(host: str) -> str:
    """Return the name of a host without its domain."""
    return host.partition(".")[0]


def with_suffix(host: str, environment: Mapping[str, str]) -> str:
    """Return the name of `host` in the fast network: `jwb0001.site` and SAMERUN_HOST_SUFFIX=i give `jwb0001i.site`."""
    name, dot, domain = host.partition(".")
    return f"{name}{environment.get(HOST_SUFFIX, '')}{dot}{domain}"


# ---- Sizes of a preset -------------------------------------------------------------------------------------------------------

KEY = "parallelism_config_"
"""Prefix of a size's name in a preset, and after `--` on Accelerate's command line."""
_IN_USE = "ACCELERATE_USE_PARALLELISM_CONFIG"
_PREFIX = KEY.upper()
DERIVED = -1
"""The size that is derived from the topology."""
UNSUPPORTED = {
    "sp_size": "sequence parallelism is not supported",
    "pp_size": "pipelines are not supported (examples/gpipe shows one)",
}


class Degrees(NamedTuple):
    """The sizes of tensor and context parallelism and of copies of a model."""

    replicas: int = 1
    """Copies of it, each of which is sharded over world_size / replicas neighboring ranks; 1: no copies."""
    tensor_parallel: int = 1
    """Neighboring ranks that compute the same samples together, each with a part of every large matrix."""
    context_parallel: int = 1
    """Neighboring ranks that compute the same samples together, each with a part of every sequence."""

    @property
    def processes_per_rank(self) -> int:
        """Processes of each data-parallel rank."""
        return self.tensor_parallel * self.context_parallel


def read(environ: Mapping[str, str], strategy: str, *, world_size: int, per_node: int) -> Degrees:
    """Return the degrees of `world_size` processes, `per_node` on each node, as the environment specifies.

    Raises PresetError for what is not supported, and TopologyError for sizes that do not divide the processes.
    """
    if environ.get(_IN_USE, "false").lower() not in ("true", "1"):
        return Degrees()
    sizes, origins = {}, {}
    for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", *UNSUPPORTED):
        origins[name] = variable = _PREFIX + name.upper()
        size = environ.get(variable, "1")
        if not re.fullmatch(r"-1|[1-9]\d*", size):
            raise PresetError(
                f"{KEY}{name} is {size!r} ({variable}): it must be a whole number, at least 1, or -1, which derives it"
            )
        if size != "1" and (name in UNSUPPORTED or strategy != "fsdp2"):
            needs = f"the preset's strategy is {strategy}, and this size needs distributed_type FSDP, fsdp_version 2"
            raise PresetError(f"{KEY}{name} is {size}: {UNSUPPORTED.get(name, needs)}. Leave it out of the preset")
        sizes[name] = int(size)
    return derived(sizes, origins, world_size=world_size, per_node=per_node)


def derived(sizes: Mapping[str, int], origins: Mapping[str, str], *, world_size: int, per_node: int) -> Degrees:
    """Return the degrees that follow from a preset's sizes; one that is not given is 1.

    Raises PresetError for two of replicas, tensor and context parallelism, and TopologyError for sizes that do not divide the
    processes.
    """
    replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
    named = {name: f"{KEY}{name} is {size} ({origins[name]})" for name, size in sizes.items()}
    others = [name for name in ("dp_replicate_size", "tp_size", "cp_size") if sizes.get(name, 1) != 1]
    if len(others) > 1:
        raise PresetError(
            f"{' and '.join(named[name] for name in others)}: replicas, tensor parallelism and context parallelism cannot be "
            "combined; keep one of them"
        )
    copies = world_size // per_node if replicas == DERIVED else replicas
    tensor, context = (per_node if (size := sizes.get(name, 1)) == DERIVED else size for name in ("tp_size", "cp_size"))
    for name, size in {"dp_replicate_size": copies, "tp_size": tensor, "cp_size": context}.items():
        if world_size % size:
            raise TopologyError(
                f"{named[name]}, which does not divide the {world_size} "
                f"process{'es' if world_size > 1 else ''}: choose another size, or another number of processes"
            )
    left = world_size // (copies * tensor * context)
    if shards not in (1, DERIVED, left):
        raise TopologyError(f"{named['dp_shard_size']}, but {world_size} processes leave {left} for each copy: remove it")
    if copies > 1 and left == 1:
        raise TopologyError(
            f"{named['dp_replicate_size']}, and there are {world_size} processes: with one process per copy "
            "nothing is sharded. Use more processes per node, or multi_node.yaml, which keeps whole copies"
        )
    return Degrees(copies, tensor, context)
