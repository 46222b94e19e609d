"""Checks whether devices compute right: results and gradients against float64, and against the other ranks.

`samerun doctor` examines `OPERATIONS` on every device. A training start examines only the model's own narrow convolutions, in
bf16 on CPUs: oneDNN 3.13 (torch 2.15) gives them gradients of uninitialized memory where a padded map is narrower than the
stride, on processors with bf16 instructions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import platform
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.distributed import numerics
from app.distributed.numerics import without_data
from app.distributed.runtime import Runtime
from app.environment import host
from app.environment.host import cpuinfo_field
from app.errors import DeviceError

_TF32_EPSILON = 2.0**-10
_ROUNDINGS, _ROUNDINGS_OF_HALF = 64, 8
"""Largest error that rounding explains, in epsilons of a result's largest number; half types are summed in float32."""
_MAX_FAULTS = 4
"""Faults named in one message."""


@dataclass(frozen=True)
class Operation:
    """An operation on tensors of these shapes."""

    name: str
    apply: Callable[..., Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    layer: str = ""
    """Layer of the model that computes it."""


@dataclass(frozen=True)
class Answer:
    """One result or gradient that a device computed."""

    what: str
    """For example `attention in bfloat16: gradient of the keys`."""
    layer: str
    digest: str
    """Hash of its bits."""
    error: float
    """Sum of the absolute differences from float64."""
    wrong: str
    """The error beyond rounding, in words; empty if there is none."""


class Fault(NamedTuple):
    """Something that is wrong."""

    host: str
    """Node to exclude."""
    text: str
    rank: int | None = None
    """Rank, if only one rank has the problem."""
    layer: str = ""
    """Layer of the model that is computed wrongly."""

    def __str__(self) -> str:
        return f"{self.host}: {self.text}" if self.rank is None else f"rank {self.rank} on {self.host}: {self.text}"


def _convolution(name: str, images: tuple[int, ...], kernels: tuple[int, ...], layer: str = "", **options: Any) -> Operation:
    return Operation(name, lambda x, w: F.conv2d(x, w, **options), {"images": images, "kernels": kernels}, layer)


OPERATIONS = (
    Operation("matrix product", torch.matmul, {"first factor": (64, 192), "second factor": (192, 96)}),
    _convolution("3x3 convolution", (2, 16, 12, 12), (32, 16, 3, 3), padding=1),
    _convolution("3x3 convolution with stride 2", (2, 16, 12, 12), (32, 16, 3, 3), padding=1, stride=2),
    _convolution("1x1 convolution with stride 2", (2, 32, 12, 12), (64, 32, 1, 1), stride=2),
    Operation("attention", F.scaled_dot_product_attention, dict.fromkeys(("queries", "keys", "values"), (1, 4, 48, 32))),
    Operation("reduction", lambda rows, weights: (rows * weights).sum(1), {"rows": (96, 768), "weights": (768,)}),
)


def narrow_convolutions(model: nn.Module, forward: Callable[[Callable[..., Any]], Any]) -> list[Operation]:
    """Return the model's convolutions on maps that are smaller than their stride, each kind once.

    The sizes are found on torch's meta device, without arithmetic: `forward` calls its argument in the model's place, with
    inputs of that device.
    """
    found: dict[Any, Operation] = {}
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        _, channels, height, width = inputs[0].shape
        across = [stride if kernel > 1 else 1 for kernel, stride in zip(module.kernel_size, module.stride, strict=True)]
        if module.padding_mode != "zeros" or (height >= across[0] and width >= across[1]):
            return
        kernel, stride = ("x".join(map(str, sizes)) for sizes in (module.kernel_size, module.stride))
        options = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}
        weight = tuple(module.weight.shape)
        name = f"{kernel} convolution of {channels} to {weight[0]} channels with stride {stride} on maps of {height}x{width}"
        operation = _convolution(name, (4, channels, height, width), weight, names[module], **options)
        found.setdefault((name, *options.values()), operation)

    hooks = [module.register_forward_pre_hook(look) for module in names if isinstance(module, nn.Conv2d)]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            forward(without_data(model))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return list(found.values())


def check(runtime: Runtime, operations: Sequence[Operation]) -> None:
    """Raise DeviceError on all ranks if one of them computes a layer of the model wrongly in bf16."""
    faults = examine(runtime, [torch.bfloat16], operations)
    if not faults:
        return
    named = list(map(str, faults[:_MAX_FAULTS]))
    if len(faults) > _MAX_FAULTS:
        named.append(f"and {len(faults) - _MAX_FAULTS} more")
    layers = ", ".join(dict.fromkeys(fault.layer for fault in faults))
    remedy = "use larger samples (data.image_size), another model, or mixed_precision 'no'"
    if len({fault.rank for fault in faults}) < runtime.launched.world_size:
        remedy += f", or exclude {', '.join(sorted({fault.host for fault in faults}))}"
    raise DeviceError("\n".join(["the arithmetic is wrong.", *named, f"The model computes this in {layers}: {remedy}."]))


def examine(runtime: Runtime, precisions: Sequence[torch.dtype], operations: Sequence[Operation]) -> list[Fault]:
    """Compute the operations on every rank; return all wrong results, the same list on all ranks."""
    pairs = itertools.product(precisions, operations)
    answers = [answer for precision, operation in pairs for answer in compute(runtime.device, precision, operation)]
    return compare(runtime.gather((socket.gethostname(), kind_of(runtime.device), answers)))


def compare(ranks: Sequence[tuple[str, str, Sequence[Answer]]]) -> list[Fault]:
    """Return the faults of ranks, given as host, kind of device and answers.

    Devices of the same kind round alike, so a rank with other bits than most is wrong too; if as many ranks have one result as
    another, the one closer to float64 is right. On accelerators, where a kernel can add in any order, bits count only if more
    than half of the ranks agree.
    """
    faults = [
        Fault(host, f"{answer.what} {answer.wrong}", rank, answer.layer)
        for rank, (host, _, answers) in enumerate(ranks)
        for answer in answers
        if answer.wrong
    ]
    groups: dict[tuple[str, str, str], dict[int, Answer]] = defaultdict(dict)
    for rank, (_, kind, answers) in enumerate(ranks):
        for answer in answers:
            if not answer.wrong:
                groups[kind, answer.what, answer.layer][rank] = answer
    for (kind, _, _), group in groups.items():
        counts = Counter(answer.digest for answer in group.values())
        usual_rank = max(group, key=lambda rank: (counts[group[rank].digest], -group[rank].error))
        usual = group[usual_rank].digest
        if not kind.startswith("cpu") and 2 * counts[usual] <= len(group):
            continue
        faults += [
            Fault(ranks[rank][0], f"{answer.what} has other bits than on rank {usual_rank}", rank, answer.layer)
            for rank, answer in group.items()
            if answer.digest != usual
        ]
    return faults


def compute(device: torch.device, precision: torch.dtype, operation: Operation) -> Iterator[Answer]:
    """Yield the device's result of an operation, then its gradients, compared with the same in float64 on the CPU."""
    name = str(precision).removeprefix("torch.")
    shapes = list(operation.shapes.values())
    inputs = [_numbers(shape, precision, seed) for seed, shape in enumerate(shapes)]
    upstream = _numbers(tuple(operation.apply(*inputs).shape), precision, len(shapes))
    expected = _forward_and_backward(operation, inputs, upstream)
    try:
        with host.filled_with(0x7F):  # uninitialized memory then holds 3e38, and not by chance the right numbers
            on_device = [tensor.to(device, precision) for tensor in inputs]
            found = _forward_and_backward(operation, on_device, upstream.to(device, precision))
    except RuntimeError as error:
        wrong = f"cannot be computed: {str(error).splitlines()[0]}"
        yield Answer(f"{operation.name} in {name}", operation.layer, "", math.inf, wrong)
        return
    epsilon = torch.finfo(precision).eps
    if precision == torch.float32 and numerics.rounds_to_tf32(device):
        epsilon = _TF32_EPSILON
    parts = ["result", *(f"gradient of the {part}" for part in operation.shapes)]
    for part, result, right in zip(parts, found, expected, strict=True):
        numbers = result.cpu().double()
        difference = (numbers - right).abs().nan_to_num(nan=math.inf)
        roundings = _ROUNDINGS_OF_HALF if precision.itemsize == 2 else _ROUNDINGS
        allowed, wrong = roundings * epsilon * float(right.abs().max()), ""
        if float(difference.max()) > allowed:
            index = tuple(int(place) for place in torch.unravel_index(difference.argmax(), difference.shape))
            values = f"is {float(numbers[index]):.9g} at {list(index)}, but {float(right[index]):.9g} is correct"
            wrong = f"{values}, and rounding explains at most {allowed:.1g}"
        digest = hashlib.blake2b(numbers.numpy().tobytes(), digest_size=8).hexdigest()
        yield Answer(f"{operation.name} in {name}: {part}", operation.layer, digest, float(difference.sum()), wrong)


def _forward_and_backward(operation: Operation, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    with torch.enable_grad(), torch.autocast(upstream.device.type, enabled=False):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        result = operation.apply(*leaves)
        # Handing `upstream` to torch.autograd.grad gives the same, and imports a library for symbols: half a second.
        return [result.detach(), *torch.autograd.grad((result * upstream).sum(), leaves)]


def _numbers(shape: tuple[int, ...], precision: torch.dtype, seed: int) -> Tensor:
    """Return numbers from -1 to 1, the same on all ranks, that the precision holds exactly, as float64."""
    drawn = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return drawn.to(precision).double()


def kind_of(device: torch.device) -> str:
    """Return what devices that round alike have in common: model, instructions, threads and torch."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} multiprocessors, torch {torch.__version__}"
    if device.type != "cpu":
        return f"{device.type}, torch {torch.__version__}"
    processor = " ".join(map(cpuinfo_field, ("model name", "flags", "Features", "cache size")))
    return (
        f"cpu {platform.machine()} {processor}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
