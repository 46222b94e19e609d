"""A real Slurm cluster in namespaces of this machine, for tests (see tests/slurm-lab), and why there may be none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import REPOSITORY, Finished, Started, losses, read

_SCRIPT = REPOSITORY / "tests" / "slurm-lab"
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv", "pkill")
STEPS = 5
# 48 samples can be divided by 1, 2, 3 and 4 processes.
RECIPE = ("--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=48", "log.every_steps=1", "--trackers", "none")
"""Arguments of a short run that gives the same losses on every topology."""
ENDLESS = ("--recipe", "digits", "train.steps=1000000", "log.every_steps=1", "--trackers", "none")
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def why_not() -> str | None:
    """What keeps the lab from running here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the Slurm lab creates namespaces, which needs Linux and root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"the Slurm lab needs {', '.join(missing)}: run `make lab-packages`"
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "mount", "--make-rprivate", "/"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "the Slurm lab cannot create namespaces here: a container needs --privileged"
    return None


@dataclass(frozen=True)
class Job:
    """A job that is over."""

    state: str
    exit_code: str
    """As Slurm has it: status of the script, a colon, the signal that ended it."""
    output: str
    start_s: float
    end_s: float


class Lab:
    """A cluster that is up."""

    def __init__(self, folder: Path, outputs: Path) -> None:
        self.folder = folder
        self._outputs = outputs

    def start(self, *command: str, node: str = "head", env: Mapping[str, str] | None = None) -> Started:
        """Start a command on a node as a user with `samerun` on the PATH would."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        wrapped = [str(_SCRIPT), "exec", str(self.folder), node, *command]
        return Started(wrapped, env={"PATH": path, **(env or {})})

    def run(self, *command: str, node: str = "head", env: Mapping[str, str] | None = None) -> Finished:
        return self.start(*command, node=node, env=env).wait()

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job and return its id."""
        command = ("sbatch", "--parsable", f"--output={self._outputs}/%A-%a.out", *arguments)
        return self.run(*command, env=env).check().output.strip()

    def lose(self, node: str, how: str) -> None:
        """Switch a node off (`power`), or pull its cable (`link`)."""
        subprocess.run([_SCRIPT, "lose", self.folder, node, how], check=True)

    def output(self, job: str) -> str:
        """What a job, or every task of an array, has written so far."""
        return "".join(path.read_text() for path in sorted(self._outputs.glob(f"{job}-*.out")))

    def wait(self, job: str, timeout_s: float = 420) -> Job:
        """Wait for a job (of an array: `ID_INDEX`) to be over."""
        deadline_s = time.monotonic() + timeout_s
        while (facts := self.facts(job))["JobState"] not in _OVER:
            assert time.monotonic() < deadline_s, f"job {job} is {facts['JobState']}: {self.output(job)}"
            time.sleep(0.2)
        start_s, end_s = (time.mktime(time.strptime(facts[name], "%Y-%m-%dT%H:%M:%S")) for name in ("StartTime", "EndTime"))
        output = Path(facts["StdOut"]).read_text()
        return Job(facts["JobState"], facts["ExitCode"], output, start_s, end_s)

    def wait_for_output(self, job: str, words: str, timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in self.output(job):
            assert time.monotonic() < deadline_s, self.output(job)
            assert self.facts(job)["JobState"] not in _OVER, self.output(job)
            time.sleep(0.2)

    def cancel_all(self, timeout_s: float = 30) -> None:
        self.run("scancel", "--user=root").check()
        deadline_s = time.monotonic() + timeout_s
        while (queue := self.run("squeue", "--noheader").check().output).strip():
            assert time.monotonic() < deadline_s, queue
            time.sleep(0.2)

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        line = self.run("scontrol", "--oneliner", "show", "job", job).check().output
        return dict(re.findall(r"([\w:/]+)=(.*?)(?= [\w:/]+=|$)", line.strip()))  # a folder may have a space


@contextmanager
def lab(folder: Path, outputs: Path, *, nodes: int, gpus_per_node: int) -> Iterator[Lab]:
    """A cluster of node1, node2, ... with 4 CPUs each, and GPUs that Slurm gives out but nobody can compute on."""
    try:
        up(folder, nodes=nodes, gpus_per_node=gpus_per_node, owner=os.getpid())
        yield Lab(folder, outputs)
    finally:
        subprocess.run([_SCRIPT, "down", folder], check=True)


def up(folder: Path, *, nodes: int, gpus_per_node: int, owner: int) -> None:
    """Start a cluster that is taken down when the process `owner` is gone."""
    command = [_SCRIPT, "up", folder, str(nodes), str(gpus_per_node), str(owner)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 0, finished.stderr


def assert_ran(run_dir: Path, hosts: list[str], alone: list[float], output: str) -> None:
    """A rank on each of these hosts, in this order, and the losses of one process alone."""
    assert [rank.split()[0] for rank in read(run_dir / "run.json")["ranks"]] == hosts, output
    assert losses(run_dir) == pytest.approx(alone, rel=1e-5), output


def container_environment(installed: Path, hidden: Path) -> dict[str, str]:
    """Variables of a user with Samerun from a wheel, and with an apptainer that hides a folder (tests/scripts/container)."""
    path = os.pathsep.join([str(REPOSITORY / "tests" / "scripts" / "container"), str(installed), os.environ["PATH"]])
    return {"PATH": path, "PYTHONPATH": "", "HIDDEN": str(hidden)}


def left_over(folder: Path) -> list[str]:
    """Processes, mounts and folders that still speak of a lab."""
    commands = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    found = [f"{path}: {words!r}" for path, words in commands.items() if b"__hold\0" + bytes(folder) in words]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    return found + ([str(folder)] if folder.exists() else [])
