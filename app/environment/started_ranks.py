"""A process that srun, mpirun or mpiexec started as one of several: its place in the run, in torchrun's words.

For those who start `mpirun -n 8 python -m app.train ...` or one srun task per GPU: nothing is launched again, the variables
are translated. Pure: the environment is a mapping passed in, files are read through a function passed in.

Ranks come from what started the processes, and the innermost knows: under mpirun in a Slurm job SLURM_PROCID is 0 in every
rank, as Slurm only started mpirun's daemons. No starter gives a rank the machine of rank 0 and a port. Both are
read from the job that they run in, or asked for.

Torchrun's LOCAL_RANK is the process's index on its node and its device's index. The two differ where each process sees its
own device only, as after `srun --gpus-per-task=1`, where all of them are device 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from app.environment.slurm_variables import JOB, STEP, Slurm
from app.environment.topology import number, port_of_job, said, with_suffix
from app.errors import TopologyError


class StartedRank(NamedTuple):
    """One process of a run that srun, mpirun or mpiexec started."""

    starter: str
    """What started it, for messages."""
    local_rank: int
    """Index of this process on its node."""
    variables: dict[str, str]
    """What torchrun would have set, LOCAL_RANK for a device of its own."""


class Starter(NamedTuple):
    """The variables in which a starter gives a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# The innermost first. PALS sets no size of its own, but Cray PMI's; Slurm's Cray plugin sets both. Open MPI: "Environment
# variables set for MPI applications" in its documentation. PMI, srun: captured. Others: Slurm's plugin mpi/cray_shasta, and
# the scripts of ALCF's users.
STARTERS = (
    Starter("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Starter("mpirun (MVAPICH2)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    Starter("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Starter("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Starter("mpiexec (Cray PMI)", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    Starter("srun", STEP.rank, STEP.step_num_tasks, STEP.local_rank, STEP.tasks_per_node),
)  # fmt: skip
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
    and the port follows from the job's id. Raises TopologyError where a number cannot be, where several
    processes do not know their place, and where the head cannot be known: plain mpirun over several machines.
    """
    if "RANK" in environment and "LOCAL_RANK" in environment:
        return None
    starter = next((each for each in STARTERS if environment.keys() >= set(each[1:])), None)
    if starter is None:
        for lonely in STARTERS:
            if (count := number(environment, lonely.world_size, default=1)) > 1:
                missing = [name for name in lonely[1:] if name not in environment]
                raise TopologyError(
                    f"{lonely.name} started {count} processes ({said(environment, lonely.world_size)}), but "
                    f"this process has no {', '.join(missing)}: {count} unsynchronized copies would train. Use "
                    f"{lonely.name.split()[0]} to start one `samerun launch` or `accelerate launch` per node, "
                    "which starts the processes of that node"
                )
        return None
    rank, world_size = number(environment, starter.rank), number(environment, starter.world_size)
    local_rank, local_world_size = number(environment, starter.local_rank), _local_world_size(environment, starter)
    if world_size == 1:
        return None
    visible = (environment.get(f"{prefix}_VISIBLE_DEVICES") for prefix in ("CUDA", "ROCR", "HIP"))
    devices = next((len(listed.split(",")) for listed in visible if listed), local_world_size)
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank % devices),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": _head(environment, starter, is_one_node=local_world_size == world_size, read=read),
        "MASTER_PORT": str(_port(environment, starter)),
    }
    return StartedRank(starter.name, local_rank, variables)


def _local_world_size(environment: Mapping[str, str], starter: Starter) -> int:
    if starter.name != "srun":
        return number(environment, starter.local_world_size)
    by_node = Slurm(environment, STEP).counts(starter.local_world_size)
    node_rank = number(environment, STEP.node_rank)
    if node_rank >= len(by_node):
        raise TopologyError(f"{said(environment, starter.local_world_size, STEP.node_rank)}: this node has no number")
    return by_node[node_rank]


def _head(environment: Mapping[str, str], starter: Starter, *, is_one_node: bool, read: Callable[[str], str]) -> str:
    """Return the machine of rank 0."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if is_one_node:
        return "127.0.0.1"
    slurm = Slurm(environment, STEP if starter.name == "srun" else JOB)
    if slurm.names.hosts in environment:
        return with_suffix(slurm.hosts()[0], environment)
    try:
        return with_suffix(read(environment["PBS_NODEFILE"]).split()[0], environment)
    except (KeyError, OSError, IndexError) as error:  # the file is on the first host only
        raise TopologyError(
            f"{starter.name} started processes on several machines, and it is unknown which one has rank 0: "
            "give its name or address to every rank as MASTER_ADDR, as in `mpirun -x MASTER_ADDR=node1 ...`"
        ) from error


def _port(environment: Mapping[str, str], starter: Starter) -> int:
    """Return a port for this start of this job."""
    if "MASTER_PORT" in environment:
        return number(environment, "MASTER_PORT")
    first = [name for name in _JOB_NAMES if name in environment][:1]
    names = [JOB.job_id, JOB.step_id] if starter.name == "srun" else first
    return port_of_job(zlib.crc32(said(environment, *names).encode())) if names else _DEFAULT_PORT
