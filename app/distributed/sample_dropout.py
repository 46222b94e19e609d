"""Dropout per sample: the mask of a layer is a function of the seed and the sample.

A mask is a hash of (seed, sample number, name of the layer, which of its calls in the pass, place in the sample). The sample
number holds the epoch. So a sample loses the same activations in any batch, on any rank, in any pass of a step, after a resume,
and in a forward pass that is computed a second time to save memory.

In compiled code a layer's mask comes from an operator, `samerun::dropped`, that torch does not look into: masks and their
numbering are the same as in eager mode.

A place in a mask costs an exclusive or and a product of 32-bit integers: each place has a random number, the same for all
samples, and each (sample, layer, call) has two, one for the exclusive or and an odd one for the product. On CPUs that takes
less time than torch's own draws (docs/same-run.md).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from app.data.draws import mix64_tensor
from app.data.order import derive_key
from app.data.samples import Batch
from app.distributed import numerics
from app.environment.topology import listed
from app.errors import RecipeError, TrainingError
from app.recipe.schema import BatchPlan

_MOST_NAMED = 3
_PIECE = 2**20
"""Number of places that get their numbers together: 64-bit numbers of all of them would take twice the memory of the result."""


_DIMENSIONS: dict[Any, int | None] = {
    nn.Dropout.forward: None,
    nn.Dropout1d.forward: 2,
    nn.Dropout2d.forward: 2,
    nn.Dropout3d.forward: 2,
}
"""Leading dimensions of the input over which torch's layers draw: samples and channels; None: all."""
_LAYERS: WeakValueDictionary[int, SampleDropout] = WeakValueDictionary()
"""The layers of this process by the numbers that `samerun::dropped` gets: an operator takes no objects."""
_NUMBERS = itertools.count()


class PassDraws:
    """Random numbers of a model's dropout layers, for the samples of one forward pass after the other."""

    def __init__(self, seed: int) -> None:
        self.samples: Tensor | None = None
        """Sample numbers of the pass, int64 [B], on its device; None: no training pass is under way."""
        self.passes = 0
        """Number of passes that have begun."""
        self.part = 0
        """Index of the part of each sample that this process computes; under context parallelism a sample has equal parts."""
        self.layers: list[SampleDropout] = []
        self.left: dict[str, str] = {}
        """Layers whose draws cannot belong to samples, and why."""
        self.drawn, self.remedy = "", ""
        """Where a pass draws otherwise, and the settings that turn it off; empty: not known."""
        self.growing: set[str] | None = None
        """Layers whose inputs' first dimension is known to grow with the batch (`compare`); None: nothing was compared."""
        self.rows: dict[str, list[int]] | None = None
        """While rows are counted (`counted`): the first dimensions of the inputs of each layer's calls."""
        self._plan: tuple[BatchPlan, int] | None = None
        self._seed = seed
        self._streams: dict[tuple[str, int], int] = {}
        """Layers and numbers of calls that were met so far, and their places in `_of_pass`."""
        self._of_pass: list[tuple[Tensor, Tensor]] = []
        self._keys = torch.empty(0, 1, dtype=torch.int64)
        """One for each stream, [L, 1]."""
        self._places = torch.empty(0, dtype=torch.int32)

    def begin(self, samples: Tensor) -> None:
        """Begin a forward pass over these samples, int64 [B]. A backward pass belongs to the last one that has begun."""
        self.samples, self._of_pass = samples, []  # the numbers of all layers are made at once, when the first is called
        self.passes += 1

    def end(self) -> None:
        """Let layers draw from torch's generator from now on, as in a pass that is not over samples of the training."""
        self.samples, self._of_pass = None, []

    def bits(self, layer: str, call: int, count: int) -> Tensor:
        """Return random bits int32 [B, count], for a layer's call of this number within the pass."""
        assert self.samples is not None
        stream = self._streams.setdefault((layer, call), len(self._streams))
        if stream >= len(self._of_pass):
            self._of_pass = self._numbers(self.samples)
        mixed, factor = self._of_pass[stream]
        first = self.part * count
        if len(self._places) < first + count or self._places.device != self.samples.device:
            self._places = _places(first + count, self.samples.device)
        return torch.bitwise_xor(self._places[first : first + count], mixed).mul_(factor)

    def __deepcopy__(self, memo: object) -> PassDraws:
        return self  # layers of a copied model get the same passes

    def said_of_others(self, plan: BatchPlan, *, parts: int = 1) -> str:
        """Return a sentence on what forward passes draw that belongs to no sample: a note where a step is one pass.

        `parts` is how many processes compute a pass together.
        """
        known = [f"{name}: {why}" for name, why in self.left.items()]
        what = listed(known, _MOST_NAMED) or self.drawn or "functional dropout, as in attention, or torch.rand"
        said = f"forward passes use random numbers that do not belong to samples ({what})"
        if plan.passes * parts == 1:
            return f"{said}: on several processes or with accumulation this recipe is refused, because its result would differ"
        off = (
            "Set the dropout of attention to 0 (nn.MultiheadAttention(dropout=0.0); attention_dropout=0.0, attn_pdrop=0.0 or "
            "attention_probs_dropout_prob=0.0 of transformers), use"
        )
        if self.drawn:
            off = f"Set {self.remedy} to 0, use" if self.remedy else "Use"
        return (
            f"{said}, so the result would depend on the topology (here {plan}). {off} layers such as nn.Dropout on inputs "
            "[B, ...], draw in the task's `preprocess`, or train on one process without accumulation"
        )

    def refuse_others(self, plan: BatchPlan, *, parts: int = 1) -> None:
        """Raise RecipeError for layers that are `left`, where a step is several passes, or several processes' together.

        So does a layer that is left later, in a pass.
        """
        self._plan = plan, parts
        if self.left and plan.passes * parts > 1:
            raise RecipeError(self.said_of_others(plan, parts=parts))

    def leave(self, layer: str, why: str) -> None:
        """Let torch draw for a layer from now on. Raises RecipeError where that is refused."""
        self.left[layer] = why
        if self._plan is not None:
            plan, parts = self._plan
            self.refuse_others(plan, parts=parts)

    @contextmanager
    def counted(self) -> Iterator[dict[str, list[int]]]:
        """Return the block in which layers drop nothing, and note the first dimension of the input of each of their calls."""
        self.rows = defaultdict(list)
        try:
            yield self.rows
        finally:
            self.rows = None

    def compare(self, whole: Mapping[str, list[int]], halves: Sequence[Mapping[str, list[int]]]) -> None:
        """See which layers' inputs have the samples in their first dimension, by the rows that were `counted`.

        `whole` are the rows of a pass, `halves` the rows of passes over half as many samples; none if a pass has always the
        same size. A layer whose rows are not twice as many is `left`.
        """
        self.growing = set()
        for name, rows in whole.items():
            if all([2 * count for count in half.get(name, [])] == rows for half in halves):
                self.growing.add(name)
            else:
                self.left[name] = f"the first dimension of its input, {rows[0]}, is not that of the samples (batch_first=True?)"

    def look(self, forward: Callable[[int], Any]) -> None:
        """Do as `compare`; `forward` computes a pass over a batch that is repeated so many times, on torch's meta device."""
        if any(layer.p > 0 for layer in self.layers):
            with self.counted() as once:
                forward(1)
            with self.counted() as twice:
                forward(2)
            self.compare(twice, [once])

    def leave_all(self, why: str) -> None:
        """Let torch draw for every layer: nothing could be compared."""
        self.growing = set()
        self.left |= {layer.name: why for layer in self.layers if layer.p > 0}

    def _numbers(self, samples: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what places are mixed with and multiplied by, each int32 [B, 1], for every layer and call that is known."""
        if len(self._keys) != len(self._streams) or self._keys.device != samples.device:
            words = [derive_key(self._seed, "dropout", *stream) for stream in self._streams]
            self._keys = torch.tensor([[word - 2**64 if word >= 2**63 else word] for word in words], device=samples.device)
        halves = mix64_tensor(mix64_tensor(samples + derive_key(self._seed, "dropout") // 2) ^ self._keys).view(torch.int32)
        mixed, factors = halves.view(len(self._keys), len(samples), 2).split(1, dim=-1)
        return list(zip(mixed.unbind(0), (factors | 1).unbind(0), strict=True))


class SampleDropout(_DropoutNd):
    """In the place of a layer of torch's, torchvision's or timm's that drops at random: the same, with masks of the samples."""

    def __init__(self, p: float, name: str, dimensions: int | None, draws: PassDraws, of_torch: nn.Module) -> None:
        """`of_torch` draws where there is no training pass, or where the draws cannot belong to samples."""
        super().__init__(p)
        self.name = name
        self._dimensions, self._draws = dimensions, draws
        self._of_torch = [of_torch]  # not a part of this one: the names of parts stay unchanged
        self._enlist()
        self._pass, self._calls, self._again = -1, 0, 0
        """The last pass, how often the layer was called in it, and how often in its backward pass."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name for it)
        """Return the activations [B, ...] or [B*k, ...], with what is dropped 0 and the rest larger, so that means stay."""
        if torch.compiler.is_compiling():
            if not self.training or self.p == 0:
                return input
            if self.p == 1:
                return input * 0
            # torch merges calls with equal arguments (2.13), but no empty tensors: so each call stays a call.
            dropped = torch.ops.samerun.dropped(input, self._number, torch.empty(0), self._dimensions)
            return (input * (1 / (1 - self.p))).masked_fill(dropped, 0.0)
        if self._draws.rows is not None:
            if self.p > 0:
                self._draws.rows[self.name].append(len(input) if input.ndim else 0)
            return input
        if not self.training or self.p == 0 or input.numel() == 0:
            return input
        if not self._belongs_to_samples(input):
            drawn: Tensor = self._of_torch[0].train(self.training)(input)
            return drawn
        if self.p == 1:
            return input * 0
        output = (input * (1 / (1 - self.p))).masked_fill_(self._mask(input), 0.0)
        if self._calls > 1 and output.grad_fn is not None:
            output.grad_fn.register_hook(self._check_calls)
        return output

    def dropped(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return what compiled code drops of an input, as `_mask` does.

        Raises TrainingError for a recomputation of one of several calls: compiled code gives no sign which it is.
        """
        if input.numel() == 0 or not self._belongs_to_samples(input):
            ones = input.new_ones(_drawn_shape(input, self._dimensions))
            drawn: Tensor = self._of_torch[0].train()(ones)
            return drawn == 0
        mask = self._mask(input)
        if self._again and self._calls > 1:
            raise TrainingError(
                f"the dropout layer {self.name} is called {self._calls} times in a forward pass, and activation checkpointing "
                "recomputes it in compiled code, where it is unknown which of these calls is recomputed. Use a separate layer "
                "for each call, turn checkpointing off, or leave dynamo_backend out of preset and command line"
            )
        return mask

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy its own number, as it counts its own calls."""
        super().__setstate__(state)
        self._enlist()

    def _enlist(self) -> None:
        # A tensor, not an integer: layers of one kind in different blocks then share their compiled code.
        self._number = torch.tensor(next(_NUMBERS), device="cpu")
        _LAYERS[int(self._number)] = self

    def _belongs_to_samples(self, input: Tensor) -> bool:  # noqa: A002
        return self._draws.samples is not None and self._fits(input, len(self._draws.samples))

    def _mask(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return which places of an input are dropped, bool of its shape, or of one that expands to it."""
        assert self._draws.samples is not None
        call, shape = self._call(), _drawn_shape(input, self._dimensions)
        bits = self._draws.bits(self.name, call, shape.numel() // len(self._draws.samples))
        threshold = min(round(self.p * 2**32), 2**32 - 1) - 2**31  # of random int32, the share p is below it
        return bits.view(shape) < threshold

    def _fits(self, input: Tensor, size: int) -> bool:  # noqa: A002
        """Return whether each sample's part of the input is known; if not, the layer is left to torch."""
        if self.name in self._draws.left:
            return False
        rows = input.shape[0] if input.ndim else 0
        if self._draws.growing is not None and self.name not in self._draws.growing:
            why = "it was not called when the inputs of layers were compared at the start"
        elif rows == 0 or rows % size:
            why = f"the first dimension of its input {list(input.shape)} is not {size}, the number of samples"
        else:
            return True
        self._draws.leave(self.name, why)
        return False

    def _call(self) -> int:
        """Return which call in the pass this is: in a backward pass one that was made before, and is computed again."""
        if self._pass != self._draws.passes:
            self._pass, self._calls, self._again = self._draws.passes, 0, 0
        if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
            self._calls += 1
            return self._calls - 1
        self._again += 1
        return (self._again - 1) % max(self._calls, 1)

    def _check_calls(self, *_: Any) -> None:
        """Raise TrainingError if it is not known which calls were computed again: then not all have been, in their order."""
        if self._again % self._calls:
            raise TrainingError(
                f"the dropout layer {self.name} is called {self._calls} times in a forward pass, and "
                f"activation checkpointing recomputed only {self._again} of these calls in one piece, so it "
                "is unknown which. Use a separate layer for each call, checkpoint a part of the model that "
                "contains all of them, or turn checkpointing off"
            )


@torch.library.custom_op(
    "samerun::dropped",
    mutates_args=(),
    schema="(Tensor input, Tensor layer, Tensor call, int? dimensions) -> Tensor",
    # Two calls with the same input have different masks; a replayed graph would repeat a pass's masks.
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
def _dropped(input: Tensor, layer: Tensor, call: Tensor, dimensions: int | None) -> Tensor:  # noqa: A002, ARG001
    return _LAYERS[int(layer)].dropped(input)


@_dropped.register_fake
def _(input: Tensor, layer: Tensor, call: Tensor, dimensions: int | None) -> Tensor:  # noqa: A002, ARG001
    return input.new_empty(_drawn_shape(input, dimensions), dtype=torch.bool)


def _drawn_shape(input: Tensor, dimensions: int | None) -> torch.Size:  # noqa: A002
    """Return the shape of an input's mask: 1 in each dimension over which a layer does not draw."""
    count = input.ndim if dimensions is None else dimensions
    return torch.Size([*input.shape[:count], *[1] * (input.ndim - count)])


def give_to_samples(model: nn.Module, seed: int) -> PassDraws:
    """Put layers whose draws belong to samples in the place of the model's that drop at random; names stay unchanged.

    The result must be given each training pass (`PassDraws.begin`).
    """
    draws = PassDraws(seed)

    def own(layer: nn.Module, name: str) -> nn.Module | None:
        drops_samples = (_is_stochastic_depth(layer) and layer.mode == "row") or (
            _is_drop_path(layer) and getattr(layer, "scale_by_keep", True)
        )
        forward = type(layer).forward
        if not drops_samples and forward not in _DIMENSIONS:
            return None
        draws.layers.append(SampleDropout(rate(layer), name, 1 if drops_samples else _DIMENSIONS[forward], draws, layer))
        return draws.layers[-1]

    numerics.replace(model, own)
    for name, layer in model.named_modules():
        if rate(layer) > 0 and not isinstance(layer, SampleDropout):
            draws.left[name] = "it draws for a whole batch at once, or inside a function"
    return draws


def repeated(batch: Batch, times: int) -> Batch:
    """Return a batch of so many times the samples of this one, whose tensors are [B, ...]."""
    size = len(batch["samples"])
    return {
        name: torch.cat([value] * times) if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }


def rate(layer: nn.Module) -> float:
    """Return the share of its input that the layer drops at random while training; 0: it is no layer that is known to."""
    found: float = 0.0
    if isinstance(layer, nn.MultiheadAttention):
        found = layer.dropout
    elif isinstance(layer, _DropoutNd) or _is_stochastic_depth(layer):
        found = vars(layer)["p"]
    elif _is_drop_path(layer):
        found = vars(layer)["drop_prob"] or 0.0
    return found


def _is_stochastic_depth(layer: nn.Module) -> bool:
    return type(layer).__name__ == "StochasticDepth"  # torchvision's, by its name: its import is slow


def _is_drop_path(layer: nn.Module) -> bool:
    return type(layer).__name__.endswith("DropPath") and "drop_prob" in vars(layer)  # timm's and transformers'


def _places(count: int, device: torch.device) -> Tensor:
    """Return a random number for each place in a sample, int32 [count]."""
    found = torch.empty(count, dtype=torch.int32, device=device)
    for start in range(0, count, _PIECE):
        piece = torch.arange(start + 1, min(start + _PIECE, count) + 1, device=device)
        found[start : start + _PIECE] = mix64_tensor(piece).view(torch.int32)[::2]
    return found
