"""Passes the environment of a run, with its tokens and passwords, to the other hosts, hidden from other users.

It is a line of bash, for its input or in a file of mode 0600 in a folder of mode 0700 that only this start uses. The host
removes the file when it has read it. So no value is on a command line, which everybody can read on both hosts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.errors import TopologyError

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
