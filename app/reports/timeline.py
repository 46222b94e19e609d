"""`samerun timeline RUN`: merges the profile files of all ranks, and summarises them in a few lines.

The run does so itself at the end of `profile.steps`; this is for one that was ended before, or copied, or lost files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from app.errors import RunFolderError
from app.options.command_line import Parser
from app.profiling import merge
from app.record import run_folder


def main(argv: Sequence[str]) -> int:
    """Write RUN/profile/timeline.json.gz and summary.txt and print the summary; return the exit code.

    Raises RunFolderError if there is no profile.
    """
    parser = Parser(
        prog="samerun timeline",
        description="Put the profiler traces of all ranks on one time axis, and show what overlaps and which rank is late.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a run with profiler traces, trained with for example profile.steps=10:20",
    )
    arguments = parser.parse_all(argv)
    folder = arguments.run / run_folder.PROFILE
    if not folder.is_dir():
        raise RunFolderError(f"{arguments.run} has no profile (no folder {folder}): train with profile.steps=10:20 to get one.")
    sys.stdout.write(merge.merge(folder).text)
    return 0
