"""A module of the application on a device with a broken kernel: `broken_device.py RANK FAULT OPERATOR MODULE ARGUMENTS`.

`Broken` changes what one of torch's operators gives, as a device would: everything above it is the real thing. Sums in float64,
which tell what is right, are on another device in most runs, and are left alone.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOWEST_BIT, EXPONENT_BIT = {2: 0, 4: 0}, {2: 14, 4: 30}  # by the bytes of a number


class Broken(TorchDispatchMode):
    """What one operator gives last of all is not what it computed."""

    def __init__(self, fault: str, operator: str) -> None:
        super().__init__()
        self.fault, self.operator = fault, operator
        self.last: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.name() != f"aten::{self.operator}":
            return results
        tensors = [results] if isinstance(results, torch.Tensor) else [each for each in results if torch.is_tensor(each)]
        for place, tensor in enumerate(tensors[:2]):
            if tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.numel():
                self.spoil(tensor, place)
        return results

    def spoil(self, tensor: torch.Tensor, place: int) -> None:
        """Change the result where it is."""
        if self.fault == "old":
            key = place, tensor.shape, tensor.dtype
            computed = tensor.clone()
            tensor.copy_(self.last.get(key, torch.zeros_like(tensor)))
            self.last[key] = computed
        else:
            bits = {"low": LOWEST_BIT, "high": EXPONENT_BIT}[self.fault][tensor.element_size()]
            whole = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
            whole[tuple(size // 2 for size in tensor.shape)] ^= 1 << bits


if __name__ == "__main__":
    rank, fault, operator, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    if os.environ.get("RANK", "0") == rank:
        with Broken(fault, operator):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
