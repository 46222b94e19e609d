"""A job that is a list of hosts: its `Topology`, whoever gives the list (PBS, or the user by a variable).

`launch/start/spread.py` starts a command on each host of such a list and tells it by the variables below which one it is,
because a host that PBS starts something on is told little of the job, and a plain host nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from app.environment.topology import Topology, listed
from app.environment.variables import number, with_suffix
from app.errors import TopologyError
from launch.run_module import program
from launch.schedulers.job import Allocation
from launch.schedulers.local import count_accelerators

HOSTS = "SAMERUN_HOSTS"
"""Variable: names of the hosts, `node1,node2`, the head first. Given by the user, the others are reached by ssh."""
NODE_RANK = "SAMERUN_NODE_RANK"
"""Variable: index of this host in it. Set on every host by `launch/start/spread.py`, not by the user."""
PORT = "SAMERUN_PORT"
"""Variable: TCP port on the head where the processes meet."""
THREADS = "SAMERUN_THREADS"
"""Variable: CPU threads of each process; not set: what the host's own environment says."""
STARTER = "SAMERUN_STARTER"
"""Variable: what reaches the hosts, a key of STARTERS, where it is not what the batch system brings."""

STARTERS: Mapping[str, tuple[str, ...]] = {
    "pbs_tmrsh": ("pbs_tmrsh", "{host}"),
    "mpiexec": ("mpiexec", "-n", "1", "--hosts", "{host}"),
    "ssh": ("ssh", "-o", "BatchMode=yes", "{host}"),
}
"""How to run a command on a host: what to put before it. `mpiexec` is that of Cray PALS, MPICH and Intel MPI. PBS's pbsdsh is
not one of them: it ends with exit code 0 whatever happened. pbs_tmrsh ends with the command's."""
WITH_INPUT = frozenset({"ssh"})
"""Those whose input reaches the host. That of pbs_tmrsh is empty there, and mpiexec's is its maker's choice."""


def find(
    environment: Mapping[str, str], *, processes_per_node: int | None = None, nodes: int | None = None
) -> Allocation | None:
    """Return the hosts that SAMERUN_HOSTS names, seen from the one with SAMERUN_NODE_RANK, or None where it is not set.

    Raises TopologyError for a list that cannot be.
    """
    if HOSTS not in environment:
        return None
    names = [name.strip() for name in environment[HOSTS].split(",")]
    if not all(re.fullmatch(r"[\w.:%-]+", name) for name in names) or len(set(names)) < len(names):
        raise TopologyError(f"{HOSTS} is {environment[HOSTS]!r}: it must be names of different hosts, such as node1,node2")
    here, origin = count_accelerators(environment)
    job = topology(
        dict.fromkeys(names, 1),
        slots_origin=HOSTS,
        accelerators=({"this host": here}, origin),
        asked=processes_per_node,
        port=(number(environment, PORT, default=29500), PORT),
    )
    job = replace(job, node_rank=number(environment, NODE_RANK), origins={**job.origins, "node_rank": NODE_RANK})
    if THREADS in environment:
        job = with_threads(job, number(environment, THREADS), THREADS)
    return allocation(environment, "list of hosts", job.on_first(nodes), starter="ssh")


def allocation(environment: Mapping[str, str], scheduler: str, job: Topology, *, starter: str) -> Allocation:
    """Return `job` with what starts a command on all its hosts: nothing where this process was started so."""
    if job.num_nodes == 1:
        return Allocation(scheduler=scheduler, topology=job)
    job = replace(job, head_address=with_suffix(job.head_address, environment))
    if NODE_RANK in environment:
        return Allocation(scheduler=scheduler, topology=job, is_task=True)
    starter = environment.get(STARTER, starter)
    if starter not in STARTERS:
        raise TopologyError(f"{STARTER} is {starter!r}: it must be one of {', '.join(STARTERS)}")
    told: dict[str, str | int] = {HOSTS: ",".join(job.hosts), PORT: job.port}
    if job.threads_per_process is not None:
        told[THREADS] = job.threads_per_process
    start = (*program("launch.start.spread"), starter, *(f"{name}={value}" for name, value in told.items()))
    return Allocation(scheduler=scheduler, topology=job, start=start, start_origin="this host is one of several")


def with_threads(job: Topology, threads: int, origin: str) -> Topology:
    """Return `job` with this number of CPU threads for each process."""
    return replace(job, threads_per_process=threads, origins={**job.origins, "threads_per_process": origin})


def topology(
    slots: Mapping[str, int],
    *,
    slots_origin: str,
    accelerators: tuple[Mapping[str, int], str],
    asked: int | None,
    port: tuple[int, str],
) -> Topology:
    """Return the topology of the hosts of `slots`, in their order, as seen from the first.

    `slots` holds the processes that the batch system counts on each host; `accelerators` those known of some or all of them,
    by any name, with where they were read, as has `port`. The processes on each are the number `asked` for; else one per
    slot, but no more than accelerators, and one per accelerator where there is a single slot (the default, so nobody said
    it). Raises TopologyError where the hosts are not alike, with the numbers that can be asked for.
    """
    devices, devices_origin = accelerators
    if asked is not None:
        per_node, origin = asked, "--processes-per-node"
    else:
        usable = _even(devices, devices_origin) if any(devices.values()) else 0
        if usable and (max(slots.values()) == 1 or min(slots.values()) >= usable):
            per_node, origin = usable, devices_origin
        else:
            per_node, origin = _even(slots, slots_origin), slots_origin
    hosts = tuple(slots)
    origins = {"num_nodes": slots_origin, "hosts": slots_origin, "processes_per_node": origin}
    if len(hosts) == 1:  # meets at any free port of its own
        return Topology(processes_per_node=per_node, hosts=hosts, origins=origins)
    return Topology(
        num_nodes=len(hosts),
        processes_per_node=per_node,
        head_address=hosts[0],
        port=port[0],
        hosts=hosts,
        origins={**origins, "head_address": slots_origin, "port": port[1]},
    )


def _even(counts: Mapping[str, int], origin: str) -> int:
    """The one number that all hosts have."""
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    alike: dict[int, list[str]] = defaultdict(list)
    for host, count in counts.items():
        alike[count].append(host)
    seen = "; ".join(f"{count} on {listed(hosts, 3)}" for count, hosts in sorted(alike.items()))
    least = max(min(counts.values()), 1)
    choices = "--processes-per-node 1" if least == 1 else f"--processes-per-node 1 to {least}"
    raise TopologyError(
        f"the hosts differ: {seen} ({origin}). `accelerate launch` starts the same number of processes on "
        f"every host: give {choices} ({least * len(counts)} processes in total), or request equal hosts"
    )
