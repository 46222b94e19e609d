"""RUN/profile/timeline.json.gz and summary.txt, from the files of the ranks: an event at a time, whatever their number.

Run in training by the main process, and again by `samerun timeline` on a folder from which files may be missing, or cut.
Standard library only.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import RunFolderError
from app.place.topology import listed
from app.profiling import rank_file, summary
from app.profiling.rank_file import RankFile
from app.record.run_folder import refusal, write_text

TIMELINE, SUMMARY = "timeline.json.gz", "summary.txt"


@dataclass(frozen=True)
class Merged:
    """What came of it."""

    text: str
    """What summary.txt says."""
    complaints: Sequence[str]
    """A sentence for each file that is missing, cut or broken."""


def merge(folder: Path, *, most_bytes: float = math.inf, told_as: Path | None = None) -> Merged:
    """Write both files, each whole or not at all, from what `folder` has of the ranks.

    `told_as` is where it will be when somebody reads of it.

    Where the files of the ranks have more than `most_bytes`, as they are on the disk, there is only the summary.

    Raises RunFolderError if it has nothing that can be read, or cannot be written.
    """
    files, complaints = _open(folder)
    told_as = told_as or folder
    try:
        size_bytes = sum(file.path.stat().st_size for file in files)
        if size_bytes > most_bytes:
            timeline = f"the ranks' traces have {_size(size_bytes)}: merge them with `samerun timeline {told_as.parent}`"
        else:
            timeline = f"{told_as / TIMELINE}: {_write_timeline(folder, files)}"
        complaints += [file.complaint for file in files if file.complaint]
        text = "\n".join([*summary.lines([file.header for file in files]), *complaints, timeline]) + "\n"
        write_text(folder / SUMMARY, text)
    except OSError as error:
        raise RunFolderError(refusal(told_as, "written", error)) from error
    return Merged(text, complaints)


def _write_timeline(folder: Path, files: Sequence[RankFile]) -> str:
    """Write it, and return how large it is and what shows it."""
    first = files[0].header
    about = {"ranks": len(files), "world_size": first.world_size, "steps": first.steps}
    path, temporary = folder / TIMELINE, folder / f".{TIMELINE}.{os.getpid()}"
    num_bytes = rank_file.write_trace(temporary, about, itertools.chain.from_iterable(file.events() for file in files))
    temporary.replace(path)
    size = f"{_size(path.stat().st_size)} ({_size(num_bytes)} uncompressed)"
    return f"{size}, for ui.perfetto.dev or chrome://tracing"


def _open(folder: Path) -> tuple[list[RankFile], list[str]]:
    files, complaints = [], []
    for path in folder.glob(rank_file.PATTERN):
        try:
            files.append(RankFile(path))
        except RunFolderError as error:
            complaints.append(str(error))
    newest = max((file.header.recorded for file in files), default=0.0)
    complaints += [
        f"{file.path} belongs to an earlier recording and is ignored." for file in files if file.header.recorded < newest
    ]
    files = sorted((file for file in files if file.header.recorded == newest), key=lambda file: file.header.rank)
    if not files:
        broken = "; ".join(complaints) or "it contains no files of ranks"
        raise RunFolderError(f"{folder} has no readable profile: {broken}. Train with profile.steps=10:20 to get one.")
    there = {file.header.rank for file in files}
    missing = [rank for rank in range(files[0].header.world_size) if rank not in there]
    if missing:
        complaints.append(
            f"{len(missing)} of {files[0].header.world_size} ranks are missing in the timeline: {listed(missing)}."
        )
    return files, complaints


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
