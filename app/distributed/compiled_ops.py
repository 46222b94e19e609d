"""Loads DeepSpeed's C++ operator for CPUs, which is compiled on first use, so that a process killed meanwhile blocks nobody.

torch guards the folder of such an operator by a file named `lock`. A process that is killed while it compiles or loads leaves
it behind, and every later one would wait for it for ever. So the operators are loaded before DeepSpeed asks for them, by one
process at a time under a lock of the kernel's, which ends with its holder: whoever has that finds a `lock` only if it is a dead
process's.

Compiling may take minutes: that it goes on is said. torch compiles with whatever `ninja` is on the PATH, and one version
compiles again what another one has: so it is always the one that DeepSpeed brought along.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import PresetError
from app.files.paths import refuse_prepared

_GUARD = "samerun.flock"
_PATIENCE_S, _SAY_EVERY_S = 3.0, 20.0


def load() -> None:
    """Load, and compile where nobody has yet, what DeepSpeed needs here: on a CPU, what ranks of one machine meet through.

    Raises PresetError where the folder of compiled operators cannot be used.

    Not its CPUAdam: torch's own optimizers step (runtime.py).
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    with _alone() as root, _own_ninja():
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible(verbose=False):
            for leftover in root.glob(f"**/{builder.name}/lock"):
                leftover.unlink()
            with _announced(builder.name, root):
                builder.load(verbose=False)


@contextmanager
def _announced(name: str, root: Path) -> Iterator[None]:
    """Say on stderr that an operator is compiled in the block, unless it is over in moments, and again as this goes on."""
    began_s, is_over = time.monotonic(), threading.Event()

    def go_on() -> None:
        if is_over.wait(_PATIENCE_S):
            return
        _say(f"compiling DeepSpeed's {name} in {root}, once for this machine and version; this can take some minutes")
        while not is_over.wait(_SAY_EVERY_S):
            _say(f"still compiling DeepSpeed's {name}, after {time.monotonic() - began_s:.0f} s")

    teller = threading.Thread(target=go_on, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
    if (took_s := time.monotonic() - began_s) > _PATIENCE_S:
        _say(f"compiled DeepSpeed's {name} in {took_s:.0f} s")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


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
