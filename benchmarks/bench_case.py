"""One process of `python -m benchmarks`: runs one program, measured. Started by `benchmarks.contestants` alone."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks import peers, programs
from benchmarks.figures import REFERENCE
from benchmarks.meter import Meter
from benchmarks.work import Task, Work


def main(argv: list[str]) -> None:
    """Run the program of a task: the number of the file descriptor of its connection, its threads, and the task as JSON."""
    descriptor, threads, task = argv
    torch.set_num_threads(int(threads))
    work = Work(Task(**json.loads(task)), Meter(Connection(int(descriptor))))
    own: dict[str, Callable[[Work], None]] = {
        REFERENCE: functools.partial(programs.hand_written, fused=True),
        "hand-written": functools.partial(programs.hand_written, fused=None),
        "hand-written on a device": programs.on_device,
        "samerun": programs.samerun,
    }
    program = own.get(work.task.program) or peers.PEERS[work.task.program][0]
    program(work)


if __name__ == "__main__":
    main(sys.argv[1:])
