"""Start one command on every host of a job, with the run's environment, and end them all when one fails.

python -m launch.start.spread STARTER SAMERUN_HOSTS=HOST,HOST,... SAMERUN_PORT=PORT [NAME=VALUE ...] COMMAND...

STARTER is what reaches a host, one of `hosts.STARTERS`. Something started so has neither the environment nor the folder of
this process. Folder, command, these variables and its SAMERUN_NODE_RANK are on the command line of every host, where everybody
can read them; the environment is handed over unseen as a line of bash: to ssh by its input, to the others in a
file of mode 0600 in a folder of mode 0700 that only this start uses. The host removes the file when it has read it.

The exit code is that of the host that failed first. The others have some seconds then to end by themselves; what is left is
stopped on its host, since a remote shell may die and leave its command running, or wait for ever for a host that is gone. So
it is when what started this process is gone.

SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the command on every host, which then has all the time it
needs, to save for instance. PBS says SIGTERM to every process itself, so it is not said again.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from app.errors import TopologyError
from launch.run_module import as_shells_say
from launch.schedulers import hosts

# What belongs to the host it was set on, or is set anew on every host by its batch system or its shell.
_STAYS = re.compile(
    r"PBS_.*|NCPUS|QUEUE|ENVIRONMENT|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|"
    r"CUDA_DEVICE_ORDER|HOST|HOSTNAME|TMP|TMPDIR|PWD|OLDPWD|SHLVL|TERM|_|SSH_.*|DISPLAY|XDG_.*|DBUS_.*|"
    r"BASHOPTS|SHELLOPTS|BASH_ENV|UID|EUID|PPID"
)
_UNWRITABLE = (
    "the environment of the run cannot be passed to the hosts in a file ({why}): start in a folder that you "
    "can write and all hosts can read"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # bash exports functions under other names


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a batch script that its remote commands must bring along, by name.

    Left out is what belongs to one host or its batch system: a scheduler's variables, TMPDIR, the visible devices, the number
    of threads.
    """
    names = sorted(name for name in environment if _NAME.fullmatch(name))
    return {name: environment[name] for name in names if not _STAYS.fullmatch(name)}


def line(variables: Mapping[str, str]) -> bytes:
    """Return what `script` reads. It ends with a zero byte, so that half of it is noticed."""
    exported = "".join(f" {name}={shlex.quote(value)}" for name, value in variables.items())
    return os.fsencode(f"export{exported}" if exported else "true") + b"\0"


def script(file: Path | None) -> str:
    """Return commands of bash that set the variables that their input holds, or the file; without them they end."""
    source, remove, where = "", "", "the connection closed before this host received its environment"
    if file is not None:
        quoted, folder = shlex.quote(str(file)), shlex.quote(str(file.parent))
        # The last host to read removes the folder.
        source, remove = f" < {quoted}", f"rm -f {quoted}; rmdir {folder} 2> /dev/null; "
        where = (
            f"{file}, which contains the environment of the run, cannot be read here: start in a folder that all hosts can read"
        )
    refuse = f"{{ echo 'samerun: TopologyError:' \"$HOSTNAME:\" {shlex.quote(where)} >&2; exit {TopologyError.exit_code}; }}"
    return f"{{ IFS= read -r -d '' samerun_told{source} || {refuse}; }} && {{ {remove}eval \"$samerun_told\"; }}"


def as_input(text: bytes) -> IO[bytes]:
    """Return an open file without a name that holds the text: a host that does not read it keeps nobody waiting."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - whoever asked closes it
    file.write(text)
    file.seek(0)
    return file


@contextmanager
def in_files(text: bytes, hosts: Sequence[str], folders: Sequence[Path]) -> Iterator[dict[str, Path]]:
    """Yield a file with the text for each host, in the first of the folders that can be written; none is left behind.

    Raises TopologyError if none can be.
    """
    whys = []
    for folder in folders:
        try:
            place = Path(tempfile.mkdtemp(prefix=".samerun-start-", dir=folder))
        except OSError as error:
            whys.append(f"{folder}: {error.strerror}")
            continue
        break
    else:
        raise TopologyError(_UNWRITABLE.format(why="; ".join(whys)))
    try:
        yield _written(text, {host: place / str(number) for number, host in enumerate(hosts)})
    finally:
        shutil.rmtree(place, ignore_errors=True)  # the hosts have done so already where all went well


def _written(text: bytes, files: dict[str, Path]) -> dict[str, Path]:
    try:
        for file in files.values():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
                opened.write(text)
    except OSError as error:
        raise TopologyError(_UNWRITABLE.format(why=f"{file}: {error.strerror}")) from error
    return files


_LOOK_EVERY_S = 0.2


def main(arguments: Sequence[str], environment: Mapping[str, str], folder: str, *, grace_s: float = 5.0) -> int:
    """Run the command of `arguments` on its hosts, in `folder` with `environment`; return the first bad exit code, else 0.

    After a failure, the others have `grace_s` seconds to end by themselves, and as many from SIGTERM to SIGKILL.
    """
    starter, told, argv = _parse(arguments)
    names = told[hosts.HOSTS].split(",")
    own = {host: {**told, hosts.NODE_RANK: str(rank)} for rank, host in enumerate(names)}
    asked_to_end: list[int] = []
    parent = os.getppid()

    def is_lost() -> bool:
        return os.getppid() != parent

    def pass_on(number: int, _frame: object) -> None:
        asked_to_end.append(number)
        if starter != "pbs_tmrsh" or number != signal.SIGTERM:
            for host in names:
                _start(host_starter(starter, host, signal_script(own[host], number)))

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    # Ignored in what is started from here on: a starter that dies of a signal to the whole job cannot tell how its host ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text = line(carried(environment))
    with ExitStack() as stack:  # until all have ended: a host may be slow to begin, and read its file after another has failed
        files: Mapping[str, Path] = {}
        if starter not in hosts.WITH_INPUT:
            places = dict.fromkeys((Path(folder), Path(environment.get("HOME", folder))))
            files = stack.enter_context(in_files(text, names, list(places)))
        started = {}
        for host in names:
            command = host_command(starter, host, argv, folder=folder, marks=own[host], file=files.get(host))
            started[host] = _start(command, text=None if files else text)
        signal.signal(signal.SIGTERM, pass_on)
        failed = _first_failure(started, until=is_lost)
        if failed is None and not is_lost():
            return 0
        code = started[failed].returncode if failed else 1
        what = (
            f"{failed} ended with exit code {code}; ending the other"
            if failed
            else "the process that started this has ended; ending all"
        )
        with suppress(OSError):  # nobody may be left to hear it
            os.write(2, f"samerun: {what} hosts\n".encode())
        left = _still_running(started, seconds=0 if is_lost() else math.inf if asked_to_end else grace_s)
        scripts = {host: stop_script(own[host], kill_after_s=grace_s) for host in left}
        _stop([host_starter(starter, host, script) for host, script in scripts.items()], seconds=grace_s + 5)
        for host in left:
            started[host].kill()
    return as_shells_say(code)  # a starter that was killed itself: -9 is 137, as a shell says it


def host_command(
    starter: str, host: str, argv: Sequence[str], *, folder: str, marks: Mapping[str, str], file: Path | None = None
) -> list[str]:
    """Return the arguments that run `argv` on `host` in `folder`, with the variables `marks` and those handed over.

    `starter` is a key of `hosts.STARTERS`; `argv` begins with an absolute path, as PBS's own PATH on a host is next to nothing.
    The others come by its input, or the `file`.
    """
    exported = "".join(f" {name}={shlex.quote(value)}" for name, value in marks.items())
    parts = [script(file), f"cd {shlex.quote(folder)}", f"export{exported}", f"exec {shlex.join(argv)} < /dev/null"]
    return host_starter(starter, host, " && ".join(parts))


def host_starter(starter: str, host: str, script: str) -> list[str]:
    """Return the arguments that run a script of bash on `host`."""
    words = [word.format(host=host) for word in hosts.STARTERS[starter]]
    return [*words, shlex.join(["/bin/bash", "-c", script])] if starter == "ssh" else [*words, "/bin/bash", "-c", script]


def stop_script(marks: Mapping[str, str], *, kill_after_s: float) -> str:
    """Return a script of bash that says SIGTERM to every process with these variables in its environment, then SIGKILL to
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


def _parse(arguments: Sequence[str]) -> tuple[str, dict[str, str], list[str]]:
    """The starter, the variables, and the command, which begins with the first word that is no variable."""
    starter, *rest = arguments
    told = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, rest))
    return starter, told, rest[len(told) :]


def _start(command: Sequence[str], *, text: bytes | None = None) -> subprocess.Popen[bytes]:
    """With this text as its input, in a session of its own: Ctrl-C is for this process."""
    with as_input(text or b"") as stdin:
        return subprocess.Popen(command, stdin=stdin, start_new_session=True)


def _first_failure(started: Mapping[str, subprocess.Popen[bytes]], *, until: Callable[[], bool]) -> str | None:
    """Wait until one host fails, and return it, or until all have ended well, or that."""
    while True:
        codes = {host: process.poll() for host, process in started.items()}
        failed = next((host for host, code in codes.items() if code), None)
        if failed is not None or None not in codes.values() or until():
            return failed
        time.sleep(_LOOK_EVERY_S)


def _still_running(started: Mapping[str, subprocess.Popen[bytes]], *, seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    left = list(started)
    while left and time.monotonic() < end:
        left = [host for host in left if started[host].poll() is None]
        time.sleep(_LOOK_EVERY_S)
    return left


def _stop(commands: Iterable[Sequence[str]], *, seconds: float) -> None:
    """Run the commands all at once, and give up on hosts that do not answer."""
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
