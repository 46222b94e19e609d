"""A start's claim to its run folder: everything that it writes goes through the claim, and has no effect once a later start
claims the folder.

Two starts of a run may be alive at once: somebody types the command twice, or a link is cut and the scheduler starts the job
again elsewhere. To look who owns the folder before each write would race with the write. So the older start is fenced off,
by what holds on a local disk, NFS and Lustre alike, without locks, which shared file systems may not have:

    RUN/starts/3   the place of the third start. `mkdir` gives a number to one start alone, and the highest owns the folder: it
                   removes the places of those before it, and what they were writing there with them.
    whole files    (and folders: checkpoints, test_predictions, profile) are written in the place and renamed to where they
                   belong. Without its place a start has nothing to rename; what it removes it renames into the place.
    lines          are appended through handles that are opened once. A claim copies each file up to the step that the run goes
                   on from and renames the copy over it, so an older start has the handle of a file that no process reads.

On NFS an older start may know its place by a handle that outlives a rename; so the place is also removed. What fails for that
reason (ENOENT, ESTALE) is told as what it is: the folder was taken over.

A whole file and its name are on the disk (fsync) before the next thing is written, and lines before the checkpoint is committed
that contains their steps. A loss of power may take later lines: their steps are taken again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.errors import RunFolderError
from app.files.atomic_files import disk_errors, file_made_whole, refusal, sync
from app.files.text_files import Lines, is_count
from app.runs import run_folder

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_REMOVED_WITHIN_S = 30.0
"""Time to retry removing a folder: an older start on another machine may still write into it through NFS."""


class Claim:
    """The writer of one attempt. The main process makes it (`claim`); the others know its path."""

    def __init__(self, path: Path, place: Path) -> None:
        """`path` is the run folder, and `place` the folder in it which is this start's own."""
        self.path, self.place = path, place
        self._handles: dict[str, int] = {}

    def check(self) -> None:
        """Raise RunFolderError if a later start has claimed the folder, or if the folder is gone.

        To end soon, not to be safe: whatever this start writes from then on goes nowhere.
        """
        try:
            (self.place / run_folder.START).read_bytes()  # opening asks NFS's server, where a stat may be answered from memory
        except OSError as error:
            if error.errno not in _GONE:
                raise RunFolderError(refusal(self.place / run_folder.START, "read", error)) from error
            raise RunFolderError(self.lost()) from None

    def lost(self) -> str:
        """Return the sentence for a start that has no place any more."""
        starts = self.place.parent
        later = [number for number in run_folder.start_numbers(starts) if number > int(self.place.name)]
        if not later:
            return f"{self.path}, the run folder, or {self.place} in it, has been removed: this attempt ends."
        host = "another machine"
        with suppress(OSError, ValueError, KeyError, TypeError):  # then it is just not known which
            host = run_folder.last_start(self.path)["host"]
        return (
            f"another attempt of this run, on {host}, has taken {self.path} over: this one stops and writes nothing more. "
            "If you started both, give one another --run-dir."
        )

    @contextmanager
    def errors(self, path: Path, done: str = "written") -> Iterator[None]:
        """Raise RunFolderError for a takeover behind any error in the block, or else for what the system refuses."""
        try:
            with disk_errors(path, done, RunFolderError):
                yield
        except Exception:
            self.check()
            raise

    # Whole files -------------------------------------------------------------------------------------------------------------

    def write_text(self, name: str, text: str) -> None:
        """Write a file of the run folder, whole or not at all. Raises RunFolderError."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file of the run folder, whole or not at all. Raises RunFolderError."""
        with self.staged(name) as path:
            path.write_bytes(content)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write `values` as an indented JSON file, whole or not at all. Raises RunFolderError."""
        self.write_text(name, json.dumps(values, indent=2) + "\n")

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """Yield a path for the block to make a file or a folder at, which then is on the disk and in the run folder as `name`.

        If the block fails nothing is left of it, and what had the name before is as it was. Raises RunFolderError.
        """
        made = self.place / name.replace("/", "-")  # not in a folder of the place: to make one could make the place again
        try:
            with self.errors(self.path / name):
                yield made
                for file in made.rglob("*") if made.is_dir() else [made]:
                    sync(file)
                self.put(made, self.path / name)
        finally:
            with suppress(OSError):  # the place is gone, or what was not put there is all that is left
                _remove(made)

    def put(self, made: Path, final: Path) -> None:
        """Give what was made in the place its name in the run folder. A folder that has the name goes. Raises OSError."""
        replaced = final.is_dir() and made.is_dir()
        if replaced:
            self.take_away(final)
        made.rename(final)
        sync(final.parent)

    def take_away(self, path: Path) -> None:
        """Remove a file or a folder from the run folder: a kill half-way leaves nothing of its name. Raises OSError."""
        aside = self.place / f"{path.name}.removed"
        _remove(aside)
        path.rename(aside)
        _remove(aside)

    def remove(self, name: str) -> None:
        """Remove a file of the run folder, if it is there. Raises RunFolderError."""
        with self.errors(self.path / name, "removed"):
            if (self.path / name).exists():
                with suppress(FileNotFoundError):  # the user was faster, or `check` says what it was
                    self.take_away(self.path / name)
                self.check()

    # Lines -------------------------------------------------------------------------------------------------------------------

    def go_on_after(self, step: int) -> list[str]:
        """Drop all lines after so many steps, except the ledger's, and fence off the starts that wrote them.

        Returns a sentence for each file of which lines had to be left out since they are broken. Raises RunFolderError.
        """
        complaints = []
        of_steps = (run_folder.METRICS, run_folder.EVALUATIONS, run_folder.TEXTS, run_folder.SAMPLES, run_folder.STEPS)
        for name in (*of_steps, run_folder.LEDGER):
            lines = Lines(self.path / name)
            if (self.path / name).exists():
                self._begin(name, _upto(lines, None if name == run_folder.LEDGER else step))
                complaints.append(lines.complaint)
            elif name == run_folder.METRICS:
                self._begin(name)
        for path in (self.path / run_folder.TENSORBOARD).glob("*"):  # which are told themselves where to forget
            if path.is_file():
                with self.staged(f"{run_folder.TENSORBOARD}/{path.name}") as copy:
                    shutil.copyfile(path, copy)
        return [complaint for complaint in complaints if complaint]

    def _begin(self, name: str, lines: Iterable[bytes] = ()) -> None:
        """Begin a file with these lines, in place of the one that has the name, and keep its handle."""
        with self.staged(name) as made, made.open("ab") as file:
            file.writelines(lines)
            handle = os.dup(file.fileno())
        self._handles[name] = handle

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to a file of lines. Any thread may. Raises RunFolderError; then no part of the line is there."""
        self.append_bytes(name, json.dumps(line).encode() + b"\n")

    def append_bytes(self, name: str, content: bytes) -> None:
        """Add to the end of a file that this start has appended to, or that is new. Raises RunFolderError."""
        with self.errors(self.path / name):
            if name not in self._handles:
                (self.path / name).parent.mkdir(exist_ok=True)
                self._begin(name)
            _write_all(self._handles[name], content)

    def sync(self) -> None:
        """Wait until the disk has all that was appended. Any thread may. Raises RunFolderError."""
        for name, handle in list(self._handles.items()):
            with self.errors(self.path / name):
                os.fsync(handle)

    def close(self) -> None:
        """Close the files of lines; nothing is appended after this."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def claim(path: Path, errors: str | None = None) -> Claim:
    """Make a run folder belong to this start, and to none before it. Raises RunFolderError.

    `errors` is the name of this start's folder in RUN/errors, by default its number.
    """
    run_folder.refuse_links(path)
    starts = path / run_folder.STARTS
    place = starts
    try:
        starts.mkdir(exist_ok=True)
        place = _new_place(starts)
        for number in run_folder.start_numbers(starts):
            if number < int(place.name):
                with suppress(FileNotFoundError):  # another start, newer than that one too, was faster
                    (starts / str(number)).rename(starts / f"{number}.{place.name}.ended")
        for leftover in starts.glob("*.ended"):
            _remove_for_good(leftover)
        # Last: what filled the disk may have been in the places that went.
        about = {"host": socket.gethostname(), "time": time.time(), "errors": errors or place.name}
        with file_made_whole(place / run_folder.START) as temporary:
            temporary.write_text(json.dumps(about) + "\n")
        sync(starts)
    except OSError as error:
        if place != starts and not place.exists():
            raise RunFolderError(Claim(path, place).lost()) from None
        raise RunFolderError(refusal(place, "written", error)) from error
    return Claim(path, place)


def _upto(lines: Lines, step: int | None) -> Iterator[bytes]:
    """The lines of the first so many steps; None: all."""
    for number, line, values in lines:
        if step is None:
            yield line
        elif not is_count(values.get("step")):
            lines.leave_out(number, "it has no step")
        elif values["step"] <= step:
            yield line


def _new_place(starts: Path) -> Path:
    """The place of a new start, with a number above all others. The highest number is always there, so none comes twice."""
    number = max(run_folder.start_numbers(starts), default=0) + 1
    while True:
        place = starts / str(number)
        try:
            place.mkdir()
        except FileExistsError:  # of a start that came in between, or one of which this machine has not heard yet
            number += 1
            continue
        if number == (highest := max(run_folder.start_numbers(starts), default=0)):
            break
        _remove(place)  # the number was free because later starts have come and removed the place that had it
        number = highest + 1
    return place


def _remove_for_good(folder: Path) -> None:
    """Remove the place of an older start, which may be writing there. Raises OSError."""
    end_s = time.monotonic() + _REMOVED_WITHIN_S
    while True:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if folder.exists() and all(path.name.startswith(".nfs") for path in folder.rglob("*")):
                return  # open in a process of this machine, which NFS keeps so; here the rename was enough
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY) or time.monotonic() > end_s:
                raise
            time.sleep(0.02)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_all(handle: int, content: bytes) -> None:
    """Write all of it or, if that fails, nothing."""
    size_bytes = os.fstat(handle).st_size
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(handle, size_bytes)
        raise
