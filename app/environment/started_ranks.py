"""A process that srun, mpirun or mpiexec started as one of several: its place in the run, in torchrun's words.

For those who start `mpirun -n 8 python -m app.train ...` or one srun task per GPU: nothing is launched again, the variables
are translated. Pure: the environment is a mapping passed in, files are read through a function passed in.

Ranks come from what started the processes, and the innermost knows: under mpirun in a Slurm job SLURM_PROCID is 0 in every
rank, as Slurm only started mpirun's daemons. What no starter tells a rank is the machine of rank 0 and a port. Both are
read from the job that they run in, or asked for.

Torchrun's LOCAL_RANK is the process's index on its node and that of its device. The two differ where each process sees its
own device only, as after `srun --gpus-per-task=1`, where all of them are device 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.environment.slurm_variables import JOB, STEP, Slurm
from app.environment.variables import number, port_of_job, said, short, with_suffix
from app.errors import TopologyError


@dataclass(frozen=True, kw_only=True)
class StartedRank:
    """One process of a run."""

    starter: str
    """What started it, for messages."""
    rank: int
    """Index of this process in 0..world_size-1."""
    world_size: int
    """Processes of the run."""
    local_rank: int
    """Index of this process among those of its node."""
    local_world_size: int
    """Processes on this node; another node may have another number."""
    visible_devices: int | None
    """GPUs that this process was given to see, or None where it sees all that there are."""
    head_address: str
    """Name or address of the machine of rank 0."""
    port: int
    """TCP port there, where the processes meet."""

    def variables(self) -> dict[str, str]:
        """Return what torchrun would have set, for a device of its own."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank % self.visible_devices if self.visible_devices else self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.head_address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class Starter:
    """The variables in which a starter tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    tell: str
    """How the user tells every rank a variable."""

    @property
    def told(self) -> tuple[str, str, str, str]:
        """All four."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size


# The innermost first. PALS sets no size of its own, but Cray PMI's; Slurm's Cray plugin sets both. Open MPI: "Environment
# variables set for MPI applications" in its documentation. PMI, srun: captured. Others: Slurm's plugin mpi/cray_shasta, and
# the scripts of ALCF's users.
STARTERS = (
    Starter("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -x {}={} ..."),
    Starter("mpirun (MVAPICH2)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE", "mpirun -env {} {} ..."),
    Starter("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpiexec -genv {} {} ..."),
    Starter("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "mpiexec --env {}={} ..."),
    Starter("mpiexec (Cray PMI)", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "export {}={}"),
    Starter("srun", STEP.rank, STEP.step_num_tasks, STEP.local_rank, STEP.tasks_per_node, "export {}={}"),
)  # fmt: skip
# How a process is told the name of its own machine.
_OWN_NAMES = ("PMIX_HOSTNAME", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", JOB.node)
# Names of one start of one job, the same in all its ranks and different in others at the same time.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PBS_JOBID", JOB.job_id, "JOB_ID")
_DEFAULT_PORT = 29500


def translate(
    environment: Mapping[str, str],
    *,
    read: Callable[[str], str] = lambda path: Path(path).read_text(),
) -> StartedRank | None:
    """Return the place of this process among those that were started with it, or None where it was started alone, or by
    torchrun in between (RANK and LOCAL_RANK are there).

    MASTER_ADDR and MASTER_PORT in `environment` are taken as they are. Without them the head is the first host of the job,
    and the port follows from the job's id. Raises TopologyError where a number cannot be, where WORLD_SIZE says another,
    and where the head cannot be known: plain mpirun over several machines, or a rank 0 that is not on the first host.
    """
    if "RANK" in environment and "LOCAL_RANK" in environment:
        return None
    starter = next((each for each in STARTERS if all(name in environment for name in each.told)), None)
    if starter is None:
        _refuse_lonely_copies(environment)
        return None
    rank, world_size = number(environment, starter.rank), number(environment, starter.world_size)
    local_rank, local_world_size = number(environment, starter.local_rank), _local_world_size(environment, starter)
    if not (rank < world_size and local_rank < local_world_size <= world_size):
        raise TopologyError(f"{said(environment, *starter.told)} of {starter.name} contradict each other: start the run again")
    if environment.get("WORLD_SIZE", str(world_size)) != str(world_size):
        raise TopologyError(
            f"{said(environment, 'WORLD_SIZE')}, but {starter.name} says {said(environment, starter.world_size)}: "
            "unset WORLD_SIZE, which the job's script need not set"
        )
    if world_size == 1:
        return None
    return StartedRank(
        starter=starter.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        visible_devices=_visible_devices(environment),
        head_address=_head(environment, starter, rank, alone=local_world_size == world_size, read=read),
        port=_port(environment, starter),
    )


def _refuse_lonely_copies(environment: Mapping[str, str]) -> None:
    """Several processes that are not told their place, or not that on their node, where each would take the first device."""
    for starter in STARTERS:
        count = number(environment, starter.world_size, default=1)
        if count > 1:
            missing = [name for name in starter.told if name not in environment]
            raise TopologyError(
                f"{starter.name} started {count} processes ({said(environment, starter.world_size)}), but "
                f"this process has no {', '.join(missing)}: {count} unsynchronized copies would train. Use "
                f"{starter.name.split()[0]} to start one `samerun launch` or `accelerate launch` per node, "
                "which starts the processes of that node"
            )


def _visible_devices(environment: Mapping[str, str]) -> int | None:
    lists = (environment.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    return next((len(devices.split(",")) for devices in lists if devices), None)


def _local_world_size(environment: Mapping[str, str], starter: Starter) -> int:
    if starter.name != "srun":
        return number(environment, starter.local_world_size)
    nodes_before = number(environment, STEP.node_rank)
    for count, nodes in Slurm(environment, STEP).counts(starter.local_world_size):
        if nodes_before < nodes:
            return count
        nodes_before -= nodes
    raise TopologyError(f"{said(environment, starter.local_world_size, STEP.node_rank)}: this node has no number")


def _head(environment: Mapping[str, str], starter: Starter, rank: int, *, alone: bool, read: Callable[[str], str]) -> str:
    """The machine of rank 0."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if alone:
        return "127.0.0.1"
    hosts, origin = _hosts(environment, starter, read)
    if not hosts:
        raise TopologyError(
            f"{starter.name} started processes on several machines, and it is unknown which one has rank 0: "
            f"give its name or address as MASTER_ADDR, as in `{starter.tell.format('MASTER_ADDR', 'node1')}`, "
            "where node1 is the first of the hosts"
        )
    own = next((environment[name] for name in _OWN_NAMES if name in environment), "")
    if rank == 0 and short(own) in map(short, hosts) and short(own) != short(hosts[0]):
        raise TopologyError(
            f"rank 0 is on {own}, but the others would look for it on {hosts[0]}, the first host of {origin}: "
            f"give its address, as in `{starter.tell.format('MASTER_ADDR', own)}`, or list the hosts for "
            f"{starter.name} in this order"
        )
    return with_suffix(hosts[0], environment)


def _hosts(environment: Mapping[str, str], starter: Starter, read: Callable[[str], str]) -> tuple[Sequence[str], str]:
    """The machines of the job, the head first, and where they were read; none where it is no job of a batch system."""
    slurm = Slurm(environment, STEP if starter.name == "srun" else JOB)
    if slurm.names.hosts in environment:
        return slurm.hosts(), slurm.names.hosts
    try:
        lines = read(environment["PBS_NODEFILE"]).splitlines()
    except (KeyError, OSError):  # the file is on the first host only: then it is as if it were not there
        return [], ""
    return [line.split()[0] for line in lines if line.strip()], "PBS_NODEFILE"


def _port(environment: Mapping[str, str], starter: Starter) -> int:
    """A port for this start of this job."""
    if "MASTER_PORT" in environment:
        return number(environment, "MASTER_PORT")
    names = (JOB.job_id, JOB.step_id) if starter.name == "srun" else _JOB_NAMES
    there = [name for name in names if name in environment][: len(names) if starter.name == "srun" else 1]
    if not there:
        return _DEFAULT_PORT
    return port_of_job(zlib.crc32(said(environment, *there).encode()))
