"""A run supervised from outside: its signals, its exit code, and the failure that ended it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment

from app.environment.topology import Topology
from app.runs.run_folder import ProcessFailure, first_failure, record_failure
from launch.node_command import accelerate_argv, one_process_argv
from launch.preset import load
from launch.run_module import as_shells_say

HOST = socket.gethostname()
SUPERVISED = """
import os, sys
from app.environment.launched import errors_folder
from launch.start import supervise
errors = errors_folder(os.environ)
sys.exit(supervise.run(sys.argv[1:], os.environ, errors=errors, resume="samerun launch").exit_code)
"""


def start(*command: str, **variables: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", SUPERVISED, *command]
    environment = clean_environment() | variables
    return subprocess.Popen(argv, env=environment, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def ended(*command: str, **variables: str) -> tuple[int, str, str]:
    process = start(*command, **variables)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM])
def test_signals_are_the_commands_and_arrive_once(number):
    """Also those that a terminal sends to the whole group: the command is in a session of its own."""
    name = number.name.removeprefix("SIG")
    wait = "until [ $came ]; do sleep 0.05; done; sleep 0.3; exit 3"
    process = start("bash", "-c", f"trap 'came=1; echo {name}' {name}; echo up; {wait}")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"{name}\n", 3)
    stopping = "samerun: got SIGTERM: the run saves a checkpoint and stops. If the log ends here, resume it: samerun launch\n"
    assert err == (stopping if number == signal.SIGTERM else "")


# What app.train does with an error, in a process of a group.
FAILING = """
import os, sys, time
from pathlib import Path
from app.errors import HangError, RecipeError, is_of_a_lost_peer, leave_with
from app.environment.launched import errors_folder
from app.runs.run_folder import Recorder
rank = int(os.environ.get("RANK", "0"))
def fail(error):
    Recorder(errors_folder(os.environ)).record(error, rank=rank)
    if isinstance(error, RecipeError):
        leave_with(error, rank)
    time.sleep(10.0 * is_of_a_lost_peer(error))
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


def failing(tmp_path: Path, code: str, preset: str, *, alone: bool = False) -> tuple[int, list[str], ProcessFailure | None]:
    """Run `code` in every process, `alone` without `accelerate launch`; return the exit code, stderr, and what is recorded."""
    (tmp_path / "failing.py").write_text(FAILING.format(code))
    errors = tmp_path / "errors" / "start"
    topology = Topology(processes_per_node=1 if preset == "cpu" else 2, threads_per_process=1)
    command = accelerate_argv(topology, load(preset), [], module="failing")
    if alone:
        command = one_process_argv(topology, load(preset), [], {}, module="failing")
    found_code, _, err = ended("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}", *command, SAMERUN_ERRORS=str(errors))
    return found_code, err.replace(f" on {HOST}", " on here").splitlines(), first_failure(errors)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        (f"{COLLECTIVE}{BROKEN}", 3,
         ["samerun: rank 1 on here ended with exit code 3, and the run with it:",
          "[rank 1 on here] RecipeError: no such key", "[rank 1 on here]   train.step: did you mean train.steps?"]),
        (f"{COLLECTIVE}os.kill(os.getpid(), 9)", 137,
         ["samerun: rank 1 on here was ended by SIGKILL, possibly out of memory, and the run with it"]),
        ("Recorder(errors_folder(os.environ)).record(HangError('stuck'), rank=0) if rank == 0 else 1 / 0", 1,
         ["[rank 1 on here] ZeroDivisionError: division by zero"]),
    ],
    ids=["mistake", "killed", "hangs"],
)  # fmt: skip
def test_what_failed_first_comes_last(tmp_path: Path, how: str, code: int, last: list[str]) -> None:
    found_code, lines, _ = failing(tmp_path, how, "multi_gpu")
    assert (found_code, lines[-len(last) :]) == (code, last), "\n".join(lines)


@pytest.mark.multiproc
def test_where_it_cannot_be_recorded_the_launchers_exit_code_is_known(tmp_path: Path) -> None:
    (tmp_path / "errors").touch()
    code, lines, _ = failing(tmp_path, "1 / 0", "multi_gpu")
    assert code == 1
    assert any("ZeroDivisionError: division by zero" in line for line in lines)


@pytest.mark.parametrize("alone", [False, True])
def test_one_process_is_as_many_are(tmp_path: Path, alone: bool) -> None:
    """By itself, Accelerate's launcher of one process ends with 1 whatever that did, and a traceback."""
    code, lines, found = failing(tmp_path, BROKEN, "cpu", alone=alone)
    text = ["RecipeError: no such key", "  train.step: did you mean train.steps?"]
    own = [f"samerun: {text[0]}", text[1]]
    repeated = [
        "samerun: rank 0 on here ended with exit code 3, and the run with it:",
        *(f"[rank 0 on here] {line}" for line in text),
    ]
    assert (code, lines) == (3, own if alone else [*own, *repeated])
    assert found is not None
    assert as_shells_say(found.exit_code) == 3


def test_the_failure_that_a_node_recorded_comes_last(tmp_path: Path) -> None:
    """As for srun, which ends with the exit code of another task."""
    errors = tmp_path / "errors" / "start"
    record_failure(errors, ProcessFailure(host="node1", exit_code=5, error="TopologyError: port is 23456\n(--port) is in use"))
    last = ("samerun: node1 ended with exit code 5, and the run with it:", "[node1] TopologyError: port is 23456",
            "[node1] (--port) is in use")  # fmt: skip
    assert ended("sh", "-c", "exit 143", SAMERUN_ERRORS=str(errors)) == (5, "", "".join(f"{line}\n" for line in last))


def test_a_starter_that_another_host_ended_is_not_named(tmp_path: Path) -> None:
    sentence = "samerun: a process was ended by SIGKILL, possibly out of memory, and the run with it\n"
    assert ended("sh", "-c", "exit 137", SAMERUN_ERRORS=str(tmp_path / "start")) == (137, "", sentence)


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [('{"exit_code": 1}', True), ("{", False), ('{"exit_code": 1, "color": 2}', False)],
)
def test_a_damaged_record_is_no_failure(tmp_path: Path, text: str, is_whole: bool) -> None:
    (tmp_path / "node-here.json").write_text(text)
    assert (first_failure(tmp_path) is not None) == is_whole
