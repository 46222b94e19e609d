"""Which memory a pass takes and gives back, seen operation by operation on tensors without data.

This is the one room that leans on private parts of torch: fake tensors (`torch._subclasses`), modes that see each operation
(`torch.utils._python_dispatch`) and the process group without processes (`torch.testing._internal`). torch's own tracker of
memory, `torch.distributed._tools.mem_tracker`, works in the same way; tests/planning holds this one against it. That one knows
no phases of a step, by which shallow models tell of deep ones, and takes several times as long.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("weights", "gradients", "activations", "loss")
"""What a pass allocates: gathered weights, gradients, what layers keep and work with, and the same of the last layer."""
Bytes = tuple[int, ...]
"""One number for each of KINDS."""


class Ledger(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is entered, and keeps the greatest sum of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"
        """Of what is allocated from now on."""
        self.peaks: dict[str, Bytes] = {}
        """What was held at the worst moment of each phase, by its name."""
        self._phase = ""
        self._now = dict.fromkeys(KINDS, 0)
        self._total = 0
        self._greatest: dict[str, int] = {}
        self._entries: dict[int, list[Any]] = {}
        """By the `id` of a storage: a weak reference to it, its kind (None: it was there before), its bytes."""

    def begin(self, phase: str) -> None:
        """Begin a phase of the step; one that was left may go on."""
        self._phase = phase
        self._look()

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Leave out what is there before."""
        for tensor in tensors:
            self._enter(_local(tensor).untyped_storage(), None)

    def call_it(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor, which may be known already, as of this kind."""
        storage = _local(tensor).untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            self._enter(storage, kind)
        elif entry[1] is not None and entry[1] != kind:
            self._now[entry[1]] -= entry[2]
            self._now[kind] += entry[2]
            entry[1] = kind

    def __enter__(self) -> Ledger:
        """Count from now on, also what torch resizes behind the operations, as FSDP2 does with gathered weights."""
        self._mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_
        ledger, resize = self, self._resize

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            ledger._update(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Stop counting."""
        super().__exit__(*raised)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation, and count what it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with this rank's part
        result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:  # not what DTensor computes to learn shapes
            name = func.__name__
            if name.startswith("_allgather_base_"):
                self.call_it(args[0], "weights")
            elif name.startswith("_reduce_scatter_base_"):
                self.call_it(args[0], "gradients")
                self.call_it(args[1], "gradients")
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                    self._enter(tensor.untyped_storage(), self.kind)
            self._look()
        return result

    def _enter(self, storage: torch.UntypedStorage, kind: str | None) -> None:
        key = id(storage)
        if key in self._entries:
            self._update(storage)
            return
        size = 0 if kind is None else storage.nbytes()
        self._entries[key] = [weakref.ref(storage, functools.partial(self._leave, key)), kind, size]
        if kind is not None:
            self._now[kind] += size
            self._total += size

    def _update(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(id(storage))
        if entry is None or entry[1] is None:
            return
        change = storage.nbytes() - entry[2]
        if change:
            entry[2] += change
            self._now[entry[1]] += change
            self._total += change

    def _leave(self, key: int, _: object) -> None:
        _, kind, size = self._entries.pop(key)
        if kind is not None:
            self._now[kind] -= size
            self._total -= size

    def _look(self) -> None:
        if self._total > self._greatest.get(self._phase, -1):
            self._greatest[self._phase] = self._total
            self.peaks[self._phase] = tuple(self._now.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_data() -> FakeTensorMode:
    """Return the mode in which tensors have shapes and types, say that they are on the CPU, and have no data."""
    return FakeTensorMode()


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of a process group whose other ranks are not there, and whose collectives do nothing.

    Raises RuntimeError if this process has joined a group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a plan is made before this process joins others: it has joined them already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a number is asked for."""
