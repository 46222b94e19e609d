"""DeepSpeed's C++ operators, which it compiles on first use, loaded so that a process killed meanwhile blocks nobody.

torch guards the folder of such an operator by a file named `lock`. A process that is killed while it compiles, or merely
loads, leaves it behind, and every later one on this home folder would wait for it for ever, without a word. So the operators
are loaded before DeepSpeed asks for them, by one process at a time under a lock of the kernel's, which ends with its holder:
whoever has that finds a `lock` only if it is a dead process's.

torch compiles with whatever `ninja` is on the PATH, where a virtual environment's need not be, and one version compiles
again what another one has: so it is always the one that DeepSpeed brought along.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.own_folder import refuse_prepared

_GUARD = "samerun.flock"


def load() -> None:
    """Load, and compile where nobody has yet, what DeepSpeed needs here: on a CPU, what ranks of one machine meet through.

    Not its CPUAdam: torch's own optimizers step (runtime.py).
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        _load("ShareMemCommBuilder")


def _load(*names: str) -> None:
    from deepspeed.accelerator import get_accelerator

    with _alone() as root, _own_ninja():
        for name in names:
            builder = get_accelerator().create_op_builder(name)
            if builder is not None and builder.is_compatible(verbose=False):
                for leftover in root.glob(f"**/{builder.name}/lock"):
                    leftover.unlink()
                builder.load(verbose=False)


@contextmanager
def _own_ninja() -> Iterator[None]:
    """Put the `ninja` that DeepSpeed requires first on the PATH."""
    from ninja import BIN_DIR

    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((BIN_DIR, before))
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextmanager
def _alone() -> Iterator[Path]:
    """Wait until no other process of this machine is in the block, and yield the folder of compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # on a machine without CUDA its import warns

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    refuse_prepared(root)  # what is compiled there is run here
    with (root / _GUARD).open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield root


if __name__ == "__main__":
    load()  # so that no run has to wait for it
