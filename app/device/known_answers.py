"""Operations with known answers: the result of a device, and how far rounding may take it from the right one.

Each operation is computed forward and backward in the precision that is asked for, twice, with memory in between that holds
something else, and compared with the same in float64 on the CPU. Inputs are the same everywhere and have as many digits as the
precision holds, so that nothing is rounded before the operation.

How far a sum of n products may be off: n roundings of the accumulator and two to the precision, of the sum and of a part of it,
times the sum of the absolute products (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). That sum and
n come from the same operation on absolute values, and on ones. Accumulators are float32 (float64 for float64), and some round
to zero, so that their epsilon counts and not its half. Where float32 factors may be rounded to TF32 (`numerics`), they have 10
bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.data.hash64 import GOLDEN64, mix64_array
from app.own_layers import without_data
from app.ranks import malloc, numerics

_TF32_EPSILON = 2.0**-9
"""Of 10 bits, and for two factors, that a device may cut off."""
_COPIES = {"cpu": 1}
_COPIES_ON_ACCELERATOR = 64
"""How often the samples of an operation are repeated: a GPU spreads them over its multiprocessors."""
_OLD_MEMORY = ((math.nan, 0x7F), (3e4, 0x46))
"""What memory that an operation takes holds before each of its two computations: numbers, and on CPUs bytes.

As bfloat16 and float32 the bytes are 3e38 and 1e4, so that what reads them is far off, and off by another number each time.
"""
_OLD_SIZES = tuple(2**power for power in range(6, 19))  # numbers


@dataclass(frozen=True)
class Operation:
    """An operation of tensors, of which the first `samples` have a first dimension of samples and the others are weights."""

    name: str
    apply: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[str, ...]
    """What its gradients are of, input by input."""
    samples: int = 1
    where: str = ""
    """The layer of the model that does so; empty for what every model may do."""


@dataclass(frozen=True)
class Element:
    """One number of an answer."""

    index: tuple[int, ...]
    found: float
    expected: float
    allowed: float
    """By how much rounding may change it."""


@dataclass(frozen=True)
class Answer:
    """What one device gave for one tensor of an operation."""

    operation: str
    part: str
    precision: str
    where: str
    digest: str
    """Of its bits in the first computation."""
    wrong: Element | None
    """The number that is furthest from what is right, if it is further than rounding takes it."""
    unsteady: Element | None
    """A number that the second computation gave other bits; `expected` is what the first gave."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it is the answer to."""
        return self.operation, self.part, self.precision, self.where


@dataclass(frozen=True)
class Computed:
    """An answer with its numbers."""

    answer: Answer
    found: Tensor
    """float64, on the CPU."""
    expected: Tensor


def _convolution(name: str, *, shape: tuple[int, ...], weight: tuple[int, ...], where: str = "", **options: Any) -> Operation:
    def apply(images: Tensor, kernels: Tensor) -> Tensor:
        return F.conv2d(images, kernels, **options)

    return Operation(name, apply, (shape, weight), ("images", "kernels"), where=where)


def _attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(queries, keys, values)


GENERAL = (
    Operation("matrix product", torch.matmul, ((64, 192), (192, 96)), ("first factor", "second factor")),
    _convolution("3x3 convolution", shape=(2, 16, 12, 12), weight=(32, 16, 3, 3), padding=1),
    _convolution("3x3 convolution with stride 2", shape=(2, 16, 12, 12), weight=(32, 16, 3, 3), padding=1, stride=2),
    _convolution("1x1 convolution with stride 2", shape=(2, 32, 12, 12), weight=(64, 32, 1, 1), stride=2),
    Operation("attention", _attention, ((1, 4, 48, 32),) * 3, ("queries", "keys", "values"), samples=3),
    Operation("reduction", lambda rows, weights: (rows * weights).sum(1), ((96, 768), (768,)), ("rows", "weights")),
)
"""What any model may compute."""

NARROW = (
    _convolution(
        "3x3 convolution with stride 2 on maps of 1x1", shape=(4, 64, 1, 1), weight=(128, 64, 3, 3), padding=1, stride=2
    ),
)
"""What few models compute, and what torch 2.15 computes wrongly in bf16 on processors with instructions for it."""


def narrow_convolutions(model: nn.Module, forward: Callable[[Callable[..., Any]], Any]) -> list[Operation]:
    """Return the model's convolutions, of more than a pixel, on maps that are smaller than their stride; each kind once.

    Kernels made for larger maps have failed there: oneDNN 3.13 with bf16, where a padded map is narrower than the stride. The
    sizes are found on torch's meta device, without arithmetic: `forward` calls what it is given, in the model's place, with
    inputs of that device.
    """
    found: dict[tuple[Any, ...], Operation] = {}
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
        key = (name, *options.values())
        found.setdefault(
            key, _convolution(name, shape=(4, channels, height, width), weight=weight, where=names[module], **options)
        )

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


def compute(device: torch.device, precision: torch.dtype, operations: Sequence[Operation]) -> Iterator[Computed]:
    """Yield what the device gives for each operation: its result, then its gradients."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), _deterministic():
        for operation in operations:
            yield from _compute(device, precision, operation)


def _compute(device: torch.device, precision: torch.dtype, operation: Operation) -> Iterator[Computed]:
    copies = _COPIES.get(device.type, _COPIES_ON_ACCELERATOR)
    exact = [_numbers(shape, precision, salt=place) for place, shape in enumerate(operation.shapes)]
    upstream = _numbers(tuple(operation.apply(*exact).shape), precision, salt=len(exact))
    expected = _run(operation.apply, exact, upstream)
    allowed = _allowed(operation, exact, upstream, precision=precision, device=device, copies=copies)

    given = [
        _repeated(number, copies if place < operation.samples else 1).to(device, precision)
        for place, number in enumerate(exact)
    ]
    sent = _repeated(upstream, copies).to(device, precision)
    twice = []
    for number, byte in _OLD_MEMORY:
        _leave_in_memory(number, device, precision)
        with malloc.filled_with(byte):
            twice.append([tensor.cpu() for tensor in _run(operation.apply, given, sent)])
    parts = ("result", *(f"gradient of the {part}" for part in operation.parts))
    for place, (part, first, second) in enumerate(zip(parts, *twice, strict=True)):
        of_samples = place <= operation.samples
        right, most = (_repeated(numbers, copies) if of_samples else numbers for numbers in (expected[place], allowed[place]))
        if not of_samples:
            right = right * copies
        name = str(precision).removeprefix("torch.")
        yield _judged((operation.name, part, name, operation.where), (first, second), right, most)


def _judged(key: tuple[str, str, str, str], twice: tuple[Tensor, Tensor], right: Tensor, most: Tensor) -> Computed:
    first, second = twice
    found = first.double()
    wrong = None
    for numbers in (found, second.double()):
        off = ((numbers - right).abs() / most).nan_to_num(nan=math.inf)
        if wrong is None and not bool((off <= 1).all()):
            wrong = _element(int(off.argmax()), numbers, right, most)
    other = (_bits(first) != _bits(second)).flatten()
    unsteady = _element(int(other.int().argmax()), second.double(), found, most) if bool(other.any()) else None
    digest = hashlib.blake2b(_bits(first).numpy().tobytes(), digest_size=8).hexdigest()
    answer = Answer(*key, digest, wrong, unsteady)
    return Computed(answer, found, right)


def _run(apply: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return the result and the gradients of all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = apply(*leaves)
    # Handing `upstream` to torch.autograd.grad gives the same, and imports a library for symbols: half a second.
    return [result.detach(), *torch.autograd.grad((result * upstream).sum(), leaves)]


def _allowed(
    operation: Operation,
    inputs: Sequence[Tensor],
    upstream: Tensor,
    *,
    precision: torch.dtype,
    device: torch.device,
    copies: int,
) -> list[Tensor]:
    """Return by how much rounding may change the result and each gradient, number by number."""
    wide = torch.float64 if precision == torch.float64 else torch.float32
    epsilon = torch.finfo(precision).eps
    if precision == torch.float32 and numerics.rounds_to_tf32(device):
        epsilon = _TF32_EPSILON
    accumulated = torch.finfo(wide).eps
    if operation.apply is _attention:
        queries, keys, values = inputs
        per_product = keys.shape[-2] * accumulated + epsilon
        bounds = _allowed_attention(queries, keys, values, upstream, per_product=per_product)
    else:
        sizes = _run(operation.apply, [tensor.abs() for tensor in inputs], upstream.abs())
        terms = _run(operation.apply, [torch.ones_like(tensor) for tensor in inputs], torch.ones_like(upstream))
        # The gradient of weights sums over the samples, of all copies.
        times = [1 if place <= operation.samples else copies for place in range(len(sizes))]
        bounds = [
            (number * many * accumulated + epsilon) * size * many
            for size, number, many in zip(sizes, terms, times, strict=True)
        ]
    # Below `tiny` a type has fewer digits.
    return [bound + torch.finfo(precision).tiny for bound in bounds]


def _allowed_attention(queries: Tensor, keys: Tensor, values: Tensor, upstream: Tensor, *, per_product: float) -> list[Tensor]:
    """Return the same for attention, [B, heads, L, D], with the relative error `per_product` of each product of matrices.

    An error d of the scores is a factor exp(2d) of the weights P, so that they are off by a share a = (2S + 2) e, with S the
    largest sum of absolute products in a score; dP = G V' has e, dS = P (dP - sum(G O)) at most 2a + 3e, its products with K
    and Q one e more: (4S + 8) e covers all of them, times the same formulas of absolute values.
    """
    scale = queries.shape[-1] ** -0.5
    weights = torch.softmax(queries @ keys.mT * scale, -1)
    size = float((queries.abs() @ keys.abs().mT).max()) * scale
    result = weights @ values.abs()
    of_scores = weights * (upstream.abs() @ values.abs().mT + (upstream.abs() * result).sum(-1, keepdim=True))
    sizes = [result, of_scores @ keys.abs() * scale, of_scores.mT @ queries.abs() * scale, weights.mT @ upstream.abs()]
    return [(4 * size + 8) * per_product * numbers for numbers in sizes]


def _numbers(shape: tuple[int, ...], precision: torch.dtype, *, salt: int) -> Tensor:
    """Return float64 numbers from -1 to 1 that are the same everywhere and have as many digits as the precision holds."""
    digits = 1 - round(math.log2(torch.finfo(precision).eps))
    places = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(1 + (salt << 32))
    whole = (mix64_array(places * np.uint64(GOLDEN64)) >> np.uint64(64 - digits)).astype(np.float64)
    return torch.from_numpy(whole / 2.0 ** (digits - 1) - 1).reshape(shape)


def _repeated(numbers: Tensor, copies: int) -> Tensor:
    """Return [copies * B, ...] from [B, ...]."""
    return numbers.repeat(copies, *[1] * (numbers.ndim - 1))


def _bits(tensor: Tensor) -> Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole)


def _element(place: int, found: Tensor, expected: Tensor, allowed: Tensor) -> Element:
    index = tuple(int(number) for number in np.unravel_index(place, found.shape))
    return Element(index, float(found[index]), float(expected[index]), float(allowed[index]))


def first_difference(found: Tensor, other: Tensor, expected: Tensor) -> Element:
    """Return the first number of `found` that is not that of `other`, with what is right."""
    return _element(int((found != other).flatten().int().argmax()), found, expected, torch.zeros_like(expected))


def _leave_in_memory(number: float, device: torch.device, precision: torch.dtype) -> None:
    """Take memory of many sizes, write the number there, and give it back: what reads before it writes, reads this."""
    taken = [torch.full((size,), number, device=device, dtype=precision) for size in _OLD_SIZES for _ in range(2)]
    del taken


@contextmanager
def _deterministic() -> Iterator[None]:
    """Have cuDNN choose kernels that give the same bits each time, as it may not in backward passes.

    Not by `torch.use_deterministic_algorithms`, which imports the compiler: a second. CPUs round alike each time; so do GPUs in
    products of matrices (cuBLAS documents it for GPUs of one model) and in attention over one block of keys, as here.
    """
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before
