"""Finished parts of a tokenization: one complete folder each, so that a killed command resumes from them.

tokens      uint16 or uint32, those of all documents one after another
documents   uint64 [D, 2]: tokens and bytes of text of each
counted     bool [N], only where not all tokens count
about.json  SHA-256 of each file, and what was left out
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app.data.turns import NO_LOCKS
from app.errors import DataError
from app.files.whole import Hashed, made_whole, sha256_of

_ABOUT = "about.json"


class Part(NamedTuple):
    """One that is done."""

    tokens: np.ndarray
    documents: np.ndarray
    """int64 [D, 2]."""
    counted: np.ndarray | None
    left_out: Mapping[str, int]
    """How many rows, by what they are."""


@contextmanager
def kept_for(out: Path) -> Iterator[Parts]:
    """Give the parts that are done of what becomes `out`, to this process alone.

    Raises DataError if another process is at it, and OSError if there can be no folder beside it.
    """
    folder = out.with_name(f".{out.name}.parts")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise DataError(f"{out} is being written by another process: wait for it, or choose another --out") from None
            if error.errno not in NO_LOCKS:
                raise
        for left in folder.glob(".*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        yield Parts(folder)


@dataclass(frozen=True)
class Parts:
    """Parts by their keys."""

    folder: Path

    @contextmanager
    def making(self, key: str, dtype: str, *, answers: bool) -> Iterator[PartWriter]:
        """Give what a part is written with; it is there when the block is done. Raises OSError."""
        with made_whole(self.folder / key) as temporary, ExitStack() as opened:
            names = ("tokens", "documents", *(["counted"] if answers else []))
            writer = PartWriter({name: Hashed(opened.enter_context((temporary / name).open("wb"))) for name in names}, dtype)
            yield writer
            about = {"files": {name: file.finish() for name, file in writer.files.items()}, "left_out": writer.left_out}
            (temporary / _ABOUT).write_text(json.dumps(about))

    def is_done(self, key: str) -> bool:
        """Whether a part is there as it was written; one that is damaged is removed."""
        folder = self.folder / key
        if not folder.exists():
            return False
        try:
            files = json.loads((folder / _ABOUT).read_text())["files"]
            is_whole = all(sha256_of(folder / name) == digest for name, digest in files.items())
        except (OSError, ValueError, KeyError, AttributeError):
            is_whole = False
        if not is_whole:
            shutil.rmtree(folder)
        return is_whole

    def open(self, key: str, dtype: str) -> Part:
        """Return a part that is done, mapped."""
        folder = self.folder / key

        def mapped(name: str, kind: str) -> np.ndarray:
            return np.memmap(folder / name, kind, mode="r") if (folder / name).stat().st_size else np.empty(0, kind)

        counted = mapped("counted", "?") if (folder / "counted").exists() else None
        documents = mapped("documents", "<u8").astype(np.int64).reshape(-1, 2)
        return Part(mapped("tokens", dtype), documents, counted, json.loads((folder / _ABOUT).read_text())["left_out"])

    def remove(self) -> None:
        """Remove them all."""
        shutil.rmtree(self.folder, ignore_errors=True)


class PartWriter:
    """Appends documents to a part."""

    def __init__(self, files: Mapping[str, Hashed], dtype: str) -> None:
        self.files, self._dtype = files, dtype
        self.left_out: dict[str, int] = {}

    def leave_out(self, what: str) -> None:
        """Count a row of this kind that is not there."""
        self.left_out[what] = self.left_out.get(what, 0) + 1

    def append(self, documents: Sequence[np.ndarray], text_bytes: Sequence[int], counted: Sequence[np.ndarray]) -> None:
        """Append documents: tokens [n], bytes of text and, where not all count, bool [n] of each."""
        if not documents:
            return
        self.files["tokens"].write(np.concatenate(documents).astype(self._dtype).tobytes())
        self.files["documents"].write(np.array([[*map(len, documents)], text_bytes], "<u8").T.tobytes())
        if counted:
            self.files["counted"].write(np.concatenate(counted).tobytes())
