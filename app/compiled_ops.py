"""DeepSpeed's C++ operators, which it compiles on first use, loaded so that a process killed meanwhile blocks nobody.

torch guards the folder of such an operator by a file named `lock`. A process that is killed while it compiles, or merely
loads, leaves it behind, and every later one on this home folder would wait for it for ever, without a word. So the operators
are loaded before DeepSpeed asks for them, by one process at a time under a lock of the kernel's, which ends with its holder:
whoever has that finds a `lock` only if it is a dead process's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_GUARD = "samerun.flock"


def load(config: Mapping[str, Any]) -> None:
    """Load, and compile where nobody has yet, what DeepSpeed needs under its `config` (its JSON file, as a mapping)."""
    from deepspeed.accelerator import get_accelerator

    names = ["ShareMemCommBuilder"] if get_accelerator().device_name() == "cpu" else []
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    if offload.get("device") == "cpu":
        names.append("CPUAdamBuilder")
    if not names:
        return
    with _alone() as root:
        for name in names:
            builder = get_accelerator().create_op_builder(name)
            if builder is not None and builder.is_compatible(verbose=False):
                for leftover in root.glob(f"**/{builder.name}/lock"):
                    leftover.unlink()
                builder.load(verbose=False)


@contextmanager
def _alone() -> Iterator[Path]:
    """Wait until no other process of this machine is in the block, and yield the folder of compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # on a machine without CUDA its import warns

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with (root / _GUARD).open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield root
