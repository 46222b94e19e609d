"""LSF, SkyPilot and Kubeflow: the nodes of a run, from the variables that their documentation names. Not tested there.

- LSF runs the batch script on the first host of LSB_MCPU_HOSTS, `HOST SLOTS HOST SLOTS ...`, and `blaunch` starts a command on
  another. https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
- SkyPilot runs the commands of a task on every node. https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
- Kubeflow runs the command of a TrainJob in a pod for each node, with torchrun's own variables.
  https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

from app.environment.topology import Topology, number, port_of_job, said, short
from app.errors import TopologyError
from launch.schedulers import hosts
from launch.schedulers.hosts import Allocation, Job, Times, count_accelerators

KUBEFLOWS = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
"""Variables of a pod of Kubeflow."""


def find(
    environment: Mapping[str, str], *, processes_per_node: int | None = None, nodes: int | None = None
) -> Allocation | None:
    """Return the allocation of LSF, SkyPilot or Kubeflow that `environment` is part of, or None.

    The processes of a node are `processes_per_node`, else what the platform specifies, else one per GPU and at least one.
    Raises TopologyError for variables that cannot be right.
    """
    devices, devices_origin = count_accelerators(environment)
    processes = (processes_per_node, "--processes-per-node") if processes_per_node else (devices or 1, devices_origin)
    if "LSB_JOBID" in environment:
        here, origin = {"this host": devices}, "LSB_MCPU_HOSTS"
        port = port_of_job(number(environment, "LSB_JOBID"), number(environment, "LSB_JOBINDEX")), "LSB_JOBID"
        asked, accelerators = processes_per_node, (here, f"{devices_origin} on this host")
        job = hosts.topology(_slots(environment), slots_origin=origin, accelerators=accelerators, asked=asked, port=port)
        return hosts.allocation(environment, f"LSF job {environment['LSB_JOBID']}", job.on_first(nodes), starter="blaunch")
    if names := environment.get("SKYPILOT_NODE_IPS", "").split():
        scheduler, hosts_origin, rank = "SkyPilot task", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"
        head, port, count = (names[0], hosts_origin), (29500, "default"), "SKYPILOT_NUM_GPUS_PER_NODE"
    elif environment.keys() >= KUBEFLOWS:
        scheduler, hosts_origin, rank, count = "Kubeflow job", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
        names = [f"pod{index}" for index in range(number(environment, hosts_origin))]  # their names are unknown
        head = environment["PET_MASTER_ADDR"], "PET_MASTER_ADDR"
        port = number(environment, "PET_MASTER_PORT"), "PET_MASTER_PORT"
    else:
        return None
    if processes_per_node is None and environment.get(count) not in (None, "0", "auto", "cpu", "gpu"):
        processes = number(environment, count), count
    found: dict[str, tuple[Any, str]] = {"processes_per_node": processes, "node_rank": (number(environment, rank), rank)}
    found |= {"num_nodes": (len(names), hosts_origin), "hosts": (tuple(names), hosts_origin)}
    if len(names) > 1:  # one node takes any free port
        found |= {"head_address": head, "port": port}
    values = {name: value for name, (value, _) in found.items()}
    topology = Topology(**values, origins={name: origin for name, (_, origin) in found.items()}).on_first(nodes)
    return Allocation(scheduler=scheduler, topology=topology, is_task=topology.num_nodes > 1)


def _slots(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the slots of each host of an LSF job."""
    words, slots, hostname = environment.get("LSB_MCPU_HOSTS", "").split(), Counter[str](), socket.gethostname()
    if not words or len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
        raise TopologyError(
            f"the environment has {said(environment, 'LSB_JOBID', 'LSB_MCPU_HOSTS')}: LSB_MCPU_HOSTS must be hosts with their "
            "slots, such as `node1 4 node2 4`. If the variables are left over from another job, unset LSB_JOBID"
        )
    for host, count in zip(words[::2], words[1::2], strict=True):
        slots[host] += int(count)
    if short(hostname) in [short(host) for host in slots][1:]:
        raise TopologyError(
            f"this machine is {hostname}, which is not the first host of LSF job {environment['LSB_JOBID']} "
            f"({said(environment, 'LSB_MCPU_HOSTS')}): call `samerun launch` once, in the job script, without blaunch"
        )
    return dict(slots)


def find_job(environment: Mapping[str, str]) -> Job | None:
    """Return the LSF job that `environment` is part of, or None: the other platforms continue a run by its --run-dir."""
    if "LSB_JOBID" not in environment:
        return None
    index = environment.get("LSB_JOBINDEX", "0")  # 0 outside of an array
    times = Times(origin="no variable of LSF has it; set SAMERUN_END_TIME")
    return Job(name=environment["LSB_JOBID"] + (f"_{index}" if index != "0" else ""), times=lambda: times)
