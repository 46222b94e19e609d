"""A process that has imported all that a training needs, and runs modules as `python -m` would, each in a fork of itself.

    accelerate launch --config_file PRESET.yaml --num_processes N tests/scripts/warm.py PORT --config_file PRESET.yaml

A start costs seconds of imports, a fork none. The fork is a process of its own, in which nothing has happened yet but imports:
no run sees anything of those before it, and one may end as it likes. `processes.Warm` is the other end of the connection.
(The preset is named once more because a run looks for its name in the command line of its parent, which this process is.)
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

# What a training has imported when it ends, beside app.train itself, and the larger part of what it has under some presets.
IMPORTED = ("app.session", "app.loop", "app.evaluate", "datasets", "deepspeed", "torch._dynamo")
IMPORTED_TOO = {
    "ACCELERATE_USE_DEEPSPEED": ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers"),
    "ACCELERATE_USE_FSDP": ("torch.distributed.checkpoint.state_dict",),
}


def main(port: int) -> None:
    """Fork for each request, which holds the arguments of `run`, until the other end hangs up."""
    asked = [name for variable, names in IMPORTED_TOO.items() if os.environ.get(variable) == "true" for name in names]
    for name in (*IMPORTED, *asked):
        importlib.import_module(name)
    gc.freeze()  # a fork then shares these pages for good
    with Client(("127.0.0.1", port)) as connection, suppress(EOFError):
        connection.send(int(os.environ.get("RANK", "0")))
        while True:
            request = connection.recv()
            child = os.fork()
            if child == 0:
                run(**request)
            connection.send(child)
            connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def run(module: str, arguments: tuple[str, ...], env: Mapping[str, str], log: str, port: str) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    if "MASTER_PORT" in os.environ:  # the launcher keeps a meeting point for one start, and every run needs one of its own
        os.environ.update(MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    os._exit(0)  # how whole processes end is shown by tests that start them


if __name__ == "__main__":
    main(int(sys.argv[1]))
