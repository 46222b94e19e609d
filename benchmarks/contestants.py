"""Programs that take turns: each in processes of its own, of which only those of one run at a time.

    with start(name, task, ...) as contestant:
        cpu_s = contestant.take_first_step()
        window = contestant.run(steps)

The other end is `benchmarks.meter.Meter`. No torch here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.errors import TrainingError
from launch.run_module import program

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
_LAST_LINES = 15
_UNSET = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "PMI",
    "OMPI_",
    "PBS_",
)


@dataclass(frozen=True)
class Window:
    """What a window of steps took: of several processes the mean."""

    steps: int
    cpu_s: float
    """CPU time, with that of worker processes."""
    wall_s: float
    left_over: int = 0
    """Batches used in it that worker processes had made while others ran; 0, or it was no fair window."""

    @property
    def cpu_us_per_step(self) -> float:
        """Microseconds of CPU time a step, of a process and its workers."""
        return 1e6 * self.cpu_s / self.steps

    @property
    def wall_us_per_step(self) -> float:
        """Microseconds of wall-clock time a step."""
        return 1e6 * self.wall_s / self.steps


class Contestant:
    """A program that was started."""

    def __init__(self, name: str, processes: list[subprocess.Popen[bytes]], connections: list[Connection], log: Path) -> None:
        """Each process writes to `log`."""
        self.name, self._processes, self._connections, self._log = name, processes, connections, log
        self.process_ids = [process.pid for process in processes]

    def take_first_step(self) -> float:
        """Wait for it, and return the CPU seconds of a process from its start to the end of that step.

        Comes before any `run`. Raises TrainingError, with the program's last words, if it fails.
        """
        return float(max(answer["cpu_s"] for answer in self._answers()))

    def run(self, steps: int) -> Window:
        """Let it take so many steps, where workers feed it after others that use up what lay ready (see the meter).

        Raises TrainingError if it fails.
        """
        self._tell(steps)
        answers = self._answers()
        cpu_s = sum(answer["cpu_s"] + answer["children_cpu_s"] for answer in answers)
        return Window(steps, cpu_s / len(answers), max(answer["wall_s"] for answer in answers), answers[0]["left_over"])

    def run_to_the_end(self) -> float:
        """Let it finish and return the CPU time of all its life. Raises TrainingError if it fails."""
        self._tell(sys.maxsize)
        total_s = 0.0
        for process in self._processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise self._failure()
            total_s += usage.ru_utime + usage.ru_stime
        return total_s

    def _tell(self, steps: int) -> None:
        try:
            for connection in self._connections:
                connection.send(steps)
        except OSError as error:  # it ended while the others had their turns
            raise self._failure() from error

    def _answers(self) -> list[dict[str, Any]]:
        try:
            return [connection.recv() for connection in self._connections]
        except (EOFError, ConnectionError) as error:
            raise self._failure() from error

    def _failure(self) -> TrainingError:
        words = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return TrainingError(f"{self.name} failed before all of it was measured: {words or 'it said nothing'}")


@contextmanager
def start(  # noqa: PLR0913  (keyword-only after the task)
    name: str,
    task: dict[str, Any],
    *,
    log: Path,
    threads: int,
    processes: int = 1,
    variables: Mapping[str, str] = ON_CPU,
    case: str = "benchmarks.bench_case",
) -> Iterator[Contestant]:
    """Start a program in so many processes of so many threads each, and end them after the block.

    `task` is what the module `case` takes (of the default one a `benchmarks.work.Task`), and `variables` are those of the
    preset. Raises TrainingError as `Contestant` does.
    """
    started: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    try:
        with log.open("wb") as output:
            for environment in environments(threads, processes, variables):
                ours, theirs = Pipe()
                connections.append(ours)
                command = [*program(case), str(theirs.fileno()), str(threads), json.dumps(task)]
                given = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": [theirs.fileno()]}
                started.append(subprocess.Popen(command, env=environment, **given))  # type: ignore[call-overload]
                theirs.close()
        yield Contestant(name, started, connections, log)
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                process.wait()
        for connection in connections:
            connection.close()


def environments(threads: int, processes: int, variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Return that of each process: this one's without what places it in a run, the threads, and these variables."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
    plain |= {"OMP_NUM_THREADS": str(threads), **variables}
    if processes == 1:
        return [plain]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), **meeting}
    return [{**plain, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
