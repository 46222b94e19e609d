"""Whatever of a run ends first, nothing of it is left: real launchers, killed as a lack of memory kills."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import ONE_THREAD, REPOSITORY, Started, accelerate, clean_environment

from app.environment.host import kill_all_with
from app.environment.topology import Topology
from launch.node_command import accelerate_argv, one_process_argv
from launch.preset import load

pytestmark = pytest.mark.multiproc

LOST = "samerun: `samerun launch`, which started this run, has ended, so the run ends."
KILLED = f"samerun: {{}} on {socket.gethostname()} was ended by SIGKILL, possibly out of memory, and the run"
SOON_S = 15.0
"""Looking takes up to a second and a half; the rest is for machines that are busy."""

SAMERUN = """
import os, sys
from app.environment.launched import errors_folder
from launch.start import supervise
errors = errors_folder(os.environ)
sys.exit(supervise.run(sys.argv[1:], os.environ, errors=errors).exit_code)
"""
# A rank without torch, which takes seconds, and with a process that would outlive it.
IDLE = """
import os, subprocess, sys, time
from app.distributed.watchdog import Lifeline
Lifeline(os.environ).start()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
os.write(1, b"up\\n")
time.sleep(300)
"""


# Decoded by workers, of which batches are left over at the end.
WORKERS = (
    *("--recipe", "digits", "--trackers", "none", "data.source=fakedata", "data.image_size=8", "data.fake_train_samples=4000"),
    *("data.fake_test_samples=64", "train.global_batch_size=16", "train.steps=3"),
)
# app.train, which fails at its first batch.
FAILS = """
import sys
from app.tasks.image_classification.data.augment import Preparation
from app.train import main
def fail(*_):
    raise RuntimeError("out of memory, say")
Preparation.train = fail
main(sys.argv[1:])
"""


class Run:
    """A command, all that it starts, and its output."""

    def __init__(self, command: list[str], log: Path, folder: Path) -> None:
        self.mark, self._log = uuid.uuid4().hex, log
        path = f"{folder}:{REPOSITORY}"
        environment = clean_environment() | ONE_THREAD | {"PYTHONPATH": path, "OF_THIS_TEST": self.mark}
        environment["SAMERUN_ERRORS"] = str(folder / "errors/start")
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 120
        while not is_so():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.05)

    def all(self) -> list[psutil.Process]:
        """Its processes, but for those that have ended and were not asked about."""
        self.process.poll()
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("OF_THIS_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, victim: str) -> None:
        """Kill `samerun`, the `launcher` of Accelerate or a `rank`, and see that all else ends."""
        everything = self.all()
        ranks = [process for process in everything if "idle" in process.cmdline()[-1] or "app.train" in process.cmdline()]
        ranks = [process for process in ranks if "accelerate.commands.launch" not in process.cmdline()]
        (launcher,) = {process.ppid() for process in ranks if process.ppid() not in {rank.pid for rank in ranks}}
        pid = {"samerun": self.process.pid, "launcher": launcher, "rank": ranks[-1].pid}[victim]
        psutil.Process(pid).send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + SOON_S
        while left := self.all():
            assert time.monotonic() < deadline_s, (left, self.output)
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[list[str]], Run]]:
    runs: list[Run] = []

    def begin(command: list[str]) -> Run:
        runs.append(Run(command, tmp_path / "log", tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        kill_all_with("OF_THIS_TEST", run.mark)
        run.process.wait()


@pytest.mark.parametrize(
    ("preset", "victim", "code", "sentence"),
    [
        ("multi_gpu", "samerun", -9, LOST),
        ("multi_gpu", "launcher", 137, KILLED.format("`accelerate launch`")),
        ("multi_gpu", "rank", 137, KILLED.format("rank 1")),
        ("alone", "samerun", -9, LOST),
        ("alone", "rank", 137, KILLED.format("rank 0")),
    ],
)
def test_nothing_is_left_of_a_run_of_ours(
    start: Callable[[list[str]], Run], tmp_path: Path, preset: str, victim: str, code: int, sentence: str
) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    processes = 2 if preset == "multi_gpu" else 1
    topology = Topology(processes_per_node=processes, threads_per_process=1)
    if preset == "alone":  # without an `accelerate launch`
        command = one_process_argv(topology, load("cpu"), [], {}, module="idle")
        assert command is not None
    else:
        command = accelerate_argv(topology, load(preset), [], module="idle")
    run = start([sys.executable, "-c", SAMERUN, *command])
    run.wait_until(lambda: run.output.count("up\n") == processes)
    run.kill(victim)
    assert run.process.wait() == code
    assert run.output.count(sentence) == 1


def test_nothing_is_left_of_a_plain_accelerate_launch(start: Callable[[list[str]], Run], tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text(IDLE)
    run = start(accelerate("multi_gpu", target=("-m", "idle"), processes=2))
    run.wait_until(lambda: run.output.count("up\n") == 2)
    run.kill("launcher")
    assert run.output.count("samerun: `accelerate launch`, which started this run, has ended, so the run ends.") == 1


def test_a_run_with_workers_ends_when_it_fails(tmp_path: Path) -> None:
    """As no one expects it: the traceback keeps what makes the batches."""
    finished = Started([sys.executable, "-c", FAILS, "--run-dir", str(tmp_path), *WORKERS]).wait(60)
    assert finished.returncode == 1
    assert finished.output.endswith("RuntimeError: out of memory, say\n")
