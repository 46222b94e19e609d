"""scripts/bad_batch.py, in which nothing may wait for the device from the first log to the last, but logs themselves.

What waits raises, at its place. On a GPU torch tells it (torch.cuda.set_sync_debug_mode). On a CPU steps are taken here as on a
GPU, and every reading of a tensor's value is taken for a wait, but where batches are fetched and where the hosts agree: these
tensors are on the host everywhere. Kernels that read are not seen.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from app import building, session
from app.data.samples import Batch
from app.distributed.runtime import Runtime
from app.errors import DataError
from app.evaluation import Evaluation
from app.metrics.metrics import Metrics

TENSOR, ATEN = torch.Tensor, torch.ops.aten
CALLS = {
    TENSOR.item, TENSOR.tolist, TENSOR.numpy, TENSOR.cpu, TENSOR.__bool__, TENSOR.__float__, TENSOR.__int__, TENSOR.__index__,
    TENSOR.__array__,
}  # fmt: skip
OPERATORS = {
    ATEN._local_scalar_dense, ATEN.equal, ATEN.nonzero, ATEN.masked_select, ATEN._unique2, ATEN.unique_dim, ATEN.bincount,
}  # fmt: skip


class WaitError(Exception):
    pass


class NoCalls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CALLS:
            raise WaitError(f"{func} between two logs")
        return func(*args, **(kwargs or {}))


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is ATEN.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1])
        if func.overloadpacket in OPERATORS or by_mask:
            raise WaitError(f"{func} between two logs")
        return func(*args, **(kwargs or {}))


class OnCpu:
    """The two modes, in one thread: what they look at is refused while they are on."""

    def __init__(self) -> None:
        self._modes: list[Any] = []

    def set(self, *, on: bool) -> None:
        while self._modes:
            self._modes.pop().__exit__(None, None, None)
        if on:
            self._modes = [NoCalls(), NoOperators()]
            for mode in self._modes:
                mode.__enter__()

    @contextmanager
    def off(self) -> Iterator[None]:
        was_on = bool(self._modes)
        self.set(on=False)
        yield
        self.set(on=was_on)


def watch(watched: Callable[[bool], None]) -> None:
    """Have it said whether waits are refused: from the first log to the evaluation, which comes before the last one."""
    exact_log, exact_evaluate, last_step = Metrics.log, building.evaluate, int(os.environ["LAST_STEP"])

    def evaluate(*args: Any, **named: Any) -> Evaluation:
        watched(False)
        return exact_evaluate(*args, **named)

    def log(metrics: Metrics, step: int, **where: Any) -> dict[str, Any]:
        watched(False)
        line = exact_log(metrics, step, **where)
        print("nothing waits from here on" if step < last_step else "that was all")
        watched(step < last_step)
        return line

    Metrics.log = log  # type: ignore[method-assign]
    building.evaluate = evaluate


def on_cpu() -> None:
    guard = OnCpu()
    watch(lambda on: guard.set(on=on))
    exact_batches = building.batches_of

    def batches_of(loader: Iterable[Batch | DataError]) -> Iterator[Batch]:
        batches = iter(exact_batches(loader))
        while True:
            with guard.off():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def greatest(runtime: Runtime, values: Sequence[float]) -> list[float]:
        with guard.off():
            return exact_greatest(runtime, values)

    building.batches_of = batches_of
    exact_greatest, Runtime.greatest = Runtime.greatest, greatest  # type: ignore[method-assign]
    session.Steps = functools.partial(session.Steps, looks=False)  # type: ignore[assignment, misc]


if torch.cuda.is_available():
    watch(lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default"))
else:
    on_cpu()
runpy.run_path(str(Path(__file__).with_name("bad_batch.py")), run_name="__main__")
