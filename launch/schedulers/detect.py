"""Detects in which scheduler's allocation this process is, if any.

The first whose variables are set wins. A list of hosts, from a user or from `launch/start/spread.py`, goes before the variables
of a scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.environment.slurm_variables import is_in_step
from app.environment.started_ranks import STARTERS
from app.environment.variables import said
from app.errors import TopologyError
from launch.schedulers import hosts, pbs, slurm
from launch.schedulers.job import Allocation, Job


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
    if by_torchrun := [name for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK") if name in environment]:
        raise TopologyError(
            f"the environment has {said(environment, *by_torchrun)}: torchrun, `accelerate launch` or a similar launcher "
            "started this process as one of several, and each would launch the whole run. Start `samerun launch` once, or "
            f"unset {', '.join(by_torchrun)} if they are left over"
        )
    _refuse_mpi(environment)
    per_node = processes if processes_per_node is None else processes_per_node
    asked: dict[str, Any] = {"processes_per_node": per_node, "nodes": nodes}
    allocation = hosts.find(environment, **asked) or slurm.find(environment, **asked) or pbs.find(environment, **asked)
    if allocation and processes is not None and allocation.topology.num_nodes > 1:
        raise TopologyError(
            f"--processes is {processes}, which is for one machine, but {allocation.scheduler} has "
            f"{allocation.topology.num_nodes} nodes ({allocation.topology.origins['num_nodes']}): use "
            f"--processes-per-node {processes}"
        )
    if not allocation and processes_per_node is not None:
        raise TopologyError(
            f"--processes-per-node is {processes_per_node}, but there is no scheduler's allocation here: "
            f"use --processes {processes_per_node} on this machine, or start inside a job"
        )
    if not allocation and nodes not in (None, 1):
        raise TopologyError(
            f"--nodes is {nodes}, but there is no scheduler's allocation here: start inside a job with that many nodes"
        )
    return allocation


def job(environment: Mapping[str, str]) -> Job | None:
    """Return the scheduler's job that `environment` is part of, or None."""
    return slurm.find_job(environment) or pbs.find_job(environment)


def _refuse_mpi(environment: Mapping[str, str]) -> None:
    """Raise TopologyError for one of several processes of MPI. PMI's variables are also set for every task of srun, which
    `slurm.find` checks."""
    for starter in STARTERS:
        size = environment.get(starter.world_size, "1")
        if size == "1" or starter.name == "srun" or (starter.world_size == "PMI_SIZE" and is_in_step(environment)):
            continue
        program = starter.name.split()[0]
        raise TopologyError(
            f"{starter.name} started {size} processes ({starter.world_size}={size}), and each would launch the whole run. "
            f"Start `samerun launch` once, without {program}, or let {program} start `python -m app.train` itself"
        )
