"""Starting real processes: `accelerate launch` as a user would type it, and what came of it.

`launch` starts a training as a user does. `train` saves the seconds that a start takes: its ranks are forks of one process that
has imported everything (scripts/warm.py), with the environments that an `accelerate launch` under the preset has really given
to its processes. That the runs are the same is shown by a test of test_same_run.py.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent
SCRIPTS = REPOSITORY / "tests" / "scripts"
# Presets that say themselves that they start one process.
ALONE = ("cpu", "single_gpu")
# Long enough for a cold start of four processes on two busy cores, short enough that a hang is seen.
TIMEOUT_S = 240
# How long ranks may take to notice by themselves that another one has failed.
SOON_S = 10.0
# What Accelerate gives to several processes anyway: two threads of `cpu` would spin for the cores that all tests share.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    returncode: int
    output: str

    def check(self) -> Finished:
        assert self.returncode == 0, self.output
        return self


class Started:
    """A command that runs in a process group of its own, so that all it started can be ended with it."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**clean_environment(), **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """The command's own process, and all that it started."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def kill(self) -> Finished:
        """SIGKILL to the command and all that it started, at once."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return self.wait()

    def wait(self, timeout_s: float = TIMEOUT_S) -> Finished:
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            output, _ = self._process.communicate()
            raise AssertionError(f"still running after {timeout_s} s: {output}") from None
        return Finished(self._process.returncode, output)


def placed(text: str) -> str:
    """A text without what differs between machines."""
    text = text.replace(sys.executable, "PYTHON").replace(str(REPOSITORY / "accelerate_configs"), "PRESETS")
    return text.replace(str(REPOSITORY / "launch"), "LAUNCH")


def unwritable(output: str) -> int:
    """Return a descriptor of a terminal or a pipe whose other end is gone, or of a file on a full disk."""
    if output not in ("terminal", "pipe"):
        return os.open(output, os.O_WRONLY)
    other, ours = os.openpty() if output == "terminal" else os.pipe()
    os.close(other)
    return ours


def clean_environment() -> dict[str, str]:
    """This process's environment without what a scheduler or launcher may have left in it."""
    foreign = ("SLURM_", "PBS_", "OMPI_", "PMI", "ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # DeepSpeed compiles for minutes, and again for another virtual environment that finds the first one's files.
    compiled = Path(sys.prefix, "torch_extensions")
    # And again for another version of `ninja`: the scripts that are no training take what is on the PATH.
    path = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))
    # Processes of several nodes, and of several tests, share the cores here: one whose threads spin while they wait for one
    # another takes the time in which the others would come. A run of the labs took 194 CPU seconds with that, and 34 without.
    sharing = {"OMP_WAIT_POLICY": "passive"}
    found = {"PYTHONPATH": python_path(), "PATH": path}
    return {"TORCH_EXTENSIONS_DIR": str(compiled)} | environment | sharing | found


def python_path(*first: Path, root: Path = REPOSITORY) -> str:
    """PYTHONPATH for a child: these folders, this repository, and what this process was given (libraries may lie there).

    With `root`, a folder with the code of another commit, that one takes the place of this repository.
    """
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != REPOSITORY]
    return os.pathsep.join(dict.fromkeys((*map(str, first), str(root), *given)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accelerate(preset: str | Path, *options: str, target: tuple[str, ...], processes: int | None = None) -> list[str]:
    """The `accelerate launch` command for a preset (shipped name, or path) that starts `target`."""
    count = ("--num_processes", str(processes)) if processes is not None else ()
    port = ("--main_process_port", str(free_port())) if "--main_process_port" not in options else ()
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(_path_of(preset)))
    return [*launch, *count, *port, *options, *last_of_each(target)]


def last_of_each(words: Iterable[str]) -> tuple[str, ...]:
    """The words, of which the last `key=value` counts: the application refuses a key that is given twice."""
    given = list(words)
    last = {word.partition("=")[0]: index for index, word in enumerate(given) if "=" in word}
    return tuple(
        word
        for index, word in enumerate(given)
        if last.get(word.partition("=")[0], index) == index or word.startswith(("-", "/"))
    )


def _path_of(preset: str | Path) -> Path:
    return REPOSITORY / "accelerate_configs" / f"{preset}.yaml" if isinstance(preset, str) else preset


def launch(preset: str | Path, run_dir: Path, *arguments: str, processes: int | None = None, **started: Any) -> Finished:
    """Run `app.train` to its end under a preset, started as a user would."""
    target = ("-m", "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments)
    return Started(accelerate(preset, target=target, processes=processes), **started).wait()


class Running:
    """The ranks of a run in forks of the warm process."""

    def __init__(self, warm: Connection, log: Path) -> None:
        self._warm, self._log = warm, log
        self.ranks: tuple[int, ...] = tuple(warm.recv())
        """Process ids, in the order of the ranks."""
        self._ranks = set(self.ranks)  # of those that run
        self._codes: list[int] = []  # in the order in which they ended

    def is_over(self) -> bool:
        return self._ends_within(0.0)

    def kill(self) -> Finished:
        """SIGKILL to all ranks, at once."""
        for rank in self._ranks:
            with suppress(ProcessLookupError):  # it may have ended since
                os.kill(rank, signal.SIGKILL)
        return self.wait()

    def wait(self) -> Finished:
        if not self._ends_within(TIMEOUT_S):
            one_failed = any(self._codes)
            output = self.kill().output
            assert one_failed, f"still running after {TIMEOUT_S} s: {output}"
        return Finished(next(filter(None, self._codes), 0), self._log.read_text())

    def _ends_within(self, timeout_s: float) -> bool:
        """Whether all ranks end in this time, or soon after the first one that failed."""
        end_s = time.monotonic() + timeout_s
        while self._ranks:
            if not self._warm.poll(max(0.0, end_s - time.monotonic())):
                return False
            rank, code = self._warm.recv()
            self._ranks.remove(rank)
            self._codes.append(code)
            if code:
                end_s = min(end_s, time.monotonic() + SOON_S)
        return True


class Warm:
    """The process with everything imported; for the code of another folder than this one, with everything but that."""

    def __init__(self, root: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="samerun-warm-")
        self._runs = 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(0.1)
            command = [sys.executable, str(SCRIPTS / "warm.py"), str(server.getsockname()[1]), *([str(root)] if root else [])]
            place = root or REPOSITORY
            self._started = Started(command, env={**ONE_THREAD, "PYTHONPATH": python_path(root=place)}, cwd=place)
            self._connection = self._accept(server)

    def _accept(self, server: socket.socket) -> Connection:
        while not self._started.is_over():
            with suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
        raise AssertionError(f"the warm process did not come up: {self._started.wait().output}")

    def start(self, command: tuple[str, ...], environments: list[dict[str, str]]) -> Running:
        self._runs += 1
        log = Path(self._folder.name, f"{self._runs}.log")
        log.touch()
        self._connection.send((command, environments, str(log)))
        return Running(self._connection, log)

    def close(self) -> None:
        self._started.kill()
        self._connection.close()
        self._folder.cleanup()


@functools.cache
def launched_environments(preset: str | Path, processes: int) -> list[dict[str, str]]:
    """What a real `accelerate launch` under the preset gives each of its processes to find in its environment."""
    with tempfile.TemporaryDirectory() as folder:
        target = (str(SCRIPTS / "environment.py"), folder)
        command = accelerate(preset, target=target, processes=None if preset in ALONE else processes)
        warm().start(tuple(command[command.index("-m") + 1 :]), [{**clean_environment(), **ONE_THREAD}]).wait().check()
        return [read(Path(folder, f"{rank}.json")) for rank in range(processes)]


@functools.cache
def warm() -> Warm:
    """The one warm process, started when first asked for."""
    return Warm()


def end_warm() -> None:
    if warm.cache_info().currsize:
        warm().close()
        warm.cache_clear()


def start(preset: str | Path, processes: int | None, *command: str, env: Mapping[str, str] | None = None) -> Running:
    """Start a module (or a script, by its path) on warm ranks, with the environment of a preset."""
    # The meeting point of the launcher went with it.
    is_group = processes and preset not in ALONE
    meeting = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"} if is_group else {}
    given = launched_environments(preset, processes or 1)
    return warm().start(last_of_each(command), [{**variables, **meeting, **(env or {})} for variables in given])


def run(preset: str | Path, processes: int | None, *command: str, env: Mapping[str, str] | None = None) -> Finished:
    """Run a module (or a script, by its path) to its end on warm ranks, with the environment of a preset."""
    return start(preset, processes, *command, env=env).wait()


def train(
    preset: str | Path, run_dir: Path, *arguments: str, processes: int | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """Run `app.train` to its end on warm ranks, with the environment of a preset."""
    trackers = () if "--trackers" in arguments else ("--trackers", "none")
    return run(preset, processes, "app.train", "--run-dir", str(run_dir), *trackers, *arguments, env=env)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir: Path, name: str = "loss") -> list[Any]:
    """A value of each line of metrics.jsonl."""
    return [line[name] for line in read_lines(run_dir / "metrics.jsonl")]


def captured(path: str) -> dict[str, str]:
    """Return an environment captured from a real scheduler or launcher, a file of tests/environments."""
    lines = (REPOSITORY / "tests" / "environments" / f"{path}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values
