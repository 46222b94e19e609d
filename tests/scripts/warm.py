"""A process that has imported all that a training needs, and starts the ranks of one as forks of itself.

    python tests/scripts/warm.py PORT

A start costs every rank seconds of imports, a fork none. It is a process of its own, in which nothing has happened yet but
imports: no run sees anything of those before it, and one may end as it likes. `processes.Warm` is the other end.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Client
from typing import NoReturn

# What a training has imported when it ends, beside app.train itself, and what takes long of that under DeepSpeed and FSDP2.
IMPORTED = (
    "app.session",
    "app.loop",
    "app.evaluate",
    "datasets",
    "transformers",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
)


def main(port: int) -> None:
    """Run what is asked for, one after the other, until the other end hangs up."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a fork then shares these pages for good
    with Client(("127.0.0.1", port)) as connection, suppress(EOFError):
        while True:
            command, environments, log = connection.recv()
            ranks = [fork(command, environment, log) for environment in environments]
            connection.send(ranks)
            for _ in ranks:
                pid, status = os.wait()
                connection.send((pid, os.waitstatus_to_exitcode(status)))


def fork(command: tuple[str, ...], environment: Mapping[str, str], log: str) -> int:
    return os.fork() or run(command, environment, log)


def run(command: tuple[str, ...], environment: Mapping[str, str], log: str) -> NoReturn:
    """Become `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS`."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command)
    code: object = 0
    try:
        if command[0].endswith(".py"):
            runpy.run_path(command[0], run_name="__main__")
        else:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    sys.stdout.flush()
    if isinstance(code, str):
        print(code, file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else 1)  # how whole processes end is shown by tests that start them


if __name__ == "__main__":
    main(int(sys.argv[1]))
