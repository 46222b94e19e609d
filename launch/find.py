"""Where this process is: in which scheduler's allocation, or in none.

The first that recognises its variables answers. Who comes first matters: an mpirun inside a Slurm job leaves Slurm's
variables in place with the rank of its daemon, 0 everywhere, so a finder for MPI must go before Slurm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from app.errors import TopologyError
from launch import slurm
from launch.allocation import Allocation


class Finder(Protocol):
    """What `slurm.find` is."""

    def __call__(self, environment: Mapping[str, str], *, processes_per_node: int | None = None) -> Allocation | None:
        """Return the allocation that an environment is part of, or None if it is of another kind. Raises TopologyError."""


FINDERS: dict[str, Finder] = {"Slurm": slurm.find}


def find(
    environment: Mapping[str, str], *, processes: int | None = None, processes_per_node: int | None = None
) -> Allocation | None:
    """Return the allocation that `environment` is part of, or None on a machine that no scheduler gave.

    `processes` is --processes (on this machine), `processes_per_node` is --processes-per-node. Raises TopologyError where the
    one that was given has no meaning here, and for an environment in which something else starts the processes already.
    """
    _refuse_torchrun(environment)
    for finder in FINDERS.values():
        allocation = finder(environment, processes_per_node=processes if processes_per_node is None else processes_per_node)
        if allocation is None:
            continue
        if processes is not None and allocation.topology.num_nodes > 1:
            raise TopologyError(
                f"--processes is {processes}, which is for one machine, and {allocation.scheduler} has "
                f"{allocation.topology.num_nodes} nodes ({allocation.topology.origins['num_nodes']}): "
                f"use --processes-per-node {processes}"
            )
        return allocation
    if processes_per_node is not None:
        raise TopologyError(
            f"--processes-per-node is {processes_per_node}, but there is no scheduler's allocation here: "
            f"use --processes {processes_per_node} on this machine, or start inside a job"
        )
    return None


def _refuse_torchrun(environment: Mapping[str, str]) -> None:
    set_by_torchrun = [name for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK") if name in environment]
    if set_by_torchrun:
        said = ", ".join(f"{name}={environment[name]}" for name in set_by_torchrun)
        raise TopologyError(
            f"the environment has {said}: torchrun, `accelerate launch` or the like started this process as one of "
            "several, and `samerun launch` would start more from each. Start `samerun launch` once, or unset "
            f"{', '.join(set_by_torchrun)} if they are left over"
        )
