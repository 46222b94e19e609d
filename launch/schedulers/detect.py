"""Detects in which scheduler's allocation this process is, if any.

The first that recognises its variables answers. What a user or `launch/start/spread.py` says of the hosts goes before what a
scheduler's variables say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.environment.slurm_variables import is_in_step
from app.environment.started_ranks import STARTERS
from app.environment.variables import check_threads
from app.errors import TopologyError
from launch.schedulers import hosts, pbs, slurm
from launch.schedulers.job import Allocation, Job

# Each returns None for an environment of another kind.
FINDERS: tuple[Callable[..., Allocation | None], ...] = (hosts.find, slurm.find, pbs.find)


def find(
    environment: Mapping[str, str],
    *,
    processes: int | None = None,
    processes_per_node: int | None = None,
    nodes: int | None = None,
) -> Allocation | None:
    """Return the allocation that `environment` is part of, or None on a machine that no scheduler gave.

    `processes` is --processes (on this machine), `processes_per_node` is --processes-per-node, `nodes` is --nodes.
    Raises TopologyError where the one that was given has no meaning here, and for an environment in which something else
    starts the processes already.
    """
    check_threads(environment)
    _refuse_torchrun(environment)
    _refuse_mpi(environment)
    for finder in FINDERS:
        per_node = processes if processes_per_node is None else processes_per_node
        allocation = finder(environment, processes_per_node=per_node, nodes=nodes)
        if allocation is None:
            continue
        if processes is not None and allocation.topology.num_nodes > 1:
            raise TopologyError(
                f"--processes is {processes}, which is for one machine, but {allocation.scheduler} has "
                f"{allocation.topology.num_nodes} nodes ({allocation.topology.origins['num_nodes']}): use "
                f"--processes-per-node {processes}"
            )
        return allocation
    if processes_per_node is not None:
        raise TopologyError(
            f"--processes-per-node is {processes_per_node}, but there is no scheduler's allocation here: "
            f"use --processes {processes_per_node} on this machine, or start inside a job"
        )
    if nodes not in (None, 1):
        raise TopologyError(
            f"--nodes is {nodes}, but there is no scheduler's allocation here: start inside a job with that many nodes"
        )
    return None


def job(environment: Mapping[str, str]) -> Job | None:
    """Return the scheduler's job that `environment` is part of, or None."""
    return slurm.find_job(environment) or pbs.find_job(environment)


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    set_by_torchrun = [name for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK") if name in environment]
    if set_by_torchrun:
        said = ", ".join(f"{name}={environment[name]}" for name in set_by_torchrun)
        raise TopologyError(
            f"the environment has {said}: torchrun, `accelerate launch` or a similar launcher started this "
            "process as one of several, and each would launch the whole run. Start `samerun launch` once, or "
            f"unset {', '.join(set_by_torchrun)} if they are left over"
        )


def _refuse_mpi(environment: Mapping[str, str]) -> None:
    """A task of srun is no such case: Slurm's own variables tell whether it is the only one of its node, and PMI's are there
    for every task."""
    for starter in STARTERS:
        size = environment.get(starter.world_size, "1")
        if size == "1" or starter.name == "srun" or (starter.world_size == "PMI_SIZE" and is_in_step(environment)):
            continue
        program = starter.name.split()[0]
        raise TopologyError(
            f"{starter.name} started {size} processes ({starter.world_size}={size}), and each would launch the whole run. "
            f"Start `samerun launch` once, without {program}, or let {program} start `python -m app.train` itself"
        )
