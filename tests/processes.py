"""Starting real processes: `accelerate launch` as a user would type it, and what came of it.

`launch` starts a training as a user does. `train` saves the seconds that a start takes: it runs the same module in forks of
processes that an `accelerate launch` of the same preset has started and that have imported everything (scripts/warm.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
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

    def __init__(self, command: list[str], *, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**clean_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> Finished:
        """SIGKILL to the command and all that it started, at once."""
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
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


def clean_environment() -> dict[str, str]:
    """This process's environment without what a scheduler or launcher may have left in it."""
    foreign = ("SLURM_", "PBS_", "OMPI_", "PMI", "ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # DeepSpeed compiles for minutes, and again for another virtual environment that finds the first one's files.
    compiled = Path.home() / ".cache" / "torch_extensions" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    return {"TORCH_EXTENSIONS_DIR": str(compiled)} | environment | {"PYTHONPATH": str(REPOSITORY)}


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
    return [*launch, *count, *port, *options, *target]


def _path_of(preset: str | Path) -> Path:
    return REPOSITORY / "accelerate_configs" / f"{preset}.yaml" if isinstance(preset, str) else preset


def launch(preset: str | Path, run_dir: Path, *arguments: str, processes: int | None = None, **started: Any) -> Finished:
    """Run `app.train` to its end under a preset, started as a user would."""
    target = ("-m", "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments)
    return Started(accelerate(preset, target=target, processes=processes), **started).wait()


class Running:
    """A module that runs in forks of warm processes."""

    def __init__(self, ranks: list[Connection], log: Path) -> None:
        self._ranks, self._log = ranks, log
        self._pids: list[int] = [rank.recv() for rank in ranks]
        self._codes: dict[Connection, int] = {}  # in the order in which they ended

    def is_over(self) -> bool:
        return self._ends_within(0.0)

    def kill(self) -> Finished:
        """SIGKILL to all ranks, at once."""
        for rank, pid in zip(self._ranks, self._pids, strict=True):
            if rank not in self._codes:
                os.kill(pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> Finished:
        if not self._ends_within(TIMEOUT_S):
            one_failed = any(self._codes.values())
            output = self.kill().output
            assert one_failed, f"still running after {TIMEOUT_S} s: {output}"
        return Finished(next(filter(None, self._codes.values()), 0), self._log.read_text())

    def _ends_within(self, timeout_s: float) -> bool:
        """Whether all ranks end in this time, or soon after the first one that failed."""
        end_s = time.monotonic() + timeout_s
        while running := [rank for rank in self._ranks if rank not in self._codes]:
            ready = connection.wait(running, max(0.0, end_s - time.monotonic()))
            self._codes.update((rank, rank.recv()) for rank in ready)
            if not ready:
                return False
            if any(self._codes.values()):
                end_s = min(end_s, time.monotonic() + SOON_S)
        return True


class Warm:
    """The processes of one preset, started once, in which modules run one after the other."""

    def __init__(self, preset: str, processes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="samerun-warm-")
        self._runs = 0
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(1.0)
            port = str(server.getsockname()[1])
            target = (str(SCRIPTS / "warm.py"), port, "--config_file", str(_path_of(preset)))
            command = accelerate(preset, target=target, processes=None if preset in ALONE else processes)
            # One thread each, as Accelerate gives to several processes anyway: those of `cpu` would spin for the same cores.
            self._started = Started(command, env={"OMP_NUM_THREADS": "1"})
            ranks = [self._accept(server) for _ in range(processes)]
        self._ranks = [rank for _, rank in sorted(((rank.recv(), rank) for rank in ranks), key=lambda pair: pair[0])]

    def _accept(self, server: socket.socket) -> Connection:
        end_s = time.monotonic() + TIMEOUT_S
        while not self._started.is_over() and time.monotonic() < end_s:
            with suppress(TimeoutError):
                accepted, _ = server.accept()
                accepted.setblocking(True)
                return Connection(accepted.detach())
        raise AssertionError(f"the warm processes did not come up: {self._started.kill().output}")

    def start(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Running:
        """Run `python -m module arguments`, or a script by its path, in all processes."""
        self._runs += 1
        log = Path(self._folder.name, f"{self._runs}.log")
        log.touch()
        request = {"module": module, "arguments": arguments, "env": env or {}, "log": str(log), "port": str(free_port())}
        for rank in self._ranks:
            rank.send(request)
        return Running(self._ranks, log)

    def close(self) -> None:
        self._started.kill()
        for rank in self._ranks:
            rank.close()
        self._folder.cleanup()


_warm: dict[tuple[str, int], Warm] = {}


def warm(preset: str, processes: int | None = None) -> Warm:
    """The warm processes of a preset; the first call starts them."""
    key = (preset, processes or 1)
    if key not in _warm:
        _warm[key] = Warm(*key)
    return _warm[key]


def end_warm() -> None:
    """End all warm processes."""
    while _warm:
        _warm.popitem()[1].close()


def run(preset: str, processes: int | None, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Finished:
    """Run a module (or a script, by its path) to its end in the warm processes of a preset."""
    return warm(preset, processes).start(module, *arguments, env=env).wait()


def train(
    preset: str, run_dir: Path, *arguments: str, processes: int | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """Run `app.train` to its end in the warm processes of a preset."""
    return run(preset, processes, "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments, env=env)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values
