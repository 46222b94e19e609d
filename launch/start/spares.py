"""Continue a run within its Slurm job when a node is lost (`--spares`, `--min-nodes`). The job was submitted with --no-kill.

    python -m launch.start.spares FIRST_NODE JOB_ID NAME REQUEUES

guards the batch script from another node. How Slurm treats such a job: `launch/schedulers/slurm.py`.

A node is lost if srun cannot start a process on it. One where a process of the run crashed is not: that is a case for
`--max-restarts`. Processes on a lost node might still run. They cannot write into the run folder any more when the next attempt
has claimed it (`app/runs/claim.py`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from app.environment.slurm_variables import JOB
from app.errors import SamerunError
from app.recipe.schema import BatchPlan
from app.runs import run_folder
from app.runs.run_folder import ProcessFailure
from launch.preset import requested_sizes
from launch.run_module import program
from launch.schedulers import slurm
from launch.schedulers.hosts import NotDoneError, ask
from launch.start.resolved import Resolved, with_port
from launch.start.supervise import end_with_parent

_PROBES = 32
"""Nodes that are probed at the same time."""
_END_S = 5.0
"""Time that srun has to end a guard."""


def lost_nodes(resolved: Resolved, errors: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the lost nodes, if a node of the run is lost, and record them in `errors`, the folder of the attempt.

    Without --spares and --min-nodes nothing is probed.
    """
    if not resolved.survives_lost_nodes:
        return []
    allocation, nodes = resolved.allocation, (*resolved.topology.hosts, *resolved.spares)
    assert allocation is not None

    def is_lost(*hosts: str) -> bool:
        try:
            ask([*slurm.on_hosts(allocation, hosts, environment).start, "true"])
        except NotDoneError:
            return True
        return False

    lost: list[str] = []
    if is_lost(*nodes):  # one step, before one for each node
        with ThreadPoolExecutor(_PROBES) as pool:
            lost = [node for node, result in zip(nodes, pool.map(is_lost, nodes), strict=True) if result]
    if not set(lost) & set(resolved.topology.hosts):  # a lost spare did not end the attempt
        return []
    for node in lost:
        failure = ProcessFailure(exit_code=1, host=node, error="the node is lost: srun cannot start a process on it")
        run_folder.record_failure(errors, failure, f"lost-{node}")  # a launcher that still runs there might record its own
    return lost


def without(resolved: Resolved, lost: Collection[str], environment: Mapping[str, str]) -> Resolved | None:
    """Return the run on as many nodes as before or, with --min-nodes, on the most that can divide its batch and model.

    None: too few are left, or the node of this batch script is lost, and Slurm will run the script on another.
    """
    options, allocation, first = resolved.options, resolved.allocation, resolved.topology.hosts[0]
    assert allocation is not None
    if first in lost and resolved.job is not None and resolved.job.requeue is not None:
        return None
    hosts = [host for host in (*resolved.topology.hosts, *resolved.spares) if host not in lost]
    before = resolved.topology.num_nodes
    for count in range(min(len(hosts), before), (options.min_nodes or before) - 1, -1):
        used = slurm.on_hosts(allocation, hosts[:count], environment)
        topology = with_port(used.topology, options.port)
        with suppress(SamerunError):  # they cannot divide it
            degrees = resolved.preset.degrees(topology, requested_sizes(options))
            parts, most = degrees.processes_per_rank, resolved.plan.micro_batch if resolved.plan.is_auto else None
            plan = BatchPlan.of(resolved.loaded.recipe, topology.world_size // parts, processes_per_rank=parts, most=most)
            changed = replace(resolved, allocation=used, topology=topology, degrees=degrees, plan=plan)
            return replace(changed, spares=tuple(hosts[count:]))
    return None


@contextmanager
def guarded(resolved: Resolved, environment: Mapping[str, str]) -> Iterator[None]:
    """Have another node requeue the job if the first one is lost during the block, in a batch script of a run with spares."""
    job, nodes = resolved.job, (*resolved.topology.hosts, *resolved.spares)
    if not resolved.survives_lost_nodes or len(nodes) < 2 or job is None or job.requeue is None:
        yield
        return
    assert resolved.allocation is not None
    command = [*slurm.on_hosts(resolved.allocation, nodes[-1:], environment).start, *program("launch.start.spares")]
    command += [nodes[0], environment[JOB.job_id], job.name, str(job.requeues)]
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # srun reports every end of a task, and this one does not concern the user
        preexec_fn=end_with_parent,  # noqa: PLW1509 - there is no other thread
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # its node is lost
            process.kill()
            process.wait()


if __name__ == "__main__":
    first_node, job_id, name, requeues = sys.argv[1:]
    slurm.guard(first_node, job_id, name, int(requeues))
