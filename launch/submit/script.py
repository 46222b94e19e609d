"""The script of a job: plain directives for the scheduler, then one command, quoted for the shell.

The script decides nothing: what differs between nodes or tasks, the command reads from its environment itself. It holds no
value of the environment that it was made in, so no token and no password. Pure; standard library only.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scheduler = Literal["slurm", "pbs"]
SUBMITTERS: dict[Scheduler, tuple[str, ...]] = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}
"""The command that takes the path of a script and prints the id of the job."""

# Options of a user that replace a request of ours under another name.
_REPLACES = {
    "--no-requeue": "--requeue",
    "--oversubscribe": "--exclusive",
    "-s": "--exclusive",
    "--mem-per-cpu": "--mem",
    "--mem-per-gpu": "--mem",
}


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job for which a script is written. Its texts have been checked: only `command` may have spaces or line breaks."""

    scheduler: Scheduler
    name: str
    nodes: int
    gpus_per_node: str | None
    """A number, for Slurm also with a type, `a100:4`. None: the job asks for no GPU."""
    cpus_per_node: int | None
    """None: whole nodes under Slurm, what the site gives by default under PBS."""
    time: str
    """Limit, as hours:minutes:seconds."""
    account: str | None
    partition: str | None
    """Partition or queue."""
    log: str
    """File for the output; `{index}` in it becomes the scheduler's word for the index of an array task."""
    tasks: Sequence[str] = ()
    """Name of each task of an array, in the order of the indices. Empty: no array."""
    options: Sequence[str] = ()
    """More options of the scheduler, as in a script. Each replaces the request for the same thing."""
    folder: str
    """Where the command runs."""
    command: Sequence[str]


def render(job: JobRequest) -> str:
    """Return the text of the script."""
    is_slurm = job.scheduler == "slurm"
    prefix = "#SBATCH" if is_slurm else "#PBS"
    given = {_REPLACES.get(key(option), key(option)) for option in job.options}
    lines = [
        "#!/bin/sh",
        f"# Written by `samerun submit` for {SUBMITTERS[job.scheduler][0]}.",
        *(f"{prefix} {request}" for request in (_slurm(job) if is_slurm else _pbs(job)) if key(request) not in given),
        *(f"{prefix} {option}" for option in job.options),
        *(["# The tasks of the array, by their run folders:"] if job.tasks else []),
        *(f"#   {task}" for task in job.tasks),
        f"cd {shlex.quote(job.folder)} || exit",
        # A job of PBS has the PATH of a login shell; pbs_tmrsh, which reaches the other nodes, is in PBS's own folder.
        *(["PATH=$PBS_O_PATH:$PATH:/opt/pbs/bin"] if not is_slurm else []),
        f"exec {shlex.join(job.command)}",
    ]
    return "".join(f"{line}\n" for line in lines)


def key(option: str) -> str:
    """Return what an option sets: `--mem` for `--mem=0`, `-l select` for `-l select=2:ncpus=8`, `-q` for `-q debug`."""
    words = option.replace("=", " ").split()
    return " ".join(words[:2]) if words[:1] == ["-l"] else words[0] if words else ""


def _slurm(job: JobRequest) -> list[str]:
    requests = {
        "--job-name": job.name,
        "--nodes": job.nodes,
        "--ntasks-per-node": 1,
        "--exclusive": "",
        "--mem": "0",
        "--gpus-per-node": job.gpus_per_node,
        "--cpus-per-task": job.cpus_per_node,
        "--time": job.time,
        "--account": job.account,
        "--partition": job.partition,
        "--array": f"0-{len(job.tasks) - 1}" if job.tasks else None,
        "--output": job.log.format(index="%a"),
        "--requeue": "",  # after a lost node; at the end of its time the run does it itself
        "--open-mode": "append",  # a requeued job continues its log instead of replacing it
    }
    return [f"{option}={value}" if value else option for option, value in requests.items() if value is not None]


def _pbs(job: JobRequest) -> list[str]:
    cpus = f":ncpus={job.cpus_per_node}" if job.cpus_per_node else ""
    gpus = f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    requests = {
        "-N ": job.name,
        "-l select=": f"{job.nodes}{cpus}{gpus}",
        "-l place=": "scatter:excl",  # else two chunks may be placed on one node
        "-l walltime=": job.time,
        "-A ": job.account,
        "-q ": job.partition,
        "-J ": f"0-{len(job.tasks) - 1}" if job.tasks else None,
        "-j ": "oe",
        "-o ": job.log.format(index="^array_index^"),
    }
    return [f"{option}{value}" for option, value in requests.items() if value is not None]
