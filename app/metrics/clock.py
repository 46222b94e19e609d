"""Time of one process by phase, its waits for other ranks, and the floating-point operations of a sample.

Phases end at a lap. On a CPU a lap is read from the host's clock. A GPU works through its queue while the host is ahead of it,
so there a lap is an event in the GPU's own queue (CUDA events: docs.pytorch.org/docs/stable/notes/cuda.html, "Asynchronous
execution"): the time in which it idled for data is then the wait, however long the host was asleep.

Within a lap the time in which the process waits for other ranks (`begin_wait` to `end_wait`) is a phase of its own: exposed
communication, which no work hides. It is measured without waiting for a GPU. DDP is timed by callbacks around its own, at the
end of a backward pass. FSDP2 and DeepSpeed are Python: on a CPU their ranks wait in torch's `Work.wait`; on GPUs their streams
wait for events, or for a collective that is put into them. torch has no hook there, so the methods through which both go are
replaced by timed ones while a run trains.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from app.distributed import model_preparation, numerics
from app.distributed.numerics import without_data

Phase = Literal["data_wait", "forward_backward", "optimizer", "communication", "other"]
"""`communication` is the part of a lap spent waiting for other ranks; `other` is the rest: counting, logging, agreeing."""
_PHASES: tuple[Phase, ...] = get_args(Phase)
_MOST_PENDING = 512
"""Marks that are kept until they are read: a GPU's queue is not longer."""


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
        self._held_s, self._spent_s, self._since_s, self._is_paused = 0.0, 0.0, time.perf_counter(), False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._phases_s = dict.fromkeys(_PHASES, 0.0)
        self._begun_s = 0.0
        """Time of the current lap before its last wait, without waits."""
        self._marks: deque[tuple[Phase | Literal["lap", "pause"], Any]] = deque()
        """Moments that are not read yet, each with what ends there: a phase, the part of a lap before a wait, or a pause."""
        self._mark("pause")

    @property
    def training_s(self) -> float:
        """Time since the start, without pauses."""
        return self._spent_s + time.perf_counter() - self._since_s

    def lap(self, phase: Phase) -> None:
        """End a lap: the time since the last one belongs to this phase."""
        self._mark(phase)

    def begin_wait(self) -> bool:
        """Note that the process begins to wait for other ranks; return False, and note nothing, in a pause."""
        if not self._is_paused:
            self._mark("lap")
        return not self._is_paused

    def end_wait(self) -> None:
        """Note that the wait is over."""
        self._mark("communication")

    def spent(self) -> Spent:
        """Return the time since the start; the phases up to the last lap. Waits for a GPU to reach it."""
        self._read(leave=1)
        return Spent(self.training_s, self._held_s, dict(self._phases_s))

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
            self._mark("pause")
            self._since_s = time.perf_counter()
            self.pause_s = self._since_s - start_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the block as saving, which is not training."""
        with self.paused():
            yield
        self._held_s += self.pause_s

    def _mark(self, ended: Phase | Literal["lap", "pause"]) -> None:
        self._read(leave=_MOST_PENDING)
        moment: Any = time.perf_counter()
        if self._stream is not None:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(self._stream)
        self._marks.append((ended, moment))

    def _read(self, *, leave: int) -> None:
        """Read the oldest marks, all but `leave`; waits for a GPU that has not reached them."""
        while len(self._marks) > leave:
            begin = self._marks.popleft()[1]
            ended, end = self._marks[0]
            if self._stream is None:
                elapsed_s = end - begin
            else:
                end.synchronize()
                elapsed_s = begin.elapsed_time(end) / 1000
            if ended == "lap":
                self._begun_s += elapsed_s
            elif ended == "communication":
                self._phases_s[ended] += elapsed_s
            elif ended != "pause":
                self._phases_s[ended] += self._begun_s + elapsed_s
                self._begun_s = 0.0


@contextmanager
def waits_timed(model: torch.nn.Module, clock: Clock, device: torch.device) -> Iterator[None]:
    """Measure within the block when this process, which trains a prepared `model`, waits for other ranks."""
    inner = model_preparation.uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        with _backward_passes_timed(inner, clock):
            yield
        return
    waits: list[tuple[Any, str]] = [(dist.Work, "wait"), (_functional_collectives, "wait_tensor")]
    training: torch.cuda.Stream | None = None
    if device.type == "cuda":
        training = torch.cuda.current_stream(device)
        # Their names differ between versions of torch.
        kinds = ("all", "barrier", "broadcast", "gather", "reduce", "scatter")
        waits += [(dist.ProcessGroup, name) for name in vars(dist.ProcessGroup) if name.lstrip("_").startswith(kinds)]
        waits += [(torch.cuda.Stream, "synchronize"), (torch.cuda.Stream, "wait_event")]
    originals = [vars(owner)[name] for owner, name in waits] if dist.is_initialized() else []
    try:
        for (owner, name), original in zip(waits, originals, strict=False):
            setattr(owner, name, _timed(original, clock, training))
        yield
    finally:
        for (owner, name), original in zip(waits, originals, strict=False):
            setattr(owner, name, original)


def _timed(wait: Callable[..., Any], clock: Clock, training: torch.cuda.Stream | None) -> Callable[..., Any]:
    """Return a function in which this process may wait, and which measures how long. `training` is the stream that trains."""

    @functools.wraps(wait)
    def timed(*args: Any, **keywords: Any) -> Any:
        # Threads that Python has started write checkpoints. Torch's own run the backward passes on GPUs.
        is_training = type(threading.current_thread()) is not threading.Thread
        if training is not None:
            stream = args[0] if wait.__name__ == "wait_event" else torch.cuda.current_stream(training.device)
            is_training = is_training and bool(stream == training)
        if not is_training or not clock.begin_wait():
            return wait(*args, **keywords)
        try:
            return wait(*args, **keywords)
        finally:
            clock.end_wait()

    return timed


@contextmanager
def _backward_passes_timed(ddp: DistributedDataParallel, clock: Clock) -> Iterator[None]:
    """Measure the rest of DDP's communication after a backward pass has computed its last gradient.

    DDP waits for it, or has the stream wait, in a callback at the end of the pass, which it asks for when the last gradient is
    there (torch/csrc/distributed/c10d/reducer.cpp, `mark_variable_ready`). Callbacks are called in the order in which they were
    asked for, and may ask for more (torch/csrc/autograd/engine.cpp, `exec_post_processing`). Ours is asked for with a gradient,
    before DDP takes note of that, so it comes before DDP's; and what it asks for comes after.
    """
    ask_for = torch.autograd.Variable._execution_engine.queue_callback

    def begin() -> None:
        if clock.begin_wait():
            ask_for(clock.end_wait)

    def see(_gradient: torch.Tensor) -> None:
        if ddp.require_backward_grad_sync:
            ask_for(begin)

    # Who looks at a gradient may have it copied: let it be the smallest.
    smallest = min((weight for weight in ddp.parameters() if weight.requires_grad), key=torch.Tensor.numel)
    handle = smallest.register_hook(see)
    try:
        yield
    finally:
        handle.remove()


_BACKWARD = 2
"""The backward pass takes twice the forward's arithmetic: the gradients of weights and of inputs each are as many products
(Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, arXiv:2104.04473, appendix)."""
# By the whole name that torch has for a device: names are parts of others (A10, A100, RTX A1000), and a name with more to it is
# another device: a slice of one (MIG), a virtual one, or one that was made for a single customer, with other clocks.
_PEAKS: dict[str, tuple[float, float | None, float | None, float]] = {
    "NVIDIA GB200": (2500, 2500, 1250, 80),  # GB200 NVL72 datasheet, 1/72 of it
    "NVIDIA B200": (2250, 2250, 1125, 75),  # DGX B200 datasheet, 1/8 of it
    **dict.fromkeys(  # H100 datasheet: the SXM module; GH200 and H200 datasheets
        ("NVIDIA GH200 120GB", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e", "NVIDIA H200", "NVIDIA H100 80GB HBM3"),
        (989.4, 989.4, 494.7, 66.9),
    ),
    **dict.fromkeys(("NVIDIA H200 NVL", "NVIDIA H100 NVL"), (835.5, 835.5, 417.5, 60)),
    "NVIDIA H100 PCIe": (756, 756, 378, 51),
    **dict.fromkeys(  # A100 datasheet
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        (312, 312, 156, 19.5),
    ),
    "NVIDIA A40": (149.7, 149.7, 74.8, 37.4),  # A40 datasheet
    "NVIDIA A30": (165, 165, 82, 10.3),  # A30 datasheet
    "NVIDIA A10": (125, 125, 62.5, 31.2),  # A10 datasheet
    "NVIDIA L40S": (362, 362, 183, 91.6),  # L40S datasheet
    "NVIDIA L40": (181, 181, 90.5, 90.5),  # L40 datasheet
    "NVIDIA L4": (121, 121, 60, 30.3),  # L4 datasheet
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),  # Ada whitepaper, appendix A: sums in float32
    "NVIDIA GeForce RTX 3090": (71, 71, 35.6, 35.6),  # GA102 whitepaper, appendix A: sums in float32
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (125, None, None, 15.7)),  # V100 datasheet
    **dict.fromkeys(("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), (112, None, None, 14)),
    "Tesla T4": (65, None, None, 8.1),  # T4 datasheet
    # Matrix products in float32 do not round to TF32 there unless they are told to.
    "AMD Instinct MI300X": (1307.4, 1307.4, None, 163.4),  # MI300X datasheet
    "AMD Instinct MI250X": (191.5, 191.5, None, 47.85),  # MI250X datasheet, half of it: it is two devices
}
"""Dense FLOP/s in fp16, bf16, TF32 and float32, in units of 1e12, from the makers' data sheets; the figures with sparsity are
twice as high. None: the device has no instructions for it."""


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
    with suppress(ImportError):  # torch 2.11, which GPU machines may have, has none
        importlib.import_module("torch.nn.modules.linear_cross_entropy")  # registers its operators
    heads = {"_linear_cross_entropy_batch_chunked": _reduced_head, "_linear_cross_entropy_batch_chunked_no_reduction": _head}
    return {getattr(torch.ops.torch_nn, name): count for name, count in heads.items() if hasattr(torch.ops.torch_nn, name)}


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

    `tf32`: whether float32 numbers may be rounded to it.
    """
    if name not in _PEAKS:
        return None
    fp16, bf16, in_tf32, float32 = _PEAKS[name]
    found = {"fp16": fp16, "bf16": bf16, "no": in_tf32 if tf32 and in_tf32 else float32}[mixed_precision]
    return None if found is None else found * 1e12
