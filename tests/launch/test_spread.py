"""A list of hosts, and one command on each of them: the remote shell is a script that runs on this machine."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TopologyError
from launch.run_module import program
from launch.schedulers import detect, hosts
from launch.start import spread

ROOT = Path(hosts.__file__).parents[2]


# The list ------------------------------------------------------------------------------------------------------------------


def test_a_list_of_the_users_is_started_by_ssh():
    found = hosts.find({"SAMERUN_HOSTS": "a, b,c", "CUDA_VISIBLE_DEVICES": "0,1", "SAMERUN_HOST_SUFFIX": "i"})
    topology = found.topology
    assert (topology.hosts, topology.head_address, topology.port) == (("a", "b", "c"), "ai", 29500)
    assert (topology.processes_per_node, topology.origins["processes_per_node"]) == (2, "CUDA_VISIBLE_DEVICES=0,1")
    assert found.start == (*program("launch.start.spread"), "ssh", "SAMERUN_HOSTS=a,b,c", "SAMERUN_PORT=29500")


def test_the_first_of_the_hosts_can_be_asked_for():
    three = {"SAMERUN_HOSTS": "node1,node2,node3", "CUDA_VISIBLE_DEVICES": ""}
    found = detect.find(three, nodes=2)
    assert (found.topology.num_nodes, found.topology.hosts) == (2, ("node1", "node2"))
    assert found.topology.origins["num_nodes"] == "--nodes"
    assert "SAMERUN_HOSTS=node1,node2" in found.start
    assert detect.find(three, nodes=1).start == ()  # this is the first of them
    assert detect.find(three, nodes=3) == detect.find(three)


# What a host runs ----------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=20)


@given(
    starter=st.sampled_from(sorted(hosts.STARTERS)),
    folder=st.sampled_from([".", "a b", "it's", "$HOME", "a;b", "`x`"]),
    value=TEXTS,
)
def test_a_real_shell_gets_folder_variables_and_arguments_as_they_are(tmp_path_factory, starter, folder, value):
    """As PBS starts it: no shell around, another folder, a bare environment; ssh hands its arguments to a shell in one line."""
    project = tmp_path_factory.mktemp("job") / folder
    project.mkdir(exist_ok=True)
    argv = ["/bin/sh", "-c", 'printf "%s\\0" "$PWD" "$VALUE" "$PATH" "$MARK" "$@"; cat', "sh", value, "last"]
    variables = {"VALUE": value, "PATH": "/opt/x:/bin", "MARK": "x"}
    with spread.environment_files(variables, ["node1"], str(project)) as files:
        file = files["node1"]
        command = spread.host_command(starter, "node1", argv, folder=str(project), marks={"MARK": value}, file=file)
        own = command[command.index("node1") + 1 :]
        own = ["/bin/sh", "-c", " ".join(own)] if starter == "ssh" else own
        result = subprocess.run(own, env={"PATH": "/bin:/usr/bin"}, cwd="/", stdin=-3, capture_output=True, check=True)
        assert not file.parent.exists()  # the last who reads removes it
    assert result.stdout.decode().split("\0") == [str(project), value, "/opt/x:/bin", value, value, "last", ""]


def test_what_is_brought_along_and_what_is_not():
    kept = {"PATH": "/venv/bin", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "DATABASE_URL": "postgres://me:x@db", "MYSQL_PWD": "x"}
    left = ["BASH_FUNC_ml%%", "OMP_NUM_THREADS", "PBS_JOBID", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR",
            "SHELLOPTS"]  # fmt: skip
    assert spread.carried(kept | dict.fromkeys(left, "x")) == kept


def test_half_an_environment_starts_nothing(tmp_path):
    """The file may be on a disk that the host does not see, or not be whole there yet."""
    with spread.environment_files({"TOKEN": "x y"}, ["a"], str(tmp_path)) as files:
        text = files["a"].read_bytes()
    for half in (None, text[:-1]):
        if half is not None:
            (tmp_path / "text").write_bytes(half)
        command = ["/bin/bash", "-c", f"{spread.read_script(tmp_path / 'text')} && echo started"]
        result = subprocess.run(command, capture_output=True, check=False)
        assert (result.returncode, result.stdout) == (5, b"")
        assert result.stderr.decode().splitlines()[-1].startswith("samerun: TopologyError: ")
        assert b"x y" not in result.stderr


# Starting and ending -------------------------------------------------------------------------------------------------------


SECRETS = dict.fromkeys(
    ["DATABASE_URL", "HTTPS_PROXY", "MLFLOW_TRACKING_URI", "MYSQL_PWD", "GITHUB_PAT", "SLACK_WEBHOOK_URL", "HF_TOKEN"],
    "https://me:open-sesame@host",
)


@pytest.fixture
def begin(tmp_path):
    """Start a command on "hosts" of this machine by a stand-in of a remote shell: a bare environment, the root folder.

    A real one hands no ignored signals on either.
    """
    for starter in ("pbs_tmrsh", "ssh"):
        stand_in = tmp_path / starter
        stand_in.write_text("""#!/bin/bash
bare() { cd / && exec env -i --default-signal PATH=/bin:/usr/bin HOSTNAME="$host" "$@"; }
[ "$1" = -o ] && ssh=yes && shift 2
host=$1; shift
[ "$host" != "$SLOW" ] || sleep 1.5
[ -z "$ssh" ] || bare /bin/sh -c "$*"
bare "$@" < /dev/null
""")
        stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MINE": "a b", **SECRETS}
    marks = ["SAMERUN_HOSTS=n1,n2,n3", f"SAMERUN_PORT={os.getpid()}"]

    def run(script, *arguments, starter="pbs_tmrsh", parent=(), slow="", grace_s=2):
        call = "import os, sys; from launch.start.spread import main; "
        call += f"sys.exit(main(sys.argv[1:], os.environ, os.getcwd(), grace_s={grace_s}))"
        argv = [*parent, sys.executable, "-c", call, starter, *marks, "/bin/bash", "-c", script, "bash", *arguments]
        pipe = subprocess.PIPE
        variables = environment | {"SLOW": slow}
        begun.append(subprocess.Popen(argv, env=variables, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return begun[-1]

    begun = []
    yield run
    for process in begun:
        process.kill()
    mark = {"SAMERUN_PORT": str(os.getpid())}
    subprocess.run(["/bin/bash", "-c", spread.stop_script(mark, kill_after_s=0)], check=True)
    for process in begun:
        process.communicate()  # ends when nothing that was started is left to write


def test_secrets_reach_every_host_and_no_command_line(begin, tmp_path):
    """As `ps` would show it: all command lines of this machine, over and over while the hosts start, run and are signalled."""
    process = begin('trap "exit 1" USR1; echo "$MYSQL_PWD $GITHUB_PAT"; while :; do sleep 0.1; done', starter="ssh")
    lines, command_lines, signals = [], set(), [signal.SIGUSR1]
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    while process.poll() is None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                command_lines.add(path.read_bytes())
        if len(lines) == 3 and signals:
            process.send_signal(signals.pop())
    reader.join()
    assert lines == ["https://me:open-sesame@host https://me:open-sesame@host\n"] * 3
    assert len([line for line in command_lines if b"SAMERUN_NODE_RANK=" in line]) >= 3  # it was seen at work
    assert [line for line in command_lines if b"open-sesame" in line] == []
    assert list(tmp_path.glob(".samerun-start-*")) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(TopologyError, match=f"{nowhere}: No such file"), spread.environment_files({}, ["a"], nowhere):
        pass
    with spread.environment_files({}, ["a", "b"], str(tmp_path)) as files:
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (files["a"].parent, files["a"], files["b"])]
        assert modes == [0o700, 0o600, 0o600]


def test_the_exit_code_is_that_of_the_host_that_failed_and_the_others_end_by_themselves(begin, tmp_path):
    """Also one that begins later: else its last words would be of a file that it cannot read, and hide why the run ended."""
    show = 'echo "$SAMERUN_NODE_RANK $HOSTNAME $SAMERUN_HOSTS $MINE $PWD $1"'
    process = begin(f"[ $HOSTNAME = n2 ] && exit 42; sleep 1; {show}; exit 1", "x y", slow="n3", grace_s=15)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 42
    assert sorted(out.splitlines()) == [f"{rank} n{rank + 1} n1,n2,n3 a b {tmp_path} x y" for rank in (0, 2)]
    assert err == "samerun: n2 ended with exit code 42; ending the other hosts\n"
    assert list(tmp_path.glob(".samerun-start-*")) == []


def test_what_does_not_end_is_ended_with_all_its_processes(begin, tmp_path):
    """n1 ignores SIGTERM and has a child in a session of its own; n2 fails."""
    script = (
        'echo $$ >> "$1"; [ $HOSTNAME = n2 ] && exit 3; trap "" TERM; setsid sleep 300 & echo $! >> "$1"; sleep 300; sleep 300'
    )
    pids = tmp_path / "pids"
    process = begin(script, str(pids))
    process.communicate(timeout=15)
    assert process.returncode == 3
    numbers = [int(line) for line in pids.read_text().split()]
    assert len(numbers) == 5
    assert [number for number in numbers if is_running(number)] == []


@pytest.mark.parametrize(("starter", "number"), [("ssh", "TERM"), ("pbs_tmrsh", "INT"), ("pbs_tmrsh", "TERM")])
def test_a_signal_reaches_the_command_on_every_host_and_leaves_it_the_time_it_needs(begin, tmp_path, starter, number):
    """But not its children. n2 has saved immediately and ends with 1; the others take longer than the time after a failure.

    PBS sends SIGTERM to every process itself, so it is not passed on.
    """
    pids, sent = tmp_path / "pids", signal.Signals[f"SIG{number}"]
    trap = f'trap "[ $HOSTNAME = n2 ] || sleep 3; echo $HOSTNAME saved; kill %1 || echo child ended; exit 1" {number}'
    script = f'set -m; sleep 60 & {trap}; echo $$ >> "$1"; echo up; while :; do sleep 0.1; done'
    process = begin(script, str(pids), starter=starter)
    assert [process.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    if (starter, number) == ("pbs_tmrsh", "TERM"):
        for pid in pids.read_text().split():
            os.kill(int(pid), sent)
    process.send_signal(sent)
    out, _ = process.communicate(timeout=20)
    assert (sorted(out.splitlines()), process.returncode) == (["n1 saved", "n2 saved", "n3 saved"], 1)


def test_nothing_is_left_on_the_hosts_when_what_started_this_is_killed(begin, tmp_path):
    pids = tmp_path / "pids"
    process = begin(
        'echo $$ >> "$1"; echo up; sleep 300 & wait', str(pids), parent=("bash", "-c", '"$@" & echo $!; wait', "bash")
    )
    numbers = [int(process.stdout.readline())]
    assert [process.stdout.readline() for _ in range(3)] == ["up\n"] * 3
    numbers += map(int, pids.read_text().split())
    process.kill()
    deadline_s = time.monotonic() + 20
    while any(map(is_running, numbers)):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert len(numbers) == 4
    assert "the process that started this has ended; ending all hosts" in process.stderr.read()


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
