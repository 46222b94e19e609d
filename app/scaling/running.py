"""Runs the cases of a sweep, here through `samerun launch` or as jobs through `samerun submit`, and collects their results.

What is finished speaks for itself, by its result.json. Of a case that failed, or whose job was handed in, CASE.json beside its
run folder tells why, where its output is and which job it is. A case that was interrupted has neither and begins anew: a run
that goes on in the middle would be measured in the middle.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.errors import STOPPED, RunFolderError, TopologyError
from app.place import cores
from app.record import run_folder
from app.scaling.sweep import Case, Folder, Sweep
from launch.run_module import program
from launch.schedulers import detect, local
from launch.submit import submit

_THREADS = "OMP_NUM_THREADS"
_STOP_S = 60.0
"""How long a case may take to save and stop when the sweep is interrupted."""
# The last words of a run, but for those of launchers that only say that somebody else failed.
_SENTENCE = re.compile(r"(?!.*(?:ChildFailedError|CalledProcessError))\S.*Error: \S")
_IN_QUEUE = {"slurm": ("squeue", "--noheader", "--jobs"), "pbs": ("qstat",)}
_OVER = re.compile(r"Invalid job id|Unknown Job|has finished", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What CASE.json tells of a case without a result."""

    log: str
    """File with its output."""
    why: str = ""
    """Why it failed; empty for a job that was handed in."""
    job: str = ""
    scheduler: str = ""


@dataclass(frozen=True)
class Place:
    """Where the cases run."""

    environment: Mapping[str, str]
    in_allocation: bool
    threads: str | None
    """CPU threads of each process, the same for all sizes; None: what each size finds."""


def find_place(sweep: Sweep, environment: Mapping[str, str]) -> Place:
    """Return where this process can run the cases. Raises TopologyError.

    A process on a CPU gets the threads that it has on the largest size on all others as well, or more devices would have
    fewer cores each, and the sizes could not be compared.
    """
    most = max(sweep.processes)
    allocation = detect.find(environment)
    if allocation:
        allocation = detect.find(environment, processes_per_node=most)
    nodes = allocation.topology.num_nodes if allocation else 0
    if max(sweep.nodes) > max(nodes, 1):
        there = f"this allocation has {nodes}" if allocation else "there is no allocation here"
        raise TopologyError(
            f"{max(sweep.nodes)} nodes are asked for (--nodes), and {there}: start inside a job of as many, or use --submit"
        )
    threads = environment.get(_THREADS)
    if threads is None and allocation and allocation.topology.threads_per_process:
        threads = str(allocation.topology.threads_per_process)
    elif threads is None and not allocation and local.count_accelerators(environment)[0] == 0:
        threads = str(cores.of_this_process(most))
    told = {_THREADS: threads} if threads else {}
    return Place({**environment, **told}, allocation is not None, threads)


def run_here(folder: Folder, case: Case, place: Place) -> Attempt | None:
    """Run a case to its end. Returns what went wrong, which is also recorded, or None."""
    run_dir, log = _empty(folder, case), folder.beside(case, "log")
    nodes, processes = str(case.size.nodes), str(case.size.processes)
    where = ["--nodes", nodes, "--processes-per-node", processes] if place.in_allocation else ["--processes", processes]
    command = [*program("launch.cli"), "launch", *where, "--trackers", "none", *_words(folder, case)]
    with log.open("w") as output:
        code = _run(command, place.environment, output.fileno())
    if code == 0 and (run_dir / run_folder.RESULT).exists():
        return None
    why = "it was asked to stop before its end"
    if code not in (0, STOPPED):
        why = f"exit code {code}: {last_sentence(log.read_text(errors='replace'))}"
    return _record(folder, case, Attempt(log=str(log), why=why))


def _run(command: Sequence[str], environment: Mapping[str, str], output: int) -> int:
    """The exit code of a command, which is ended when this process is interrupted."""
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait(timeout=_STOP_S)
        raise


def hand_in(
    folder: Folder, case: Case, *, options: Sequence[str], environment: Mapping[str, str], say: Callable[[str], None]
) -> Attempt:
    """Submit a case as a job with these options of `samerun submit`, and record it. Raises SubmitError."""
    _empty(folder, case)
    processes = str(case.size.processes)
    given = [option.replace("{processes}", processes) for option in options]
    if not any(option.startswith(("--gpus-per-node", "--processes-per-node")) for option in given):
        given += ["--processes-per-node", processes]
    # A job that came back from the queue would be measured in the middle.
    own = ["--nodes", str(case.size.nodes), "--max-requeues", "0"]
    job = submit.hand_in([*own, *given, *_words(folder, case), "--", "--trackers", "none"], environment, say=say)
    return _record(folder, case, Attempt(log=str(Path(job.log).absolute()), job=job.job_id, scheduler=job.scheduler))


def _empty(folder: Folder, case: Case) -> Path:
    """The run folder of a case, without what an interruption or a failure left of it."""
    run_dir = folder.run_dir(case)
    shutil.rmtree(run_dir, ignore_errors=True)
    folder.beside(case, "json").unlink(missing_ok=True)
    return run_dir


def _words(folder: Folder, case: Case) -> list[str]:
    """The options that `samerun launch` and `samerun submit` share."""
    words = ["--preset", case.size.preset, "--recipe", folder.sweep.recipe, "--run-dir", str(folder.run_dir(case))]
    return [*words, *folder.sweep.overrides, *folder.own_overrides(case.size)]


def attempt(folder: Folder, case: Case) -> Attempt | None:
    """Return what is recorded of a case without a result: None if it was not tried, or was interrupted.

    A job that is no longer in its queue has failed, and is recorded so. Raises RunFolderError for a broken record.
    """
    path = folder.beside(case, "json")
    if not path.exists():
        return None
    try:
        found = Attempt(**run_folder.read_json(path))
    except TypeError as error:
        raise RunFolderError(f"{path} is broken: {error}. Delete it, and the case runs again.") from error
    if found.why or not found.job or is_queued(found.job, found.scheduler):
        return found
    log = Path(found.log)
    said = last_sentence(log.read_text(errors="replace")) if log.exists() else "it left no output"
    why = f"job {found.job} is over without a result: {said}"
    return _record(folder, case, Attempt(log=found.log, why=why, job=found.job, scheduler=found.scheduler))


def is_queued(job: str, scheduler: str) -> bool:
    """Return whether a job waits or runs, as far as its scheduler says anything else; elsewhere than at its site, it does."""
    command = [*_IN_QUEUE[scheduler], job]
    if shutil.which(command[0]) is None:
        return True
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        return not _OVER.search(asked.stderr + asked.stdout)
    return bool(asked.stdout.strip())


def last_sentence(output: str) -> str:
    """Return the last line of a run's output that says what was wrong: an error, or else whatever it said last."""
    lines = [line.strip() for line in output.splitlines() if re.search(r"\w", line)]
    return next((line for line in reversed(lines) if _SENTENCE.search(line)), lines[-1] if lines else "it said nothing")


def _record(folder: Folder, case: Case, attempt: Attempt) -> Attempt:
    run_folder.write_json(folder.beside(case, "json"), asdict(attempt))
    return attempt
