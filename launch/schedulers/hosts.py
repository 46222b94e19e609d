"""A run's job and hosts: what every scheduler's module returns, and jobs that are a list of hosts, from PBS or from the user.

`slurm.py` and `pbs.py` turn an environment (a mapping) into a `Job`; they and `find` turn it into an `Allocation`, or None if
their variables are not set. `detect.py` calls them in turn. Standard library only.

`launch/start/spread.py` starts a command on each host of a list and identifies the host by the variables below, because PBS
gives a remote host little information about the job, and a plain host has none.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.environment.topology import END_TIME, START_TIME, SUBMIT_TIME, Topology, listed, number, with_suffix
from app.errors import TopologyError
from launch.run_module import program

HOSTS = "SAMERUN_HOSTS"
"""Variable: names of the hosts, `node1,node2`, the head first. Given by the user, the others are reached by ssh."""
NODE_RANK = "SAMERUN_NODE_RANK"
"""Variable: index of this host in it. Set on every host by `launch/start/spread.py`, not by the user."""
PORT = "SAMERUN_PORT"
"""Variable: TCP port on the head where the processes meet."""
THREADS = "SAMERUN_THREADS"
"""Variable: CPU threads of each process; not set: as in the host's own environment."""
STARTER = "SAMERUN_STARTER"
"""Variable: how the hosts are reached, a key of STARTERS; not set: by the batch system's own command."""

STARTERS: Mapping[str, tuple[str, ...]] = {
    "pbs_tmrsh": ("pbs_tmrsh", "{host}"),
    "mpiexec": ("mpiexec", "-n", "1", "--hosts", "{host}"),
    "blaunch": ("blaunch", "-no-shell", "{host}"),
    "ssh": ("ssh", "-o", "BatchMode=yes", "{host}"),
}
"""Words that, put before a command, run it on a host. `mpiexec` is Cray PALS's, MPICH's and Intel MPI's, `blaunch` LSF's.
pbsdsh is missing because it always ends with exit code 0; pbs_tmrsh ends with the command's."""

ATTEMPT = "SAMERUN_ATTEMPT"
"""Variable: the start of a run that a process belongs to: a random word, and after a dash how many starts were before it."""


class NotDoneError(Exception):
    """The scheduler refused a request; the text is its answer."""


def ask(command: Sequence[str], **variables: str) -> str:
    """Run a scheduler's program, with these variables added, and return what it prints. Raises NotDoneError if it fails."""
    argv = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        answer = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
        raise NotDoneError(f"`{shlex.join(command)}` fails: {answer}") from error


@dataclass(frozen=True, kw_only=True)
class Times:
    """Moments of a job in Unix seconds; None: unknown, or no such moment."""

    submitted_s: float | None = None
    started_s: float | None = None
    ends_s: float | None = None
    origin: str
    """Source of the hosts, or the reason why they are unknown."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Times:
        """Return the times in Samerun's own variables."""
        submitted_s, started_s, ends_s = (
            number(environment, name) if name in environment else None for name in (SUBMIT_TIME, START_TIME, END_TIME)
        )
        origin = END_TIME + " is not set" * (ends_s is None)
        return cls(submitted_s=submitted_s, started_s=started_s, ends_s=ends_s, origin=origin)

    def added_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment for the ranks, with these times in place of those that another job may have set."""
        moments = {SUBMIT_TIME: self.submitted_s, START_TIME: self.started_s, END_TIME: self.ends_s}
        known = {name: f"{moment:.0f}" for name, moment in moments.items() if moment is not None}
        return {name: value for name, value in environment.items() if name not in moments} | known


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that this process is part of."""

    name: str
    """For the run folder, `22` or of an array `14_3`: the same whenever the job is run again."""
    times: Callable[[], Times]
    """Finds the times; it may start a program of the scheduler."""
    requeues: int = 0
    """Number of times the job was requeued."""
    requeue: Callable[[Collection[int]], str] | None = None
    """Requeues the job, given the signals that this process received, and returns a sentence on it. Raises NotDoneError. None:
    the scheduler would not run this process again, as in a shell of salloc or a task of srun."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of one run in a scheduler's allocation."""

    scheduler: str
    """Its name in messages: `Slurm job 22`."""
    topology: Topology
    """As seen from this node if this process is the one task of its node, else from node 0. `hosts` are always known."""
    start: tuple[str, ...] = ()
    """Words that, put before a command, start it once on every node. Empty in the task of a node, which was started so. A task
    finds its own node rank, but not always the shape of the allocation: --processes-per-node gives it the processes."""
    enter: tuple[str, ...] = ()
    """Words between `start` and a command that run the command in a container. Empty: on the node itself."""
    start_origin: str = ""
    """Reason for `start`: `the batch script runs on the first node only`."""
    is_task: bool = False
    """True if this process is the one task of its node; the process that started it restarts and requeues the run."""


def find(
    environment: Mapping[str, str], *, processes_per_node: int | None = None, nodes: int | None = None
) -> Allocation | None:
    """Return the hosts of SAMERUN_HOSTS, seen from the one with SAMERUN_NODE_RANK, or None if it is not set.

    Raises TopologyError for a list that cannot be used.
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
    """Return `job` with the command that starts another on all its hosts; a process started so gets none."""
    if job.num_nodes == 1:
        return Allocation(scheduler=scheduler, topology=job)
    job = replace(job, head_address=with_suffix(job.head_address, environment))
    if NODE_RANK in environment:
        return Allocation(scheduler=scheduler, topology=job, is_task=True)
    starter = environment.get(STARTER, starter)
    if starter not in STARTERS:
        raise TopologyError(f"{STARTER} is {starter!r}: it must be one of {', '.join(STARTERS)}")
    start = [*program("launch.start.spread"), starter, f"{HOSTS}={','.join(job.hosts)}", f"{PORT}={job.port}"]
    if job.threads_per_process is not None:
        start.append(f"{THREADS}={job.threads_per_process}")
    return Allocation(scheduler=scheduler, topology=job, start=tuple(start), start_origin="this host is one of several")


def count_accelerators(environment: Mapping[str, str], *, device_folder: Path = Path("/dev")) -> tuple[int, str]:
    """Return the number of visible NVIDIA devices and where it was read: CUDA_VISIBLE_DEVICES, else the device files.

    Not by torch, which takes a second to import and is not there on a login node. The list is read as CUDA does: it ends at the
    first entry that names no device (-1 is the usual way to say none), and an entry given twice makes it empty. Reference:
    `torch.cuda._parse_visible_devices`.
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        files = [path for path in device_folder.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
        return len(files), f"{device_folder}/nvidia*"
    named = itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-.+").fullmatch, (entry.strip() for entry in listed.split(",")))
    devices = list(named)
    return len(devices) if len(set(devices)) == len(devices) else 0, f"CUDA_VISIBLE_DEVICES={listed}"


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

    `slots` holds the processes that the batch system counts on each host; `accelerators` the known counts of some or all of
    them, by any name. `accelerators` and `port` come with their origin. The processes on each host are the number `asked` for;
    else one per slot, but no more than accelerators, and one per accelerator where there is a single slot, which is the
    default. Raises TopologyError where the hosts are not alike, with the numbers that are possible.
    """
    devices, devices_origin = accelerators
    usable = _even(devices, devices_origin) if asked is None and any(devices.values()) else 0
    if asked is not None:
        per_node, origin = asked, "--processes-per-node"
    elif usable and (max(slots.values()) == 1 or min(slots.values()) >= usable):
        per_node, origin = usable, devices_origin
    else:
        per_node, origin = _even(slots, slots_origin), slots_origin
    hosts = tuple(slots)
    origins = {"num_nodes": slots_origin, "hosts": slots_origin, "processes_per_node": origin}
    if len(hosts) == 1:  # the rendezvous is at any free port of its own
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
    """Return the number that all hosts have."""
    alike: dict[int, list[str]] = defaultdict(list)
    for host, count in counts.items():
        alike[count].append(host)
    if len(alike) == 1:
        return next(iter(alike))
    counted = "; ".join(f"{count} on {listed(hosts, 3)}" for count, hosts in sorted(alike.items()))
    raise uneven(f"{counted} ({origin})", min(counts.values()))


def uneven(counted: str, least: int) -> TopologyError:
    """Return the refusal of hosts that do not have the same number, at least `least`."""
    return TopologyError(
        f"the hosts differ: {counted}. `accelerate launch` starts the same number of processes on every host: give "
        f"--processes-per-node {'1' if least <= 1 else f'1 to {least}'}, or request equal hosts"
    )
