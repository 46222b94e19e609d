"""A run watched from outside: its signals, its exit code, and the last words of what failed first."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment

from app.environment.topology import Topology
from launch import one_process
from launch.node_command import accelerate_argv
from launch.preset import load

WATCHED = """
import os, sys
from launch.start import signals, supervise
sys.exit(supervise.run(sys.argv[1:], os.environ, pass_on=signals.to_itself, watched=True).exit_code)
"""


def start(*command: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", WATCHED, *command]
    return subprocess.Popen(argv, env=clean_environment(), cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def ended(*command: str) -> tuple[int, str, str]:
    process = start(*command)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 7])
def test_exit_code_and_both_streams_are_the_commands(code):
    assert ended("sh", "-c", f"echo out; printf 'half a line' >&2; exit {code}") == (code, "out\n", "half a line")


def test_death_by_a_signal_is_said_as_shells_do():
    assert ended("sh", "-c", "kill -KILL $$")[0] == 137


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_the_commands_and_arrive_once(number):
    """Also those that a terminal says to the whole group: the command is in a session of its own."""
    name = number.name.removeprefix("SIG")
    wait = "until [ $came ]; do sleep 0.05; done; sleep 0.3; exit 3"
    process = start("bash", "-c", f"trap 'came=1; echo {name}' {name}; echo up; {wait}")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == (f"{name}\n", 3)


FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("before", file=sys.stderr, flush=True)
    {how}
time.sleep(60)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("sys.exit('RecipeError: no such key\\n  train.step: did you mean train.steps?')", 1,
         ["samerun: rank 1 on here ended with exit code 1, and the run with it:",
          "[rank 1 on here] RecipeError: no such key", "[rank 1 on here]   train.step: did you mean train.steps?"]),
        ("os._exit(6)", 6, ["samerun: rank 1 on here ended with exit code 6, and the run with it"]),
        ("os.kill(os.getpid(), 9)", 137,
         ["samerun: rank 1 on here was ended by SIGKILL, for example for lack of memory, and the run with it"]),
    ],
)  # fmt: skip
def test_the_last_words_of_what_failed_first_come_last(tmp_path: Path, how: str, code: int, last: list[str]) -> None:
    """By the very launcher that a node has."""
    (tmp_path / "failing.py").write_text(FAILING.format(how=how))
    here = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    topology = Topology(processes_per_node=2, hosts=(here,))
    command = accelerate_argv(topology, load("multi_gpu"), [], module="failing")
    found_code, _, err = ended("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}", *command)
    lines = [line.replace(f" on {here}", " on here") for line in err.splitlines()]
    assert lines[-len(last) :] == last, shlex.join(command) + err
    assert found_code == code


ON_ONE_MACHINE = """
import os, sys, time
import torch
from app.errors import RecipeError, leave_with
torch.distributed.init_process_group('gloo')
if os.environ["RANK"] == "{rank}":
    {how}
time.sleep(60)
"""


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("rank", "how", "code", "last"),
    [
        (0, "print('W1122 07:37:30.888000 29903 torch/distributed/run.py:982] Setting OMP_NUM_THREADS', file=sys.stderr); "
            "leave_with(RecipeError('no such key'), rank=0)", 3,
         ["samerun: rank 0 on localhost ended with exit code 3, and the run with it:",
          "[rank 0 on localhost] RecipeError: no such key"]),
        (1, "1 / 0", 1,
         ["[rank 1 on localhost] ZeroDivisionError: division by zero"]),
        (0, "print('RecipeError: of old', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", 137,
         ["samerun: rank 0 on localhost was ended by SIGKILL, for example for lack of memory, and the run with it"]),
    ],
)  # fmt: skip
def test_last_words_come_last_on_one_machine_too(tmp_path: Path, rank: int, how: str, code: int, last: list[str]) -> None:
    """Whose processes write to the terminal themselves, so that nothing says whose a line is."""
    (tmp_path / "failing.py").write_text(ON_ONE_MACHINE.format(rank=rank, how=how))
    command = accelerate_argv(Topology(processes_per_node=2), load("multi_gpu"), [], module="failing")
    found_code, _, err = ended("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}", *command)
    assert err.splitlines()[-len(last) :] == last, err
    assert found_code == code


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("leave_with(RecipeError('no such key'), rank=0)", 3, "RecipeError: no such key\n"),
        ("os.kill(os.getpid(), 9)", 137,
         "samerun: the process that trains was ended by SIGKILL, for example for lack of memory, and the run with it\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("alone", [False, True])
def test_one_process_is_as_many_are(tmp_path: Path, how: str, code: int, said: str, alone: bool) -> None:
    """By itself, Accelerate's launcher of one process ends with 1 whatever that did, and a traceback."""
    (tmp_path / "failing.py").write_text(f"import os; from app.errors import RecipeError, leave_with; {how}")
    command = accelerate_argv(Topology(threads_per_process=1), load("cpu"), [], module="failing")
    if alone:
        command = one_process.argv(Topology(threads_per_process=1), load("cpu"), [], {}, module="failing")
    found_code, _, err = ended("env", f"PYTHONPATH={tmp_path}:{REPOSITORY}", *command)
    assert (found_code, err) == (code, said)


SRUN = """\
1: [rank 1 on node2] step 1
0: samerun: preset multi_node
0: samerun: TopologyError: port is 23456
0: (--port) is in use
srun: error: node1: task 0: Exited with exit code 5
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node2: task 1: Exited with exit code 1
"""


def test_a_launcher_that_failed_itself_is_named_with_its_sentence():
    code, _, err = ended("sh", "-c", f"printf %s {shlex.quote(SRUN)} >&2; exit 143")
    assert code == 5
    assert err == SRUN + (
        "samerun: node1 ended with exit code 5, and the run with it:\n"
        "[node1] samerun: TopologyError: port is 23456\n"
        "[node1] (--port) is in use\n"
    )
