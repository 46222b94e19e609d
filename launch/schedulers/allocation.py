"""What a scheduler gave this job, as seen from where `samerun launch` was typed.

`slurm.py`, `pbs.py` and `hosts.py` each turn an environment (a mapping) into an `Allocation`, or None where
they see nothing of theirs; `detect.py` asks them in turn. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.place.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of one run in a scheduler's allocation."""

    scheduler: str
    """What it is part of, for messages: `Slurm job 22`."""
    topology: Topology
    """As seen from this node if this process is the one task of its node, else from node 0. `hosts` are always known."""
    start: tuple[str, ...] = ()
    """Command that starts another command once on every node, to be put before it. Empty if that has been done: this process
    is the task of its node. A task finds its own node rank, but not always what the whole allocation looks like, so it is
    told the number of processes (--processes-per-node)."""
    start_origin: str = ""
    """Why it must be started so: `the batch script runs on the first node only`."""
    is_task: bool = False
    """Whether this process is the one task of its node, so that what started it sees to the rest of the run."""
