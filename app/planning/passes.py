"""The memory of a forward and backward pass, phase by phase: a shallow model is traced, and a deep one follows.

A phase is what happens in one block, forward or backward, or between blocks. All blocks are alike, so what is held in a phase
grows by the same with every further block; the blocks in the middle lie between the first ones and the last.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from app import own_layers
from app.errors import RecipeError
from app.planning import ledger
from app.planning import model as models
from app.planning.ledger import Bytes, Ledger
from app.planning.model import Blueprint
from app.ranks import recomputing, sample_dropout
from app.task import Form

_SHALLOW = (2, 3)
"""Two depths with a first and a last block each."""
_SHALLOW_SHARDED = (3, 4)
"""Two depths with a first, second, last but one and last block each, of which two may be the same: FSDP2 gathers those at the
ends otherwise."""
LATER = ", of a later pass"
"""How the names of phases end that are not of a step's first pass."""


class How(NamedTuple):
    """How a pass is computed."""

    micro_batch: int
    precision: str = "no"
    half_weights: bool = False
    """Whether the weights are in half precision themselves, as DeepSpeed has them."""
    checkpoints: bool = False
    """Whether blocks are computed again in the backward pass."""
    passes: int = 1
    """Of a step."""
    keeps_gradients: bool = True
    """False: each goes to where there is a place for it already, such as a bucket."""
    shards: int = 0
    """Ranks that FSDP2 divides the model among; 0: it does not."""
    channels_last: bool = False


def peaks(blueprint: Blueprint, how: How) -> dict[str, Bytes]:
    """Return what a pass holds at the worst moment of each phase, by kind, beside what is there before.

    Raises RecipeError for a loss that looks at numbers.
    """
    depth, depths = len(blueprint.blocks), _SHALLOW_SHARDED if how.shards else _SHALLOW
    if depth <= depths[1]:
        return _traced(blueprint, how)
    few, more = (_traced(blueprint.cut_to(shallow), how) for shallow in depths)
    return on_line(few, more, Fraction(depth - depths[0], depths[1] - depths[0]))


def on_line(few: Mapping[str, Bytes], more: Mapping[str, Bytes], along: Fraction) -> dict[str, Bytes]:
    """Return what lies so far along from `few` (0) to `more` (1), or beyond them, of the phases that both have."""
    return {
        phase: tuple(a + (b - a) * along.numerator // along.denominator for a, b in zip(held, more[phase], strict=True))
        for phase, held in few.items()
        if phase in more
    }


def _traced(blueprint: Blueprint, how: How) -> dict[str, Bytes]:
    model = copy.deepcopy(blueprint.model)  # before tensors have no data
    dropout = sample_dropout.give_to_samples(model, 0)
    group = ledger.group_of(how.shards) if how.shards else nullcontext()
    with group:
        mesh = _mesh(how.shards)
        with ledger.without_data():
            half = models.HALVES.get(how.precision) if how.half_weights else None
            models.bring_to_cpu(model, dtype=half)
            if how.checkpoints:
                recomputing.compute_blocks_again(model, blueprint.classes)
            if how.channels_last:
                own_layers.take_channels_last(model)
            if how.shards:
                _divide(model, mesh, how.precision, blueprint)
            inputs = half or next(model.parameters()).dtype
            order = torch.channels_last if how.channels_last else torch.contiguous_format
            batch = models.batch_of(blueprint, how.micro_batch, Form(inputs, order))
            return _of_step(blueprint, model, batch, how, dropout)


def _of_step(
    blueprint: Blueprint, model: nn.Module, batch: dict[str, Any], how: How, dropout: sample_dropout.PassDraws
) -> dict[str, Bytes]:
    book = Ledger()
    book.ignore(iter([*model.parameters(), *model.buffers()]))
    watch = _Watch(book, blueprint, model)
    for parameter in model.parameters():
        if parameter.requires_grad and not how.shards:
            parameter.register_post_accumulate_grad_hook(functools.partial(_arrived, book, keeps=how.keeps_gradients))
    call = models.called(model, how.precision, by_autocast=not how.half_weights)
    with book:
        for tensor in pytree.tree_leaves(batch):
            if isinstance(tensor, Tensor):
                book.call_it(tensor, "activations")
        for number in range(min(how.passes, 2)):
            watch.forward(LATER if number else "")
            dropout.begin(batch["samples"])
            try:
                loss = blueprint.task.loss(call, batch).mean
            except ledger.NEEDS_NUMBERS as error:
                raise RecipeError(
                    f"{type(blueprint.task).__name__}.loss reads values of tensors "
                    f"({str(error).splitlines()[0]}), so its memory cannot be planned: remove .item() and "
                    "conditions on tensors"
                ) from None
            watch.backward()
            loss.backward()
            del loss
    return watch.told(book.peaks)


def _arrived(book: Ledger, parameter: Tensor, *, keeps: bool) -> None:
    if parameter.grad is not None:
        book.call_it(parameter.grad, "gradients")
    if not keeps:
        parameter.grad = None


class _Watch:
    """Tells the ledger in which phase a pass is."""

    def __init__(self, book: Ledger, blueprint: Blueprint, model: nn.Module) -> None:
        self._book, self._is_backward, self._end = book, False, ""
        self._divided = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        self._last = len(blueprint.blocks) - 1
        for number, name in enumerate(blueprint.blocks):
            place = self._place(number)
            block = model.get_submodule(name)
            block.register_forward_pre_hook(functools.partial(self._enters, f"forward {place}"))
            block.register_forward_hook(functools.partial(self._leaves, f"backward {place}"))
        for module in model.modules():  # after FSDP2's own hooks
            module.register_forward_pre_hook(self._gathered)
        head = model.get_submodule(blueprint.task.head(model)) if hasattr(blueprint.task, "head") else None
        if head is not None and head is not model:
            head.register_forward_pre_hook(self._enters_head)

    def _place(self, number: int) -> str:
        return str(number) if number < 2 else f"-{self._last - number}" if self._last - number < 2 else "between"

    def told(self, peaks: dict[str, Bytes]) -> dict[str, Bytes]:
        """Return the peaks, those of a block that is both near the first and near the last by both names."""
        both = {
            f"{part} -{self._last - number}{end}": peaks[name]
            for number in range(max(self._last - 1, 0), min(self._last + 1, 2))
            for part in ("forward", "backward")
            for end in ("", LATER)
            if (name := f"{part} {number}{end}") in peaks
        }
        return {**peaks, **both}

    def forward(self, end: str = "") -> None:
        """A pass begins; `end`: of the names of its phases."""
        self._is_backward, self._book.kind, self._end = False, "activations", end
        self._begin("forward")

    def backward(self) -> None:
        """Its backward part begins."""
        self._is_backward = True
        self._begin("backward")

    def _begin(self, phase: str) -> None:
        for parameter in self._divided:
            if parameter.grad is not None:
                self._book.call_it(parameter.grad, "gradients")
        self._book.begin(phase + self._end)

    def _enters(self, phase: str, *_: Any) -> None:
        if not self._is_backward:
            self._begin(phase)

    def _leaves(self, phase: str, _: nn.Module, __: Any, outputs: Any) -> None:
        if self._is_backward:
            return
        self._begin("forward, after a block")
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin(phase))

    def _enters_head(self, _: nn.Module, inputs: Any) -> None:
        if self._is_backward:
            return
        self._begin("forward, head")
        self._book.kind = "loss"
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._leaves_head)

    def _leaves_head(self, _: Tensor) -> None:
        self._book.kind = "activations"
        self._begin("backward, after the head")

    def _gathered(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                self._book.call_it(parameter, "weights")


def _mesh(shards: int) -> Any:
    """The mesh that FSDP2 divides over, made before tensors have no data: it reads numbers."""
    if not shards:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (shards,), mesh_dim_names=("dp_shard",))


def _divide(model: nn.Module, mesh: Any, precision: str, blueprint: Blueprint) -> None:
    """Divide the model by Accelerate's own function, as the shipped preset says it and `app/initial/fsdp2.py` does it."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    wrap: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 4_000_000}
    if blueprint.classes:
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": sorted(blueprint.classes)}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **wrap)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp_shard",)),
        mixed_precision=precision,
        is_main_process=True,
    )
    fsdp2_prepare_model(accelerator, model)
