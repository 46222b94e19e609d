"""Why a start of a run failed: RUN/errors/START/*.json, from each process that failed and each launcher that noticed.

A process records its error before it ends. A launcher records exit codes, for what could not: SIGKILL, a crash in C++. `first`
chooses. Each start has its own folder, named by its launcher (ERRORS) or, without `samerun launch`, by the number of its claim;
the place of the start (app/runs/claim.py) names it, so the failure of another start is never taken for its own.

torch's own error files (TORCHELASTIC_ERROR_FILE) are in a folder of one node, in whole seconds, and only torchrun reads them.
Standard library only.
"""

from __future__ import annotations

import signal
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from app.errors import HangError, RunFolderError, SamerunError, is_of_a_lost_peer
from app.files.lines import is_count, is_finite, parsed
from app.runs.claim import last_start
from app.runs.run_folder import write_json

FOLDER = "errors"


@dataclass(frozen=True, kw_only=True)
class ProcessFailure:
    """A process that failed, or the launcher of a node."""

    exit_code: int
    """As Python has it: -9 after SIGKILL."""
    rank: int | None = None
    process: str = ""
    """Name of a process without a rank; empty for a node."""
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    """When it failed, in Unix seconds."""
    error: str = ""
    """`RecipeError: no such key`; empty if it recorded nothing itself."""
    traceback: str = ""
    """Empty for an error that the user can fix."""
    is_consequence: bool = False
    """Whether it failed because another process did, or hangs: any other failure of the start is then the cause."""

    @property
    def name(self) -> str:
        """`rank 1 on node2`, `accelerate launch on node2`, or `node2`."""
        process = self.process if self.rank is None else f"rank {self.rank}"
        return f"{process} on {self.host}" if process else self.host

    def __str__(self) -> str:
        """Return `rank 1 on node2 ended with exit code 3`."""
        number = self.exit_code - 128 if self.exit_code > 128 else -self.exit_code
        if number not in map(int, signal.Signals):
            return f"{self.name} ended with exit code {self.exit_code}"
        sent = signal.Signals(number).name
        return f"{self.name} was ended by {sent}" + (", for example for lack of memory" if sent == "SIGKILL" else "")


def record(folder: Path | None, failure: ProcessFailure) -> None:
    """Write a failure into the folder of its start, if there is one. Where it cannot be written, stderr alone has it."""
    if folder is None:
        return
    by_itself = failure.error and failure.rank is not None
    with suppress(OSError, RunFolderError):
        folder.parent.mkdir(exist_ok=True)  # not the run folder: a user may have removed it
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{f'rank-{failure.rank:05d}' if by_itself else f'node-{failure.host}'}.json", asdict(failure))


@dataclass
class Recorder:
    """Records the error that ends this process."""

    folder: Path | None
    """Of this start; None: not known."""

    def record(self, error: Exception, *, rank: int | None = None) -> None:
        """Record an error, while it is handled."""
        text, code, frames, is_consequence = f"{type(error).__name__}: {error}", 1, "", isinstance(error, HangError)
        if isinstance(error, SamerunError):
            code = error.exit_code
        else:
            frames, is_consequence = traceback.format_exc(), is_of_a_lost_peer(error)
        failure = ProcessFailure(exit_code=code, rank=rank, error=text, traceback=frames, is_consequence=is_consequence)
        record(self.folder, failure)


def first(folder: Path | None) -> ProcessFailure | None:
    """Return the failure that ended a start, from its folder: the earliest that is not a consequence of another."""
    found: list[ProcessFailure] = []
    for file in folder.glob("*.json") if folder else ():
        with suppress(OSError, ValueError, TypeError):  # damaged; the others may not be
            failure = ProcessFailure(**parsed(file.read_bytes()))
            if isinstance(failure.exit_code, int) and is_finite(failure.time) and is_count(failure.rank or 0):
                found.append(failure)
    known = {failure.rank for failure in found if failure.error}
    # A launcher knows less of a process than its own file.
    found = [failure for failure in found if failure.error or failure.rank not in known]
    # torch's times are whole seconds; all ranks may have the same error.
    return min(found, key=lambda failure: (failure.is_consequence, int(failure.time), failure.rank or 0), default=None)


def newest(run_dir: Path) -> ProcessFailure | None:
    """Return the failure of the start that the run folder belongs to; None if it has not failed, as far as is known."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # it has no start, or one that is damaged
        return first(run_dir / FOLDER / Path(last_start(run_dir)["errors"]).name)
    return None
