"""A run at a terminal: Ctrl-C once and twice, and a terminal that is lost, as with an ssh connection."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import ONE_THREAD, REPOSITORY, clean_environment, read, unwritable

from app.errors import STOPPED
from launch.run_module import program

IN_PLACE = REPOSITORY / "tests" / "scripts" / "in_place"
ENDLESS = ("train.steps=1000000", "log.every_steps=1", "--trackers", "none", "--resume", "auto")


class Terminal:
    """A terminal of its own, in which a command runs."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._ours, theirs = os.openpty()
        self._process = psutil.Popen(
            command,
            env=clean_environment() | ONE_THREAD | environment,
            cwd=REPOSITORY,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._too_late = threading.Timer(120, self._process.kill)  # reading then ends with an error
        self._too_late.start()
        self.shown = ""
        self._started: list[psutil.Process] = []

    def wait_for(self, words: str) -> None:
        """Until these words are shown."""
        while words not in self.shown:
            self.shown += os.read(self._ours, 2**16).decode(errors="replace")
        self._started = self._process.children(recursive=True)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = -1

    def ended(self) -> int:
        """Wait for the end of the command, see that nothing is left of it, and return its exit code."""
        with suppress(OSError):  # no process has the terminal open any more
            while self._ours >= 0:
                self.shown += os.read(self._ours, 2**16).decode(errors="replace")
        assert psutil.wait_procs(self._started, timeout=60)[1] == []
        return int(self._process.wait(60))

    def close(self) -> None:
        self._too_late.cancel()
        for process in (self._process, *self._started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._ours >= 0:
            self.hang_up()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def run(*command: str, **environment: str) -> Terminal:
        opened.append(Terminal(list(command), environment))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def in_place(run_dir: Path) -> list[str]:
    """`samerun launch` with a stand-in for the training, which takes a second to stop."""
    return [*program("launch.cli"), "launch", "--preset", "cpu", "--run-dir", str(run_dir)]


STAND_IN = {"PYTHONPATH": f"{IN_PLACE}:{REPOSITORY}", "IN_PLACE": "slow 0"}


def test_ctrl_c_stops_a_run_which_may_take_its_time(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    shell = terminal(*in_place(tmp_path), **STAND_IN)
    shell.wait_for("from step 0")
    shell.press_ctrl_c()
    assert shell.ended() == STOPPED
    assert "the run saves a checkpoint and stops; press Ctrl-C again to stop it immediately" in shell.shown
    assert read(tmp_path / "outcome.json")["outcome"] == "stopped"


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_ranks_and_their_launcher_leave_no_tracebacks(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    command = ["launch", "--preset", "multi_gpu", "--processes", "2", "--run-dir", str(tmp_path), *ENDLESS]
    shell = terminal(*program("launch.cli"), *command)
    shell.wait_for("step 20, epoch 1: validation accuracy")
    shell.wait_for(" left  epoch ")  # the line of progress, from a rank in a session of its own
    shell.press_ctrl_c()
    shell.wait_for("press Ctrl-C again")
    shell.press_ctrl_c()
    assert shell.ended() == 130
    assert shell.shown.endswith("samerun: stopped immediately, without saving\r\n")
    assert "Traceback" not in shell.shown
    assert "Error" not in shell.shown


@pytest.mark.multiproc
def test_a_lost_terminal_makes_a_run_save_and_stop(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """And neither what it would have shown there, nor what `samerun` would have said, keeps it from that."""
    shell = terminal(*program("launch.cli"), "launch", "--preset", "cpu", "--run-dir", str(tmp_path), *ENDLESS)
    shell.wait_for("epoch 1: validation accuracy")
    shell.hang_up()
    assert shell.ended() == STOPPED
    outcome = read(tmp_path / "outcome.json")
    assert (outcome["outcome"], outcome["reason"]) == ("stopped", "SIGHUP was received: the terminal is gone")
    assert list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("output", ["terminal", "pipe", "/dev/full"])
def test_lines_that_cannot_be_written_end_no_run(output: str) -> None:
    code = "from app.environment import host; host.guard_stdout(is_needed=False); print(1); print(2); raise SystemExit(7)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=unwritable(output), stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)
    assert done.stderr.startswith("samerun: stdout cannot be written (")


def test_after_nohup_a_run_goes_on(tmp_path: Path) -> None:
    environment = clean_environment() | STAND_IN
    process = subprocess.Popen(
        ["nohup", *in_place(tmp_path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("from step 0")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert read(tmp_path / "outcome.json")["outcome"] == "finished"
