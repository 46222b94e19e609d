"""Detects in which scheduler's allocation this process is, if any.

The first whose variables are set wins. A list of hosts, from a user or from `launch/start/spread.py`, goes before the variables
of a scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.environment.slurm_variables import is_in_step
from app.environment.started_ranks import STARTERS
from app.environment.topology import Topology, said
from app.errors import TopologyError
from launch.schedulers import hosts, pbs, platforms, slurm
from launch.schedulers.hosts import Allocation, Job


def find(
    environment: Mapping[str, str],
    *,
    processes: int | None = None,
    processes_per_node: int | None = None,
    nodes: int | None = None,
) -> Allocation | None:
    """Return the allocation that `environment` is part of, or None on a machine without a scheduler.

    `processes` is --processes (on this machine), `processes_per_node` is --processes-per-node, `nodes` is --nodes.
    Raises TopologyError if one of them has no meaning here, and for an environment in which another launcher starts the
    processes.
    """
    _refuse_other_starters(environment)
    per_node = processes if processes_per_node is None else processes_per_node
    requested: dict[str, Any] = {"processes_per_node": per_node, "nodes": nodes}
    found = (module.find(environment, **requested) for module in (hosts, slurm, pbs, platforms))
    allocation = next(filter(None, found), None)
    if allocation and processes is not None and allocation.topology.num_nodes > 1:
        raise TopologyError(
            f"--processes is {processes}, which is for one machine, but {allocation.scheduler} has "
            f"{allocation.topology.num_nodes} nodes ({allocation.topology.origins['num_nodes']}): use "
            f"--processes-per-node {processes}"
        )
    for option, value in {"--processes-per-node": processes_per_node, "--nodes": None if nodes == 1 else nodes}.items():
        if not allocation and value is not None:
            raise TopologyError(
                f"{option} is {value}, but there is no scheduler's allocation here: start inside a job, or use "
                "--processes N on this machine"
            )
    return allocation


def this_machine(
    environment: Mapping[str, str],
    *,
    processes: int | None = None,
    origin: str = "--processes",
    device_folder: Path = Path("/dev"),
) -> Topology:
    """Return this machine as a topology: `processes` (from `origin`), or one per accelerator and at least one.

    The port is left to `accelerate launch` (0), which looks for a free one just before it is used: two runs started
    together cannot meet, and a printed command can be run again.
    """
    if processes is None:
        count, origin = hosts.count_accelerators(environment, device_folder=device_folder)
        processes, origin = (count, origin) if count else (1, f"no GPU found: {origin}")
    return Topology(processes_per_node=processes, origins={"processes_per_node": origin})


def processes_per_node(total: int, num_nodes: int, by_hand: int | None) -> int:
    """Return the processes on each node if --num_processes, Accelerate's number for all nodes, is `total`.

    Raises TopologyError if it is not a multiple of the nodes, or another number is given `by_hand`.
    """
    each, rest = divmod(total, num_nodes)
    if rest or by_hand not in (None, each):
        contradiction = "" if by_hand is None else f", and another option asks for {by_hand} per node"
        raise TopologyError(
            f"--num_processes is {total}, the total number of processes, on {num_nodes} nodes{contradiction}: "
            f"it must be a multiple of {num_nodes}; remove it, or the other option"
        )
    return each


def job(environment: Mapping[str, str]) -> Job | None:
    """Return the scheduler's job that `environment` is part of, or None."""
    return slurm.find_job(environment) or pbs.find_job(environment) or platforms.find_job(environment)


def _refuse_other_starters(environment: Mapping[str, str]) -> None:
    """Raise TopologyError if torchrun or MPI started this process as one of several.

    PMI's variables are also set for every task of srun, which `slurm.find` checks.
    """
    found = {"torchrun, `accelerate launch` or a similar launcher": ["TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"]}
    for starter in STARTERS:
        is_srun = starter.name == "srun" or (starter.world_size == "PMI_SIZE" and is_in_step(environment))
        if not is_srun and environment.get(starter.world_size) != "1":
            found[starter.name] = [starter.world_size]
    for name, variables in found.items():
        if names := [variable for variable in variables if variable in environment]:
            raise TopologyError(
                f"the environment has {said(environment, *names)}: {name} started this process as one of several, and each "
                "would launch the whole run. Start `samerun launch` once, or let MPI start `python -m app.train` itself; unset "
                f"{', '.join(names)} if they are left over"
            )
