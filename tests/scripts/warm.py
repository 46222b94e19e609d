"""A process that has imported all that a training needs, and starts the ranks of one as forks of itself.

    python tests/scripts/warm.py PORT [ROOT]

With ROOT, a folder that holds an `app` and a `launch`, only what is other people's is imported beforehand, and each rank runs
that folder's code; one that has imported an `app` or a `launch` from elsewhere ends with exit code FOREIGN.

A start costs every rank seconds of imports, a fork none. It is a process of its own, in which nothing has happened yet but
imports: no run sees anything of those before it, and one may end as it likes. `processes.Warm` is the other end.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import runpy
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import NoReturn

# What a training has imported when it ends, beside app.train itself, and what takes long of that under DeepSpeed and FSDP2.
OURS = ("app.session", "app.loop", "app.evaluate")
LIBRARIES = (
    "torchvision",
    "accelerate.commands.launch",
    "datasets",
    "transformers",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "rich.progress",
    "psutil",
)
FOREIGN = 97


def main(port: int, root: Path | None) -> None:
    """Run what is asked for, one after the other, until the other end hangs up."""
    for name in LIBRARIES if root else OURS + LIBRARIES:
        importlib.import_module(name)
    if root:  # an editable installation finds what ROOT lacks in another folder
        editable = re.compile("__editable__.*samerun")
        sys.meta_path[:] = [it for it in sys.meta_path if not editable.match(getattr(it, "__module__", ""))]
    gc.freeze()  # a fork then shares these pages for good
    with Client(("127.0.0.1", port)) as connection, suppress(EOFError):
        while True:
            command, environments, log = connection.recv()
            ranks = [os.fork() or run(command, environment, log, root) for environment in environments]
            connection.send(ranks)
            for _ in ranks:
                pid, status = os.wait()
                connection.send((pid, os.waitstatus_to_exitcode(status)))


def run(command: tuple[str, ...], environment: Mapping[str, str], log: str, root: Path | None) -> NoReturn:
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
    if root and (elsewhere := imported_from_elsewhere(root)):
        print(f"not of {root}: {', '.join(elsewhere)}", file=sys.stderr, flush=True)
        code = FOREIGN
    os._exit(code if isinstance(code, int) else 1)  # how whole processes end is shown by tests that start them


def imported_from_elsewhere(root: Path) -> list[str]:
    """The files and folders of ours that this process has imported, and that are not below `root`."""
    own = [module for name, module in sys.modules.items() if name.split(".")[0] in ("app", "launch", "samerun")]
    places = [Path(getattr(module, "__file__", None) or next(iter(module.__path__))) for module in own]
    return [str(place) for place in places if not place.resolve().is_relative_to(root.resolve())]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
