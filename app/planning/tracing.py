"""A recipe's model without data (`Blueprint`), and the memory of its passes, traced operation by operation.

A shallow model is traced, and a deep one follows: what is held in a phase, which is one block, forward or backward, or what is
between blocks, grows by the same amount with each further block; blocks in the middle are between the first ones and the last.

This module uses private parts of torch: fake tensors (`torch._subclasses`), modes that see each operation
(`torch.utils._python_dispatch`) and the process group without processes (`torch.testing._internal`). torch's own tracker of
memory, `torch.distributed._tools.mem_tracker`, works in the same way; tests/planning compares this one with it. That one has no
phases of a step, and takes several times as long.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from app import tasks
from app.distributed import model_preparation, numerics, sample_dropout
from app.errors import DataError, RecipeError
from app.init.filling import check_sequences, transformers_unaware
from app.init.tensor_parallel import DIVIDED, check, rules_of
from app.init.units import block_classes, places
from app.optim import parameter_groups
from app.optim.parameter_groups import local
from app.recipe.schema import Recipe
from app.task import Form, NeedsData

KINDS = ("weights", "gradients", "activations", "loss")
"""Kinds of memory of a pass: gathered weights, gradients, tensors of the layers, tensors of the last layer and the loss."""
Bytes = tuple[int, ...]
"""One number for each of KINDS."""
LATER = ", of a later pass"
"""Ending of the names of phases that belong to a step's second pass."""
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DEPTHS = (3, 4)
"""Depths that are traced, with a first, second, last but one and last block: FSDP2 gathers differently at the ends."""


@dataclass(frozen=True)
class Blueprint:
    """A task's model on torch's meta device."""

    task: Any
    facts: Mapping[str, Any]
    model: nn.Module
    blocks: tuple[str, ...]
    """Names of the blocks, in order, if all are alike and in one list; else empty."""
    classes: frozenset[str]
    """Classes of the model's blocks, by which FSDP2 shards."""

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @functools.cached_property
    def trainable(self) -> int:
        """Number of parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @functools.cached_property
    def largest_unit(self) -> int:
        """Parameters of the largest block or tensor outside of blocks: FSDP2 and ZeRO-3 gather at least as many at once."""
        blocks = [list(it.parameters()) for it in self.model.modules() if type(it).__name__ in self.classes]
        inside = {id(parameter) for block in blocks for parameter in block}
        outside = [parameter.numel() for parameter in self.model.parameters() if id(parameter) not in inside]
        return max([*outside, *(sum(parameter.numel() for parameter in block) for block in blocks)])

    def cut_to(self, depth: int) -> Blueprint:
        """Return a copy with the first `depth` blocks."""
        parent = self.blocks[0].rpartition(".")[0]
        blocks = self.model.get_submodule(parent)
        left_out = {id(block): nn.Identity() for block in list(blocks.children())[depth:]}  # not copied: a deep model has many
        model = copy.deepcopy(self.model, left_out)
        del model.get_submodule(parent)[depth:]  # type: ignore[operator]
        return replace(self, model=model, blocks=self.blocks[:depth])


@functools.lru_cache(maxsize=8)
def build_blueprint(recipe: Recipe) -> Blueprint:
    """Return the recipe's model without numbers.

    The data is opened if it exists, because the model can depend on it. Raises DataError if it does not exist and the recipe
    alone does not determine the model (`metadata_without_data`), and RecipeError.
    """
    task: Any = tasks.of(recipe)
    try:
        facts = task.samples("train").facts
    except (DataError, RecipeError):
        facts = task.metadata_without_data()
        if facts is None:
            raise
    with transformers_unaware(), torch.device("meta"):
        model = task.model(facts)
    model = model.to("meta")  # buffers that were made on a device by name
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    model = model.to(getattr(torch, recipe.train.dtype))
    parameter_groups.freeze(model, recipe.train.freeze or ())
    classes = frozenset(block_classes(task, model))
    return Blueprint(task, facts, model, _equal_blocks(model, classes), classes)


def _equal_blocks(model: nn.Module, classes: frozenset[str]) -> tuple[str, ...]:
    """Return the names of all blocks if they are in one list and have the same parameters."""
    named = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    shapes = {tuple((key, it.shape, it.requires_grad) for key, it in module.named_parameters()) for _, module in named}
    parents = {name.rpartition(".")[0] for name, _ in named}
    if len(shapes) != 1 or len(parents) != 1:
        return ()
    parent = model.get_submodule(next(iter(parents)))
    return tuple(name for name, _ in named) if isinstance(parent, nn.ModuleList) and len(parent) == len(named) else ()


@functools.lru_cache(maxsize=8)
def rank_blueprint(recipe: Recipe, tensor_parallel: int) -> Blueprint:
    """Return the part of the model that one process computes with, by the rules of real runs. Raises PresetError."""
    whole = build_blueprint(recipe)
    if tensor_parallel == 1:
        return whole
    check(whole.model, tensor_parallel)
    model = copy.deepcopy(whole.model)
    parts: dict[int, nn.Parameter] = {}  # by the whole weight, which can belong to several layers
    for name, rule in rules_of(model, tensor_parallel).items():
        if (dimension := DIVIDED.get(rule)) is None:
            continue
        module: Any = model.get_submodule(name)
        weight = module.weight
        if id(weight) not in parts:
            part = weight.narrow(dimension, 0, weight.shape[dimension] // tensor_parallel).clone()
            parts[id(weight)] = nn.Parameter(part, requires_grad=weight.requires_grad)
        module.weight, bias = parts[id(weight)], getattr(module, "bias", None)
        if bias is not None and dimension == 0:
            part = bias[: len(bias) // tensor_parallel].clone()
            module.bias = nn.Parameter(part, requires_grad=bias.requires_grad)
    return replace(whole, model=model)


def bring_to_cpu(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Allocate a model on the CPU (as fake tensors if that mode is on) and set it to training; `dtype`: of weights."""
    for uses in places(model).values():
        module, key = uses[0]
        meta = getattr(module, key)
        kind = dtype if dtype is not None and meta.is_floating_point() else meta.dtype
        made: Tensor = torch.empty_strided(meta.shape, meta.stride(), device="cpu", dtype=kind)
        if isinstance(meta, nn.Parameter):
            made = nn.Parameter(made, requires_grad=meta.requires_grad)
        for module, key in uses:
            setattr(module, key, made)
    model.train()


def make_batch(blueprint: Blueprint, size: int, form: Form) -> dict[str, Any]:
    """Return a batch of `size` samples on the CPU, as `preprocess` returns it, without numbers.

    Raises RecipeError for a task that has no example without data.
    """
    try:
        example = blueprint.task.example(blueprint.facts, form)
    except NeedsData:
        raise RecipeError(
            f"{type(blueprint.task).__name__} has no example batch, so its memory cannot be planned without "
            "data: give the task a method example(self, facts, form) (docs/your-own-task.md)"
        ) from None
    two = len(example["samples"])

    def resized(field: Any) -> Any:
        if isinstance(field, np.ndarray):
            return np.arange(size) if field.shape[:1] == (two,) else field
        if not isinstance(field, Tensor):
            return field
        shape = (size, *field.shape[1:]) if field.shape[:1] == (two,) else tuple(field.shape)
        made = torch.empty(shape, dtype=field.dtype, device="cpu")
        is_last = field.ndim == 4 and field.is_contiguous(memory_format=torch.channels_last) and not field.is_contiguous()
        return made.to(memory_format=torch.channels_last) if is_last else made

    return pytree.tree_map(resized, example)  # type: ignore[no-any-return]


class PassOptions(NamedTuple):
    """Settings of a pass."""

    micro_batch: int
    precision: str = "no"
    half_weights: bool = False
    """True if the weights themselves are in half precision, as under DeepSpeed."""
    recomputes: bool = False
    """True if blocks are recomputed in the backward pass."""
    keeps_gradients: bool = True
    """True if passes add up gradients in tensors of their own, and not in a bucket: then a second pass differs."""
    shards: int = 0
    """Ranks that FSDP2 shards the model over; 0: none."""
    context_parallel: int = 1
    """Ranks that split each sequence (FSDP2)."""
    channels_last: bool = False


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that are made while it is entered, and keeps the greatest sum of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations"
        """Kind of what is allocated from now on."""
        self.peaks: dict[str, Bytes] = {}
        """Bytes at the worst moment of each phase, by its name."""
        self._phases: tuple[str, ...] = ("",)
        self._now = dict.fromkeys(KINDS, 0)
        self._greatest: dict[str, int] = {}
        self._entries: dict[int, list[Any]] = {}
        """By the `id` of a storage: a weak reference to it, its kind (None: it existed before), its bytes."""

    def begin(self, *phases: str) -> None:
        """Begin or continue a phase of the step, by one or more names."""
        self._phases = phases
        self._look()

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that exist already."""
        for tensor in tensors:
            self._enter(local(tensor).untyped_storage(), None)

    def assign(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor, new or known, as of this kind."""
        storage = local(tensor).untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            self._enter(storage, kind)
        elif entry[1] is not None:
            self._now[entry[1]] -= entry[2]
            self._now[kind] += entry[2]
            entry[1] = kind

    def __enter__(self) -> AllocationTracker:
        """Start counting, also storages that are resized outside of operations, as FSDP2 does with gathered weights."""
        self._mode, self._resize = active_fake_mode(), torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            tracker._update(storage)
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
        if func is torch.ops.aten._grouped_mm.default:  # torch 2.14 cannot infer its shape in float32
            rows, columns, offsets = (*args, *(kwargs or {}).values())[:3]
            groups = () if columns.ndim == 3 else (len(offsets),)
            result = rows.new_empty(*groups, rows.shape[-2], columns.shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:  # not what DTensor computes to learn shapes
            name = func.__name__
            if name.startswith("_allgather_base_"):
                self.assign(args[0], "weights")
            elif name.startswith("_reduce_scatter_base_"):
                self.assign(args[0], "gradients")
                self.assign(args[1], "gradients")
            for tensor in _tensors(result):
                if not isinstance(tensor, DTensor):
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

    def _update(self, storage: torch.UntypedStorage) -> None:
        entry = self._entries.get(id(storage))
        if entry is not None and entry[1] is not None:
            self._now[entry[1]] += storage.nbytes() - entry[2]
            entry[2] = storage.nbytes()

    def _leave(self, key: int, _: object) -> None:
        _, kind, size = self._entries.pop(key)
        if kind is not None:
            self._now[kind] -= size

    def _look(self) -> None:
        total = sum(self._now.values())
        for phase in self._phases:
            if total > self._greatest.get(phase, -1):
                self._greatest[phase] = total
                self.peaks[phase] = tuple(self._now.values())


def peaks(blueprint: Blueprint, how: PassOptions) -> dict[str, Bytes]:
    """Return what a pass holds at the worst moment of each phase, by kind, beyond what existed before it.

    Raises RecipeError for a loss that looks at numbers.
    """
    depth = len(blueprint.blocks)
    if depth <= _DEPTHS[1]:
        return traced(blueprint, how)
    few, more = (traced(blueprint.cut_to(shallow), how) for shallow in _DEPTHS)
    return on_line(few, more, Fraction(depth - _DEPTHS[0], _DEPTHS[1] - _DEPTHS[0]))


def on_line(few: Mapping[str, Bytes], more: Mapping[str, Bytes], along: Fraction) -> dict[str, Bytes]:
    """Return the point at `along` on the line from `few` (0) to `more` (1), or beyond, for the phases that both have."""
    return {
        phase: tuple(a + (b - a) * along.numerator // along.denominator for a, b in zip(held, more[phase], strict=True))
        for phase, held in few.items()
        if phase in more
    }


def traced(blueprint: Blueprint, how: PassOptions) -> dict[str, Bytes]:
    """Return `peaks` of a model that is traced with all of its blocks."""
    model: Any = copy.deepcopy(blueprint.model)  # before tensors have no data
    if how.context_parallel > 1:
        check_sequences(model, how.context_parallel)
    dropout = sample_dropout.give_to_samples(model, 0)
    half = _HALVES.get(how.precision) if how.half_weights else None
    group = fake_group(how.shards, how.context_parallel) if how.shards else nullcontext((None, None))
    with group as (mesh, sequence_mesh), FakeTensorMode():
        bring_to_cpu(model, dtype=half)
        if how.recomputes:
            model_preparation.checkpoint_activations(model, blueprint.classes)
        if how.channels_last:
            numerics.take_channels_last(model)
        if how.shards:
            _shard(model, mesh, how.precision, blueprint)
        if how.context_parallel > 1:
            model.split_sequences(sequence_mesh)
        order = torch.channels_last if how.channels_last else torch.contiguous_format
        form = Form(half or next(model.parameters()).dtype, order)
        if not how.half_weights and (computed := _HALVES.get(how.precision)):  # as Accelerate does
            model.forward = convert_outputs_to_fp32(torch.autocast("cpu", computed)(model.forward))
        return _trace_step(blueprint, model, make_batch(blueprint, how.micro_batch, form), how, dropout)


@contextmanager
def fake_group(ranks: int, context_parallel: int = 1) -> Iterator[tuple[Any, Any]]:
    """Be rank 0 of a process group whose other ranks do not exist, and whose collectives do nothing.

    Return its mesh, and the mesh of the ranks that split the sequences of rank 0.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        shape = ranks // context_parallel, context_parallel
        # It reads numbers, so no fake mode is on yet.
        groups = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "cp"))
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",)), groups["cp"]
    finally:
        dist.destroy_process_group()


def _shard(model: nn.Module, mesh: Any, precision: str, blueprint: Blueprint) -> None:
    """Shard the model by Accelerate's own function, as the shipped preset and `app/init/filling.py` do it."""
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


def _trace_step(
    blueprint: Blueprint, model: nn.Module, batch: dict[str, Any], how: PassOptions, dropout: sample_dropout.PassDraws
) -> dict[str, Bytes]:
    """Trace the first pass of a step, and a second one if it differs."""
    tracker = AllocationTracker()
    tracker.ignore([*model.parameters(), *model.buffers()])

    def take_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.assign(parameter.grad, "gradients")
        if not how.keeps_gradients:
            parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad and not how.shards:
            parameter.register_post_accumulate_grad_hook(take_gradient)
    watch = _Watch(tracker, blueprint, model)
    with tracker:
        for tensor in _tensors(batch):
            tracker.assign(tensor, "activations")
        for end in ("", LATER) if how.keeps_gradients else ("",):
            watch.start_pass(end)
            dropout.begin(batch["samples"])
            try:
                loss = blueprint.task.loss(model, batch).mean
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise RecipeError(
                    f"{type(blueprint.task).__name__}.loss reads values of tensors ({str(error).splitlines()[0]}), so its "
                    "memory cannot be planned: remove .item() and conditions on tensors"
                ) from None
            watch.start_backward()
            loss.backward()
            del loss
    return tracker.peaks


class _Watch:
    """Hooks on a model that give the tracker the phase of the pass."""

    def __init__(self, tracker: AllocationTracker, blueprint: Blueprint, model: nn.Module) -> None:
        self._tracker, self._is_backward, self._end = tracker, False, ""
        self._sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        for number, name in enumerate(blueprint.blocks):
            left = len(blueprint.blocks) - 1 - number
            names = [str(number)] * (number < 2) + [f"-{left}"] * (left < 2) or ["between"]  # from both ends
            block = model.get_submodule(name)
            block.register_forward_pre_hook(functools.partial(self._enter_block, [f"forward {it}" for it in names]))
            block.register_forward_hook(functools.partial(self._leave_block, [f"backward {it}" for it in names]))
        for module in model.modules():  # after FSDP2's own hooks
            module.register_forward_pre_hook(self._gathered)
        head = model.get_submodule(blueprint.task.head(model))
        if head is not model:
            head.register_forward_pre_hook(self._enter_head)

    def start_pass(self, end: str) -> None:
        self._is_backward, self._tracker.kind, self._end = False, "activations", end
        self._begin("forward")

    def start_backward(self) -> None:
        self._is_backward = True
        self._begin("backward")

    def _begin(self, *phases: str) -> None:
        for parameter in self._sharded:
            if parameter.grad is not None:
                self._tracker.assign(parameter.grad, "gradients")
        self._tracker.begin(*(phase + self._end for phase in phases))

    def _enter_block(self, phases: list[str], *_: Any) -> None:
        if not self._is_backward:
            self._begin(*phases)

    def _leave_block(self, phases: list[str], _: nn.Module, __: Any, outputs: Any) -> None:
        if not self._is_backward:
            self._begin("forward, after a block")
            _on_gradient(outputs, lambda _: self._begin(*phases))

    def _enter_head(self, _: nn.Module, inputs: Any) -> None:
        if not self._is_backward:
            self._begin("forward, head")
            self._tracker.kind = "loss"
            _on_gradient(inputs, self._leave_head)

    def _leave_head(self, _: Tensor) -> None:
        self._tracker.kind = "activations"
        self._begin("backward, after the head")

    def _gathered(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                self._tracker.assign(parameter, "weights")


def _on_gradient(tree: Any, call: Callable[[Tensor], None]) -> None:
    """Have a function called when the gradient of any of these tensors is known."""
    for tensor in _tensors(tree):
        if tensor.requires_grad:
            tensor.register_hook(call)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
