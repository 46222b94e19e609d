"""Loads DeepSpeed's C++ operator for CPUs, which is compiled on first use, so that a process killed meanwhile blocks no other.

torch guards the folder of such an operator by a file named `lock`. A process that is killed while it compiles or loads leaves
it behind, and every later one would wait for it for ever. So the operators are loaded before DeepSpeed asks for them, by one
process at a time under a lock of the kernel's, which ends with its holder: whoever has that finds a `lock` only if it is a dead
process's.

torch compiles with whatever `ninja` is on the PATH, and one version compiles again what another one has: so it is always the
one that DeepSpeed requires.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import patch_environment

from app.errors import PresetError
from app.files.paths import refuse_prepared

_GUARD = "samerun.flock"
_PATIENCE_S = 3.0


def load() -> None:
    """Load, and compile if needed, the operator through which ranks of one machine exchange data on CPUs.

    Not its CPUAdam: torch's own optimizers step (runtime.py). Raises PresetError where the folder of compiled operators cannot
    be used.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    from ninja import BIN_DIR

    path = os.pathsep.join((BIN_DIR, os.environ.get("PATH", os.defpath)))
    with _alone() as root, patch_environment(path=path):
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible(verbose=False):
            for leftover in root.glob(f"**/{builder.name}/lock"):
                leftover.unlink()
            message = f"compiling DeepSpeed's {builder.name} in {root}, once for this machine and version, in some minutes\n"
            timer = threading.Timer(_PATIENCE_S, sys.stderr.write, [message])
            timer.start()
            try:
                builder.load(verbose=False)
            finally:
                timer.cancel()


@contextmanager
def _alone() -> Iterator[Path]:
    """Wait until no other process of this machine is in the block, and yield the folder of compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # on a machine without CUDA its import warns

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    try:
        root.mkdir(parents=True, exist_ok=True)
        refuse_prepared(root)  # what is compiled there is run here
        guard = (root / _GUARD).open("w")
    except OSError as error:
        raise PresetError(
            f"DeepSpeed compiles operators into {root}, which cannot be used ({error.strerror}): set "
            "TORCH_EXTENSIONS_DIR to a writable folder of your own"
        ) from error
    with guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield root


if __name__ == "__main__":
    load()  # so that no run has to wait for it
