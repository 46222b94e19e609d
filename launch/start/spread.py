"""Start one command on every host of a job, with the run's environment, and end them all when one fails.

    python -m launch.start.spread STARTER SAMERUN_HOSTS=HOST,HOST,... SAMERUN_PORT=PORT [NAME=VALUE ...] COMMAND...

STARTER is what reaches a host, one of `hosts.STARTERS`. What it starts has neither the environment nor the folder of this
process. Folder, command, these variables and its SAMERUN_NODE_RANK are on the command line of every host, where everybody can
read them. The environment is not: it is a line of bash in a file of mode 0600 for each host, in a folder of mode 0700 that only
this start uses. The host removes its file when it has read it.

The exit code is the first failed host's. The others have some seconds then to end by themselves; then each is
stopped on its host, since a remote shell may die and leave its command running, or wait for ever for a host that is gone. The
same happens when the process that started this is gone.

SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the command on every host, which then has all the time it
needs, to save for instance. PBS sends SIGTERM to every process itself, so it is not sent again.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from app.errors import TopologyError
from launch.run_module import as_shells_say
from launch.schedulers import hosts

# What belongs to the host it was set on, or is set anew on every host by its batch system or its shell.
_STAYS = re.compile(
    r"PBS_.*|LSB_.*|NCPUS|QUEUE|ENVIRONMENT|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|"
    r"CUDA_DEVICE_ORDER|HOST|HOSTNAME|TMP|TMPDIR|PWD|OLDPWD|SHLVL|TERM|_|SSH_.*|DISPLAY|XDG_.*|DBUS_.*|"
    r"BASHOPTS|SHELLOPTS|BASH_ENV|UID|EUID|PPID"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # bash exports functions under other names


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a batch script that its remote commands must bring along, by name.

    Left out is what belongs to one host or its batch system: a scheduler's variables, TMPDIR, the visible devices, the number
    of threads.
    """
    names = sorted(name for name in environment if _NAME.fullmatch(name))
    return {name: environment[name] for name in names if not _STAYS.fullmatch(name)}


@contextmanager
def environment_files(variables: Mapping[str, str], names: Sequence[str], folder: str) -> Iterator[dict[str, Path]]:
    """Yield a file with the variables for each host, in a folder of its own in `folder`; nothing is left behind.

    A file ends with a zero byte, so that half of it is noticed. Raises TopologyError if it cannot be written.
    """
    exported = "".join(f" {name}={shlex.quote(value)}" for name, value in variables.items())
    text = os.fsencode(f"export{exported}" if exported else "true") + b"\0"
    with ExitStack() as stack:
        try:
            # The hosts have removed it already where all went well.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".samerun-start-", dir=folder)))
            files = {host: place / str(number) for number, host in enumerate(names)}
            for file in files.values():
                file.touch(0o600)
                file.write_bytes(text)
        except OSError as error:
            raise TopologyError(
                f"the environment of the run cannot be passed to the hosts in a file ({folder}: {error.strerror}): start in a "
                "folder that you can write and all hosts can read"
            ) from error
        yield files


def read_script(file: Path) -> str:
    """Return commands of bash that set the variables of a file and remove it; without them they end."""
    quoted, folder = shlex.quote(str(file)), shlex.quote(str(file.parent))
    what = f"{file}, which contains the environment of the run, cannot be read here: start in a folder that all hosts can read"
    refuse = f"{{ echo 'samerun: TopologyError:' \"$HOSTNAME:\" {shlex.quote(what)} >&2; exit {TopologyError.exit_code}; }}"
    # The last host to read removes the folder.
    remove = f"rm -f {quoted}; rmdir {folder} 2> /dev/null"
    return f"{{ IFS= read -r -d '' samerun_told < {quoted} || {refuse}; }} && {{ {remove}; eval \"$samerun_told\"; }}"


_LOOK_EVERY_S = 0.2


def main(arguments: Sequence[str], environment: Mapping[str, str], folder: str, *, grace_s: float = 5.0) -> int:
    """Run the command of `arguments` on its hosts, in `folder` with `environment`; return the first bad exit code, else 0.

    After a failure, the others have `grace_s` seconds to end by themselves, and as many from SIGTERM to SIGKILL.
    """
    starter, *rest = arguments
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, rest))
    argv = rest[len(variables) :]
    names = variables[hosts.HOSTS].split(",")
    own = {host: {**variables, hosts.NODE_RANK: str(rank)} for rank, host in enumerate(names)}
    signals: list[int] = []
    parent = os.getppid()

    def pass_on(number: int, _frame: object) -> None:
        signals.append(number)
        if starter != "pbs_tmrsh" or number != signal.SIGTERM:
            for host in names:
                _start(host_starter(starter, host, signal_script(own[host], number)))

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    # Ignored in what is started from here on: a starter that dies of a signal to the whole job cannot tell how its host ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Until all have ended: a host may be slow to begin, and read its file after another has failed.
    with environment_files(carried(environment), names, folder) as files:
        started = {
            host: _start(host_command(starter, host, argv, folder=folder, marks=own[host], file=files[host])) for host in names
        }
        signal.signal(signal.SIGTERM, pass_on)
        while True:
            codes = {host: process.poll() for host, process in started.items()}
            failed = next((host for host, code in codes.items() if code), None)
            is_lost = os.getppid() != parent
            if failed is not None or is_lost or None not in codes.values():
                break
            time.sleep(_LOOK_EVERY_S)
        if failed is None and not is_lost:
            return 0
        code = started[failed].returncode if failed else 1
        what = f"{failed} ended with exit code {code}" if failed else "the process that started this has ended"
        with suppress(OSError):  # stderr may be gone
            os.write(2, f"samerun: {what}; ending {'the other' if failed else 'all'} hosts\n".encode())
        left = _still_running(started, seconds=0 if is_lost else math.inf if signals else grace_s)
        scripts = {host: stop_script(own[host], kill_after_s=grace_s) for host in left}
        _stop([host_starter(starter, host, script) for host, script in scripts.items()], seconds=grace_s + 5)
        for host in left:
            started[host].kill()
    return as_shells_say(code)  # a starter that was killed itself: -9 is 137, as in a shell


def host_command(
    starter: str, host: str, argv: Sequence[str], *, folder: str, marks: Mapping[str, str], file: Path
) -> list[str]:
    """Return the arguments that run `argv` on `host` in `folder`, with the variables `marks` and the variables in the file.

    `starter` is a key of `hosts.STARTERS`; `argv` begins with an absolute path, as PBS's own PATH on a host is next to nothing.
    """
    exported = "".join(f" {name}={shlex.quote(value)}" for name, value in marks.items())
    parts = [read_script(file), f"cd {shlex.quote(folder)}", f"export{exported}", f"exec {shlex.join(argv)} < /dev/null"]
    return host_starter(starter, host, " && ".join(parts))


def host_starter(starter: str, host: str, script: str) -> list[str]:
    """Return the arguments that run a script of bash on `host`."""
    words = [word.format(host=host) for word in hosts.STARTERS[starter]]
    return [*words, shlex.join(["/bin/bash", "-c", script])] if starter == "ssh" else [*words, "/bin/bash", "-c", script]


def stop_script(marks: Mapping[str, str], *, kill_after_s: float) -> str:
    """Return a script of bash that sends SIGTERM to every process with these variables in its environment, then SIGKILL to
    those that are left after some seconds.

    So it finds those whose parent is gone, and needs no file with a number that may have become another process's.
    """
    find, stop = f"find() {{ {_find(marks)}; }}", 'stop() { find; [ -z "$pids" ] || kill -s "$1" $pids 2>/dev/null; }'
    looks = math.ceil(kill_after_s / _LOOK_EVERY_S)
    wait = f'for ((look = 0; look < {looks}; look++)); do find; [ -z "$pids" ] && break; sleep {_LOOK_EVERY_S}; done'
    return f"{find}; {stop}; stop TERM; {wait}; stop KILL; true"


def signal_script(marks: Mapping[str, str], number: int) -> str:
    """Return a script of bash that sends a signal to the first process with these variables: to none that it started."""
    parent = "parent=$(sed -n 's/^PPid:[[:space:]]*//p' \"/proc/$pid/status\")"
    send = f'grep -qx "$parent" <<< "$pids" || kill -s {signal.Signals(number).name} "$pid"'
    return f"{{ {_find(marks)}; for pid in $pids; do {parent}; {send}; done; }} 2>/dev/null; true"


def _find(marks: Mapping[str, str]) -> str:
    """Commands that put the ids of all processes with these variables into `pids`, one a line."""
    files = "/proc/[0-9]*/environ"
    for name, value in marks.items():
        files = f"$(grep -lszxF {shlex.quote(f'{name}={value}')} {files} /dev/null)"
    return f'pids=$(for file in {files}; do file=${{file#/proc/}}; echo "${{file%/environ}}"; done)'


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own: Ctrl-C is for this process."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _still_running(started: Mapping[str, subprocess.Popen[bytes]], *, seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    left = list(started)
    while left and time.monotonic() < end:
        left = [host for host in left if started[host].poll() is None]
        time.sleep(_LOOK_EVERY_S)
    return left


def _stop(commands: Iterable[Sequence[str]], *, seconds: float) -> None:
    """Run the commands together, and give up on hosts that do not answer."""
    running = [_start(command) for command in commands]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(timeout=max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:  # the host is gone
            process.kill()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ, os.getcwd()))  # noqa: PTH109 - a string is what is passed on
    except TopologyError as error:
        sys.stderr.write(f"samerun: TopologyError: {error}\n")
        sys.exit(error.exit_code)
