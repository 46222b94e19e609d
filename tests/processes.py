"""Starting real processes: `accelerate launch` as a user would type it, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parent.parent
# Long enough for a cold start of four processes on two busy cores, short enough that a hang is seen.
TIMEOUT_S = 240


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


def clean_environment() -> dict[str, str]:
    """This process's environment without what a scheduler or launcher may have left in it."""
    foreign = ("SLURM_", "PBS_", "OMPI_", "PMI", "ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return environment | {"PYTHONPATH": str(REPOSITORY)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accelerate(preset: str | Path, *options: str, target: tuple[str, ...], processes: int | None = None) -> list[str]:
    """The `accelerate launch` command for a preset (shipped name, or path) that starts `target`."""
    path = REPOSITORY / "accelerate_configs" / f"{preset}.yaml" if isinstance(preset, str) else preset
    count = ("--num_processes", str(processes)) if processes is not None else ()
    port = ("--main_process_port", str(free_port())) if "--main_process_port" not in options else ()
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path))
    return [*launch, *count, *port, *options, *target]


def train(preset: str | Path, run_dir: Path, *arguments: str, processes: int | None = None, **started: Any) -> Finished:
    """Run `app.train` to its end under a preset."""
    target = ("-m", "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments)
    return Started(accelerate(preset, target=target, processes=processes), **started).wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values
