"""A GPU that need not be there: its tensors have shapes and no numbers, so whoever waits for a number is found.

    with waits.without_any() as device:
        batch = {"images": torch.zeros(8, 3, 32, 32, dtype=torch.uint8, device=device)}
        preparation.train(batch)        # raises one of FOUND

That is what torch.cuda.set_sync_debug_mode("error") finds on a GPU: reading a number (`item`, `tolist`), shapes that depend on
numbers (`nonzero`, `bincount`, indices of bools), and copies between host and GPU that are not `non_blocking`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WaitError(Exception):
    """The host waits for the GPU."""


FOUND = (WaitError, DataDependentOutputException, DynamicOutputShapeException)
"""What is raised."""


class _NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_copy = func._overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        is_blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        leaves = tree_leaves((args, kwargs, result)) if is_copy else tree_leaves((args, kwargs))
        # A single number on the host goes along with the launch of a kernel.
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor) and (is_copy or leaf.ndim > 0)}
        if len(devices) > 1 and is_blocking:
            raise WaitError(f"{func} between {' and '.join(sorted(devices))}")
        return result


@contextmanager
def without_any(*, but_copies: bool = False) -> Iterator[torch.device]:
    """Give the GPU for a block in which nobody may wait for it; `but_copies`: those to and from it may, as in a first batch."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        if but_copies:
            yield torch.device("cuda", 0)
            return
        with _NoCopies():
            yield torch.device("cuda", 0)
