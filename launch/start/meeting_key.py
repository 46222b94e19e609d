"""The key of a run: 128 random bits that its nodes share, to recognise each other when they meet (`meeting.py`).

`samerun launch` and `samerun doctor` make one whenever they start something on several nodes, and hand it over in the
environment, which nobody but the same user can read. The tasks of an `srun samerun launch` have no parent of ours: the first of
them makes a file of mode 0600 in the run folder, which all nodes see, and node 0 removes it when they have met.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app.errors import RunFolderError, TopologyError

KEY = "SAMERUN_MEETING_KEY"
"""Variable: the key, 32 hexadecimal digits. A user who starts every node by hand may set one, `openssl rand -hex 16`."""
GREETING = "samerun-meeting"
"""First word that both sides of a visit to node 0 say (`visitors.py`)."""
_FORM = re.compile(r"[0-9a-f]{32}")
_WRITTEN_WITHIN_S = 5.0
"""Longest time between a file's appearance and its content's."""


@dataclass(frozen=True)
class Key:
    """A key, and where it is from."""

    secret: bytes = field(repr=False)
    origin: str
    """For messages: `SAMERUN_MEETING_KEY`, or the file."""
    file: Path | None = None
    """To be removed when the nodes have met."""

    def remove_file(self) -> None:
        """Remove what nobody has to read any more."""
        if self.file is not None:
            with suppress(OSError):  # it holds nothing that another start could not use
                self.file.unlink(missing_ok=True)


Sign = Callable[..., str]
"""Returns what only somebody with the key can know: the HMAC of these words, for one visit."""


def signer(secret: bytes, node_number: str, head_number: str) -> Sign:
    """Return what signs in the visit for which both sides have drawn these numbers."""

    def sign(*words: str) -> str:
        return hmac.new(secret, "\n".join((node_number, head_number, *words)).encode(), hashlib.sha256).hexdigest()

    return sign


def is_proof(proof: str, expected: str) -> bool:
    """Compare what was sent with what `Sign` returned, in a time that tells nothing of it."""
    return hmac.compare_digest(proof.encode(), expected.encode())


def new() -> dict[str, str]:
    """Return the variable with a new key, for the environment of what is started on the nodes."""
    return {KEY: secrets.token_hex(16)}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the key, for what does not meet."""
    return {name: value for name, value in environment.items() if name != KEY}


def find(environment: Mapping[str, str], run_dir: str | None, job: str) -> Key:
    """Return the key of the environment, or else that of the job in the run folder, made now unless another node has.

    Raises TopologyError where there is none, and RunFolderError where its file cannot be made or trusted.
    """
    if KEY in environment:
        if not _FORM.fullmatch(environment[KEY]):
            raise TopologyError(f"{KEY} has {len(environment[KEY])} characters: it must be 32 hexadecimal digits, 0-9 and a-f")
        return Key(environment[KEY].encode(), KEY)
    if run_dir is None:
        raise TopologyError(
            "the nodes of this run have no shared key: give all nodes the same --run-dir, in a folder that "
            f"all can read, or the same {KEY} (`openssl rand -hex 16`)"
        )
    file = Path(run_dir) / f".meeting-{job}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        secret = _made(file) or _read(file)
    except OSError as error:
        raise RunFolderError(
            f"{file}, the shared key of the nodes of this run, cannot be created or read ({error.strerror}): "
            "choose another --run-dir, or let `samerun launch` call srun itself"
        ) from error
    return Key(secret, str(file), file)


def _made(file: Path) -> bytes | None:
    """Make the file and return its key; None where another node has made it. NFS keeps O_EXCL's promise as well."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    with os.fdopen(descriptor, "wb") as opened:
        secret = secrets.token_hex(16).encode()
        opened.write(secret)
    return secret


def _read(file: Path) -> bytes:
    """Return the key of a file that another node has made just now. Raises OSError, and RunFolderError for anybody else's."""
    end_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        # A link is not followed, and a pipe not waited for.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            status, text = os.fstat(opened.fileno()), opened.read(100)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RunFolderError(
                f"{file} is not a file that only you can read and write ({stat.filemode(status.st_mode)}, of user "
                f"{status.st_uid}): somebody else may have put it there. Remove it, and choose a --run-dir of your own"
            )
        if _FORM.fullmatch(text.decode(errors="replace")):
            return text
        if time.monotonic() > end_s:
            raise RunFolderError(f"{file} does not contain a key: remove it and start again")
        time.sleep(0.1)
