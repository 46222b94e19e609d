"""Where one process spends its time, and the floating-point operations of a sample.

Phases end at a lap. On a CPU a lap is read from the host's clock. A GPU works through its queue while the host is ahead of it,
so there a lap is an event in the GPU's own queue (CUDA events: docs.pytorch.org/docs/stable/notes/cuda.html, "Asynchronous
execution"): the time in which it idled for data is then the wait, however long the host was asleep.

Within a lap the time in which the process waits for other ranks (`begin_wait` to `end_wait`) is a phase of its own.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

from app.distributed import numerics
from app.distributed.numerics import without_data

Phase = Literal["data_wait", "forward_backward", "optimizer", "communication", "other"]
"""`communication` is the part of a lap spent waiting for other ranks; `other` is the rest: counting, logging, agreeing."""
_PHASES: tuple[Phase, ...] = get_args(Phase)
_MOST_PENDING = 512
"""Events that are kept until they are read: a GPU's queue is not longer."""


@dataclass(frozen=True)
class Spent:
    """Seconds of a run, from its start or between two readings."""

    training_s: float
    """All but pauses."""
    held_s: float
    """In which the training was held by saving."""
    phases_s: Mapping[Phase, float]
    """The phases of the steps, on the device: as long together as the training, but for what a GPU has still to do."""

    def __sub__(self, earlier: Spent) -> Spent:
        phases_s = {phase: time_s - earlier.phases_s[phase] for phase, time_s in self.phases_s.items()}
        return Spent(self.training_s - earlier.training_s, self.held_s - earlier.held_s, phases_s)


NOTHING = Spent(0.0, 0.0, dict.fromkeys(_PHASES, 0.0))


class Clock:
    """Seconds of training, by phases, with pauses (evaluation, saving) kept apart."""

    def __init__(self, device: torch.device) -> None:
        self.pause_s = 0.0
        """Length of the last pause."""
        self._held_s, self._spent_s, self._since_s = 0.0, 0.0, time.perf_counter()
        self._laps = _CudaLaps(device) if device.type == "cuda" else _HostLaps()
        self._is_paused = False

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    def lap(self, phase: Phase) -> None:
        """End a lap: the time since the last one belongs to this phase."""
        self._laps.end(phase)

    def begin_wait(self) -> bool:
        """Note that the process begins to wait for other ranks; return False, and note nothing, in a pause."""
        if not self._is_paused:
            self._laps.begin_wait()
        return not self._is_paused

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self._laps.end_wait()

    def spent(self) -> Spent:
        """Return the time since the start; the phases up to the last lap. Waits for a GPU to reach it."""
        phases_s = self._laps.total_s()
        return Spent(self.training_s, self._held_s, phases_s)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as training. In a profile it has this name."""
        self.lap("other")
        self._spent_s, start_s, self._is_paused = self.training_s, time.perf_counter(), True
        try:
            with torch.profiler.record_function("paused"):
                yield
        finally:
            self._is_paused = False
            self._laps.begin()
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        with self.paused():
            yield
        self._held_s += self.pause_s


class _HostLaps:
    def __init__(self) -> None:
        self._total_s = dict.fromkeys(_PHASES, 0.0)
        self._waited_s = self._wait_begin_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin a lap here: the time before it is in no phase."""
        self._begin_s, self._waited_s = time.perf_counter(), 0.0

    def end(self, phase: Phase) -> None:
        """End a lap, and begin the next."""
        now_s = time.perf_counter()
        self._add(phase, now_s - self._begin_s - self._waited_s)
        self._begin_s = now_s

    def begin_wait(self) -> None:
        """Begin to wait for other ranks."""
        self._wait_begin_s = time.perf_counter()

    def end_wait(self) -> None:
        """End the wait."""
        self._waited_s += time.perf_counter() - self._wait_begin_s

    def _add(self, phase: Phase, time_s: float) -> None:
        """Add a lap without its waits, and these."""
        self._total_s[phase] += time_s
        self._total_s["communication"] += self._waited_s
        self._waited_s = 0.0

    def total_s(self) -> dict[Phase, float]:
        """Return the time of every phase in seconds."""
        return dict(self._total_s)


class _CudaLaps(_HostLaps):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[Any] = []
        self._pending: deque[tuple[Phase | Literal["lap", "wait"] | None, Any]] = deque()
        """Events that are not read yet, each with what ends with it: a phase, the part of a lap before a wait, or a wait."""
        self._worked_s = 0.0
        """Of the lap that has not ended."""
        super().__init__()

    def begin(self) -> None:
        self._record(None)

    def end(self, phase: Phase) -> None:
        self._record(phase)

    def begin_wait(self) -> None:
        self._record("lap")

    def end_wait(self) -> None:
        self._record("wait")

    def total_s(self) -> dict[Phase, float]:
        self._read(leave=1)
        return super().total_s()

    def _record(self, ended: Phase | Literal["lap", "wait"] | None) -> None:
        self._read(leave=_MOST_PENDING)
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._pending.append((ended, event))

    def _read(self, *, leave: int) -> None:
        """Read the oldest events, all but `leave`; waits for a GPU that has not reached them."""
        while len(self._pending) > leave:
            begin = self._pending.popleft()[1]
            ended, end = self._pending[0]
            end.synchronize()
            elapsed_s = begin.elapsed_time(end) / 1000
            if ended == "wait":
                self._waited_s += elapsed_s
            elif ended == "lap":
                self._worked_s += elapsed_s
            else:
                if ended is None:
                    self._waited_s = 0.0
                else:
                    self._add(ended, self._worked_s + elapsed_s)
                self._worked_s = 0.0
            self._free.append(begin)


_BACKWARD = 2
"""The backward pass takes twice the forward's arithmetic: the gradients of weights and of inputs each are as many products
(Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, arXiv:2104.04473, appendix)."""


@dataclass(frozen=True)
class _Peak:
    """Dense FLOP/s in units of 1e12, from the makers' data sheets; the figures with sparsity are twice as high."""

    fp16: float
    bf16: float | None
    """None: the device has no instructions for it."""
    tf32: float | None
    float32: float


_H100_SXM = _Peak(989.4, 989.4, 494.7, 66.9)
_H100_NVL = _Peak(835.5, 835.5, 417.5, 60)
_A100 = _Peak(312, 312, 156, 19.5)
_V100_SXM2, _V100_PCIE = _Peak(125, None, None, 15.7), _Peak(112, None, None, 14)

# By the whole name that torch has for a device: names are parts of others (A10, A100, RTX A1000), and a name with more to it is
# another device: a slice of one (MIG), a virtual one, or one that was made for a single customer, with other clocks.
_PEAKS = {
    "NVIDIA GB200": _Peak(2500, 2500, 1250, 80),  # GB200 NVL72 datasheet, 1/72 of it
    "NVIDIA B200": _Peak(2250, 2250, 1125, 75),  # DGX B200 datasheet, 1/8 of it
    "NVIDIA GH200 120GB": _H100_SXM,  # GH200 datasheet
    "NVIDIA GH200 480GB": _H100_SXM,
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    "NVIDIA H200": _H100_SXM,  # H200 datasheet
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA H100 80GB HBM3": _H100_SXM,  # H100 datasheet: the SXM module
    "NVIDIA H100 PCIe": _Peak(756, 756, 378, 51),
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA A100-SXM4-40GB": _A100,  # A100 datasheet
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A40": _Peak(149.7, 149.7, 74.8, 37.4),  # A40 datasheet
    "NVIDIA A30": _Peak(165, 165, 82, 10.3),  # A30 datasheet
    "NVIDIA A10": _Peak(125, 125, 62.5, 31.2),  # A10 datasheet
    "NVIDIA A2": _Peak(18, 18, 9, 4.5),  # A2 datasheet
    "NVIDIA L40S": _Peak(362, 362, 183, 91.6),  # L40S datasheet
    "NVIDIA L40": _Peak(181, 181, 90.5, 90.5),  # L40 datasheet
    "NVIDIA L4": _Peak(121, 121, 60, 30.3),  # L4 datasheet
    "NVIDIA GeForce RTX 4090": _Peak(165.2, 165.2, 82.6, 82.6),  # Ada whitepaper, appendix A: sums in float32
    "NVIDIA GeForce RTX 3090": _Peak(71, 71, 35.6, 35.6),  # GA102 whitepaper, appendix A: sums in float32
    "Tesla V100-SXM2-16GB": _V100_SXM2,  # V100 datasheet
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": _Peak(130, None, None, 16.4),
    "Tesla T4": _Peak(65, None, None, 8.1),  # T4 datasheet
    # Matrix products in float32 do not round to TF32 there unless they are told to.
    "AMD Instinct MI300X": _Peak(1307.4, 1307.4, None, 163.4),  # MI300X datasheet
    "AMD Instinct MI250X": _Peak(191.5, 191.5, None, 47.85),  # MI250X datasheet, half of it: it is two devices
}


def training_flops(model: torch.nn.Module, forward: Callable[[Callable[..., Any]], Any]) -> float:
    """Return the floating-point operations of a forward and backward pass of a whole `model`, on any device.

    Counts what is in matrix products and convolutions, each product and each sum as one; recomputation does not count. Of a
    transformer these are 6 N + 12 L H Q T a token: N weights in matrix products, and the two products of attention in L layers
    of H heads of Q numbers over T tokens, as in Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B. Attention counts
    in full, as there, though a causal mask makes half of it needless, and a sliding window more. `forward` calls what it is
    given, in the model's place, with inputs of torch's meta device.
    """
    # On tensors without data: no arithmetic, memory or random numbers are spent.
    has_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    with torch.set_grad_enabled(has_frozen), FlopCounterMode(display=False, custom_mapping=_chunked_heads()) as counter:
        loss = forward(without_data(model))
        forwards: int = counter.get_total_flops()
        # Gradients of what is frozen are not computed, nor of what comes before it if nothing there is trained.
        if has_frozen:
            with suppress(RuntimeError):  # an operation without a backward pass on such tensors: then it is at most this
                loss.mean.backward()
                done: int = counter.get_total_flops()
                return float(done)
    return float((1 + _BACKWARD) * forwards)


def _chunked_heads() -> dict[Any, Callable[..., int]]:
    """Return the arithmetic of torch's linear cross entropy in chunks, which its counter takes for nothing."""
    with suppress(ImportError):  # torch before 2.13 has none
        importlib.import_module("torch.nn.modules.linear_cross_entropy")  # which registers them
    names = ("_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction")
    found = (getattr(torch.ops.torch_nn, name, None) for name in names)
    return dict(zip(filter(None, found), (_reduced_head, _head), strict=False))


def _head(inputs: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any) -> int:  # noqa: ARG001
    """The logits of inputs [N, hidden], with a weight [classes, hidden]."""
    return 2 * inputs[0] * weight[0] * weight[1]


def _reduced_head(inputs: Sequence[int], weight: Sequence[int], *settings: Any, out_shape: Any) -> int:
    """The logits, and the gradients of inputs and weight if these are wanted: it works them out in the forward pass."""
    *_, of_inputs, of_weight, _ = map(bool, settings)
    return _head(inputs, weight, out_shape=out_shape) * (1 + of_inputs + of_weight)


def peak_per_s(device: torch.device, *, mixed_precision: str) -> float | None:
    """Return the FLOP/s that the maker claims for a device, or None where none is known, as for CPUs.

    `mixed_precision` is Accelerate's: no, fp16 or bf16.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return peak_of(name, mixed_precision=mixed_precision, tf32=numerics.rounds_to_tf32(device))


def peak_of(name: str, *, mixed_precision: str, tf32: bool) -> float | None:
    """Return the FLOP/s of the device that torch calls so, or None for one that is not known, or not in this precision.

    `tf32`: whether float32 numbers may be rounded to it. Drivers of before 2021 left NVIDIA out of the names.
    """
    peak = _PEAKS.get(name) or _PEAKS.get(f"NVIDIA {name}")
    if peak is None:
        return None
    in_float32 = (peak.tf32 or peak.float32) if tf32 else peak.float32
    found = {"fp16": peak.fp16, "bf16": peak.bf16, "no": in_float32}[mixed_precision]
    return None if found is None else found * 1e12
