"""A run watched from outside: its signals, its exit code, and the failure that ended it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment

from app.environment.topology import Topology
from app.runs.failure import ProcessFailure, first, record
from launch.node_command import accelerate_argv, one_process_argv
from launch.preset import load
from launch.run_module import as_shells_say

HOST = socket.gethostname()
WATCHED = """
import os, sys
from app.environment.launched import errors_folder
from launch.start import supervise
errors = errors_folder(os.environ)
sys.exit(supervise.run(sys.argv[1:], os.environ, watched=True, errors=errors).exit_code)
"""


def start(*command: str, **variables: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", WATCHED, *command]
    environment = clean_environment() | variables
    return subprocess.Popen(argv, env=environment, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def ended(*command: str, **variables: str) -> tuple[int, str, str]:
    process = start(*command, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_exit_code_and_both_streams_are_the_commands():
    assert ended("sh", "-c", "echo out; printf 'half a line' >&2; exit 7") == (7, "out\n", "half a line")


def test_half_a_line_is_passed_on_at_once():
    process = start("sh", "-c", "printf 12 >&2; exec sleep 60")
    assert os.read(process.stderr.fileno(), 10) == b"12"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_what_the_command_leaves_behind_is_not_waited_for():
    began_s = time.monotonic()
    process = start("sh", "-c", "sleep 20 >&- & echo $! ; echo bye >&2; exit 4")
    assert process.wait(timeout=15) == 4
    left = int(process.stdout.readline())
    os.kill(left, signal.SIGKILL)
    assert process.communicate()[1] == "bye\n"
    assert time.monotonic() - began_s < 15


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_the_commands_and_arrive_once(number):
    """Also those that a terminal sends to the whole group: the command is in a session of its own."""
    name = number.name.removeprefix("SIG")
    wait = "until [ $came ]; do sleep 0.05; done; sleep 0.3; exit 3"
    process = start("bash", "-c", f"trap 'came=1; echo {name}' {name}; echo up; {wait}")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"{name}\n", 3)


# What app.train does with an error, in a process of a group.
FAILING = """
import os, sys, time
from pathlib import Path
from app.errors import HangError, RecipeError, leave_with, let_the_first_be_seen
from app.environment.launched import errors_folder
from app.runs.failure import Recorder
rank = int(os.environ.get("RANK", "0"))
def fail(error):
    Recorder(errors_folder(os.environ)).record(error, rank=rank)
    if isinstance(error, RecipeError):
        leave_with(error, rank)
    let_the_first_be_seen(error, store_port=None)
    raise error
try:
    {0}
except Exception as error:
    fail(error)
time.sleep(60)
"""
WAITS = "import torch; torch.distributed.init_process_group('gloo'); torch.distributed.barrier(); "
COLLECTIVE = f"{WAITS}rank == 1 or torch.distributed.all_reduce(torch.ones(1)); "
BROKEN = "raise RecipeError('no such key\\n  train.step: did you mean train.steps?')"


def failing(
    tmp_path: Path, code: str, preset: str, processes: int, *, alone: bool = False
) -> tuple[int, list[str], ProcessFailure | None]:
    """Run `code` in every process, `alone` without `accelerate launch`; return the exit code, stderr, and what is recorded."""
    (tmp_path / "failing.py").write_text(FAILING.format(code))
    errors, topology = tmp_path / "errors" / "start", Topology(processes_per_node=processes, threads_per_process=1)
    command = accelerate_argv(topology, load(preset), [], module="failing")
    if alone:
        command = one_process_argv(topology, load(preset), [], {}, module="failing")
    found_code, _, err = ended("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}", *command, SAMERUN_ERRORS=str(errors))
    return found_code, err.replace(f" on {HOST}", " on here").splitlines(), first(errors)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        (f"{COLLECTIVE}{BROKEN}", 3,
         ["samerun: rank 1 on here ended with exit code 3, and the run with it:",
          "[rank 1 on here] RecipeError: no such key", "[rank 1 on here]   train.step: did you mean train.steps?"]),
        (f"{COLLECTIVE}os.kill(os.getpid(), 9)", 137,
         ["samerun: rank 1 on here was ended by SIGKILL, for example for lack of memory, and the run with it"]),
        ("Recorder(errors_folder(os.environ)).record(HangError('stuck'), rank=0) if rank == 0 else 1 / 0", 1,
         ["[rank 1 on here] ZeroDivisionError: division by zero"]),
    ],
    ids=["mistake", "killed", "hangs"],
)  # fmt: skip
def test_what_failed_first_comes_last(tmp_path: Path, how: str, code: int, last: list[str]) -> None:
    found_code, lines, _ = failing(tmp_path, how, "multi_gpu", 2)
    assert (found_code, lines[-len(last) :]) == (code, last), "\n".join(lines)


@pytest.mark.multiproc
def test_where_it_cannot_be_recorded_the_launchers_exit_code_is_known(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()
    code, lines, _ = failing(tmp_path, "1 / 0", "multi_gpu", 2)
    assert code == 1
    assert any("ZeroDivisionError: division by zero" in line for line in lines)


@pytest.mark.parametrize("alone", [False, True])
def test_one_process_is_as_many_are(tmp_path: Path, alone: bool) -> None:
    """By itself, Accelerate's launcher of one process ends with 1 whatever that did, and a traceback."""
    code, lines, found = failing(tmp_path, BROKEN, "cpu", 1, alone=alone)
    assert (code, lines) == (3, ["RecipeError: no such key", "  train.step: did you mean train.steps?"])
    assert found is not None
    assert as_shells_say(found.exit_code) == 3


SRUN = """\
1: [rank 1 on node2] step 1
0: samerun: preset multi_node
srun: error: node1: task 0: Exited with exit code 5
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node2: task 1: Exited with exit code 1
"""


@pytest.mark.parametrize(
    ("recorded", "output", "code", "last"),
    [
        (None, SRUN, 5, ["samerun: node1 ended with exit code 5, and the run with it"]),
        (ProcessFailure(host="node1", exit_code=5, error="TopologyError: port is 23456\n(--port) is in use"), SRUN, 5,
         ["samerun: node1 ended with exit code 5, and the run with it:", "[node1] TopologyError: port is 23456",
          "[node1] (--port) is in use"]),
        (ProcessFailure(host="node1", exit_code=1, rank=0, error="RuntimeError: Connection closed", is_consequence=True),
         f"{SRUN}srun: error: Node failure on node2\n", 1,
         ["samerun: node2 ended with exit code 1, and the run with it:", "[node2] Slurm reports that the node has failed"]),
    ],
)  # fmt: skip
def test_a_node_is_named_by_its_launcher_or_by_srun(
    tmp_path: Path, recorded: ProcessFailure | None, output: str, code: int, last: list[str]
) -> None:
    errors = tmp_path / "errors" / "start"
    if recorded:
        record(errors, recorded)
    found_code, _, err = ended("sh", "-c", f"printf %s {shlex.quote(output)} >&2; exit 143", SAMERUN_ERRORS=str(errors))
    assert (found_code, err) == (code, output + "".join(f"{line}\n" for line in last))


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [('{"exit_code": 1}', True), ("{", False), ('{"exit_code": "1"}', False), ('{"exit_code": 1, "color": 2}', False)],
)
def test_a_damaged_record_is_no_failure(tmp_path: Path, text: str, is_whole: bool) -> None:
    (tmp_path / "node-here.json").write_text(text)
    assert (first(tmp_path) is not None) == is_whole
