"""The errors a user can meet, and the exit code of each.

    SamerunError
    +-- UsageError       2  an option of the command line is unknown, or lacks its value
    +-- RecipeError      3  the recipe or a key=value override is wrong
    +-- PresetError      4  the preset is wrong, or Accelerate did not do what it says
    +-- TopologyError    5  the running processes, nodes or devices are not the requested ones
    +-- DataError        6  the data is missing, unreadable or not what the recipe says
    +-- RunFolderError   7  the run folder cannot be used
    +-- TrainingError    8  the training failed, for example with a loss that is not finite
    +-- TrackerError     9  a tracker is unknown or not installed
    +-- SubmitError     10  the job cannot be submitted
    +-- CheckpointError 11  a checkpoint cannot be written, is damaged, or belongs to another run
    +-- HangError       12  the training hangs
    +-- DeviceError     13  a device computes wrong results
    +-- LackOfMemoryError 14  the run needs more memory than a device or machine has

A run that was stopped early and saved a checkpoint is no error. Its exit code is 75.

The text of an error says what is wrong, the value, where it came from and what to change. Most users see nothing else:
`leave_with` prints it without a traceback.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

STOPPED = 75
"""Exit code of a run that was stopped before its last step and is not restarted automatically. In sysexits.h it is EX_TEMPFAIL:
try the same command again. It is not 0, so `&&` and Slurm's `afterok` do not take the run for finished."""


def did_you_mean(word: str, known: Collection[str], *, otherwise: str = "", then: str = "", cutoff: float = 0.6) -> str:
    """Return "did you mean A or B?" for the known names nearest to a word, or `otherwise`; `then` follows in any case.

    With the usual `cutoff`, names of which a part begins with the word are the nearest: `deepspeed_zero3` for `zero3`.
    """
    near = [name for name in known if len(word) > 2 and cutoff <= 0.6 and re.search(rf"(^|[_.-]){re.escape(word)}", name)][:3]
    near = near or difflib.get_close_matches({"ddp": "multi_gpu"}.get(word, word), known, n=3, cutoff=cutoff)
    return " ".join(filter(None, [f"did you mean {' or '.join(near)}?" if near else otherwise, then]))


class SamerunError(Exception):
    """An error that the user can fix; its text says how."""

    exit_code = 1


class UsageError(SamerunError):
    """The command line is wrong (the exit code that argparse uses)."""

    exit_code = 2


class RecipeError(SamerunError):
    """The recipe or a key=value override is wrong. The text lists every problem, one per line."""

    exit_code = 3

    def __init__(self, *problems: str, recipe: Any = None) -> None:
        """`recipe`: the recipe of the valid values, if its files are readable."""
        super().__init__("\n".join(problems))
        self.problems = problems
        self.recipe = recipe


class PresetError(SamerunError):
    """The preset requests something impossible, or Accelerate did not do what it requests."""

    exit_code = 4


class TopologyError(SamerunError):
    """The running processes, nodes or devices are not the requested ones."""

    exit_code = 5


class DataError(SamerunError):
    """The data is missing, unreadable, or not what the recipe says it is."""

    exit_code = 6


class RunFolderError(SamerunError):
    """The run folder is in use, incomplete or not writable."""

    exit_code = 7


class TrainingError(SamerunError):
    """The training failed, for example with a loss that is not finite; continuing would hide the failure."""

    exit_code = 8


class TrackerError(SamerunError):
    """A requested tracker is unknown or not installed."""

    exit_code = 9


class SubmitError(SamerunError):
    """The job cannot be submitted: its options are wrong, or the scheduler refuses it."""

    exit_code = 10


class CheckpointError(SamerunError):
    """A checkpoint cannot be written or read, is damaged, or does not belong to the run."""

    exit_code = 11


class HangError(SamerunError):
    """The training hangs: a process, or something it waits for, makes no progress."""

    exit_code = 12


class DeviceError(SamerunError):
    """A device computes wrong results."""

    exit_code = 13


class LackOfMemoryError(SamerunError):
    """The run needs more memory than a device or machine has."""

    exit_code = 14


def printable(text: str) -> str:
    """Return a text as it may go to a terminal: control characters, which could move the cursor or more, as escapes.

    For all that comes from a run folder, which may be a stranger's.
    """
    return "".join(it if it.isprintable() or it in "\n\t" else it.encode("unicode_escape").decode() for it in text)


def leave_with(error: SamerunError, rank: int) -> NoReturn:
    """Print the error's text and end this process with its exit code, whatever the other ranks do.

    Rank 0 prints immediately. The others wait a moment: where all have the same error, the launcher ends them before they
    repeat it. `os._exit` skips destructors, in which a process group with a missing member could hang.
    """
    if rank != 0:
        time.sleep(1.0)
    who = f"[rank {rank} on {socket.gethostname()}] " if rank != 0 else "samerun: "
    print(f"{who}{type(error).__name__}: {printable(str(error))}", file=sys.stderr, flush=True)  # noqa: T201 - the user's message
    sys.stdout.flush()
    os._exit(error.exit_code)


@contextmanager
def exits_refused() -> Iterator[None]:
    """Raise RecipeError where code of the user calls `sys.exit()`: the run would end without a word, as if it were finished.

    Scripts with argparse, or with `sys.exit(main())` at their end, do that when they are imported.
    """
    try:
        yield
    except SystemExit as error:
        if not (own := _of_user(traceback.extract_tb(error.__traceback__))):
            raise
        file, line = Path(own[-1].filename), own[-1].lineno
        raise RecipeError(
            f"{file.name} ends the program with sys.exit({error.code!r}) in line {line} ({file}): raise an exception instead, "
            "or guard what only a script does with `if __name__ == '__main__':`"
        ) from error


@contextmanager
def noted(sentence: Callable[[BaseException], str]) -> Iterator[None]:
    """Add a sentence, which is printed below the traceback, to an error that is raised in the block."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, SamerunError):
            error.add_note(sentence(error))
        raise


def _of_user(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames in files of the user: not in ours, Python's or a library's."""
    ours, names = Path(__file__).parents[1], ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    others = (ours / "app", ours / "launch", *map(sysconfig.get_path, names), "<")  # "<frozen importlib._bootstrap>"
    return [it for it in frames if not it.filename.startswith(tuple(map(str, others)))]


def short_traceback(error: BaseException) -> str:
    """Return the traceback of an error with the frames in files of the user and the last one; all, if the user has none."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        if own := _of_user(part.stack):
            part.stack = traceback.StackSummary.from_list(own + [it for it in part.stack[-1:] if it not in own])
        part = part.__cause__ or part.__context__
    return "".join(whole.format())


def skip_destructors_if_failed() -> threading.Event:
    """Return an event. Once it is set, this process ends with exit code 1 where Python would begin to destroy its objects.

    To be called first of all: what others have registered with `atexit` runs before. After an error the traceback keeps the
    model and its process group, and gloo, destroyed with work under way, aborts now and then ("terminate called without an
    active exception"): the exit code would report SIGABRT, and a line of C++ the last of the log.
    """
    failed = threading.Event()

    def end_at_once() -> None:
        if failed.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    atexit.register(end_at_once)
    return failed


_OF_A_LOST_PEER = (
    "caused by a remote worker",
    "Timed out waiting",
    "Socket closed",
    "Socket unexpectedly closed",
    "Pair is not connected",
    "caused pair closure",
    "Connection closed by",
    "Connection reset by peer",
    "Connection was likely closed",  # that to the store
    "Broken pipe",
    "store->get(",  # what rank 0 would have put there, for NCCL
    "ncclRemoteError",
    "remote process exited",
    "communicator was aborted",
    "collective operation timeout",
)
"""Texts of gloo, of torch's store and of NCCL where another process is gone; tests/test_errors.py has whole ones. Their other
errors are of this process or of all, as two processes on one GPU, other versions, no memory, no network: they are the cause."""


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Return whether `error` says that another process is gone: this one follows it, and is no cause."""
    return any(text in str(error) for text in _OF_A_LOST_PEER)
