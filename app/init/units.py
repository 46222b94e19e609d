"""The units of a model whose initial weights are drawn one at a time: each from its own seed, whole, on the CPU.

A unit is a block, such as a transformer's layer, or a remaining module with parameters or buffers of its own. What it gets
depends on the recipe's seed and its name alone, so it is the same wherever it is drawn, and in whatever order. A parameter that
stands in several units, as a tied embedding does, is the first one's.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.data import order
from app.environment import host_memory
from app.errors import RecipeError

_MOST_NAMED = 8
_EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")
"""How a model of transformers is asked for them."""


class Units:
    """The units of a model, which a task with `init_module` fills."""

    def __init__(self, task: Any, model: nn.Module, *, seed: int) -> None:
        """`model` is as the task built it, on torch's meta device; a copy is kept. Raises RecipeError if it is elsewhere."""
        if real := [name for name, parameter in model.named_parameters() if not parameter.is_meta]:
            raise RecipeError(
                f"{type(task).__name__} has `init_module`, so its model must be built on torch's meta device, "
                f"without memory, but {listed(real)} has memory: do not set a device where the model is built"
            )
        self._task, self._seed, self._model = task, seed, copy.deepcopy(model)
        self._units = _units(self._model, block_classes(task, model))
        self._looked_at: set[type[nn.Module]] = set()
        """Kinds of units that are known to be filled completely, including parts without NaN."""

    def drawn(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each unit's name, and its parameters and buffers, on the CPU, by their names in the model; each tensor once.

        Whoever takes them out of the dict (`popped`) has the memory of one unit at a time.
        Raises RecipeError, which names it, for what the task's `init_module` has not filled.
        """
        owner = self._owners()
        for unit, is_block in self._units.items():
            own = {name for name, of in owner.items() if of == unit}
            if not own:  # all of it is tied to an earlier unit
                continue
            found = {name: it for name, it in self._draw(unit, is_block=is_block).items() if name in own}
            yield unit, found
            found.clear()
            host_memory.give_back()  # what a rank keeps lies between units that are gone: larger ones would find no room there

    @property
    def blocks(self) -> set[str]:
        """The classes of the model's blocks."""
        return {type(self._model.get_submodule(name)).__name__ for name, is_block in self._units.items() if is_block}

    def _owners(self) -> dict[str, str]:
        """The unit of each parameter and buffer, by the first of its names."""
        first: dict[int, str] = {}
        owner = {}
        for unit, is_block in self._units.items():
            module = self._model.get_submodule(unit)
            for name, tensor in _named(module, unit, recurse=is_block):
                if first.setdefault(id(tensor), name) == name:
                    owner[name] = unit
        return owner

    def _draw(self, unit: str, *, is_block: bool) -> dict[str, Tensor]:
        module = self._model.get_submodule(unit)
        found = self._filled(unit, module, is_block=is_block, with_ones=False)
        empty = [name for name, tensor in found.items() if _is_empty(tensor)]
        # Bytes and booleans have no value that says so: drawn once more, what differs was left as it was.
        if type(module) not in self._looked_at and any(_has_no_mark(tensor) for tensor in found.values()):
            again = self._filled(unit, module, is_block=is_block, with_ones=True)
            empty += [name for name, tensor in found.items() if _has_no_mark(tensor) and not torch.equal(tensor, again[name])]
        self._looked_at.add(type(module))
        if empty:
            raise RecipeError(
                f"the task's `init_module` has not filled {listed(empty)}, of "
                f"{f'the unit {unit}' if unit else 'the model itself'}, a {type(module).__name__}: it must "
                "fill every parameter and buffer of a unit, without NaN"
            )
        return found

    def _filled(self, unit: str, module: nn.Module, *, is_block: bool, with_ones: bool) -> dict[str, Tensor]:
        twin = copy.deepcopy(module) if is_block else copy.copy(module)
        made: dict[int, Tensor] = {}
        for part in twin.modules() if is_block else [twin]:
            _materialise(part, made, with_ones=with_ones)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(order.derive_key(self._seed, "initial weights", unit))
            self._task.init_module(self._model, unit, twin)
        return {name: tensor.detach() for name, tensor in _named(twin, unit, recurse=is_block)}


def block_classes(task: Any, model: nn.Module) -> set[str]:
    """Return the names of the classes whose modules are blocks: those that the task says, or else the model.

    Without those that hold the model's embeddings, as BERT's do: Accelerate's FSDP2 gathers embeddings by themselves, and torch
    refuses to divide a parameter twice (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`).
    """
    blocks = set(getattr(model, "_no_split_modules", None) or () if task.blocks is None else task.blocks)
    apart = {id(found()) for name in _EMBEDDINGS if callable(found := getattr(model, name, None))}
    within = {type(it).__name__ for it in model.modules() if any(id(part) in apart for part in it.modules() if part is not it)}
    return blocks - within


def places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where each parameter and buffer stands, by the first of its names: a module and the name in it, once or more."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = first.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                found.setdefault(name, []).append((module, key))
    return found


def popped(drawn: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what was drawn, and forget it."""
    for name in list(drawn):
        yield name, drawn.pop(name)


def as_in(model_tensor: Tensor, drawn: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what was drawn on the CPU in the type (or in `dtype`) and with the strides that the model's tensor has.

    The same memory, if it has them already.
    """
    dtype = dtype or model_tensor.dtype
    if drawn.dtype == dtype and drawn.stride() == model_tensor.stride():
        return drawn
    return torch.empty_like(model_tensor, device="cpu", dtype=dtype).copy_(drawn)


def check_left(model: nn.Module) -> None:
    """Raise RecipeError for a tensor without memory that no unit holds: one that is no parameter and no buffer."""
    held = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if held:
        raise RecipeError(
            f"{listed(held)} of the model has no values: it is neither a parameter nor a buffer, so `init_module` "
            "never sees it. Register it with register_buffer(..., persistent=False)"
        )


def _units(model: nn.Module, blocks: Collection[str]) -> dict[str, bool]:
    """The name of each unit in the order of the modules, and whether it is a block, with all that is inside it."""
    found: dict[str, bool] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if type(module).__name__ in blocks:
            found[name] = True
            inside.update(module.modules())
        elif any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
            found[name] = False
    return found


def _materialise(module: nn.Module, made: dict[int, Tensor], *, with_ones: bool) -> None:
    """Give a module memory for what it holds itself, marked as empty; `made` has what was made, by the `id` of the first."""

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            values = _marked(torch.empty_like(tensor, device="cpu"), with_ones=with_ones)
            made[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        return made[id(tensor)]

    held: Mapping[str, dict[str, Any]] = {"_parameters": module._parameters, "_buffers": module._buffers}
    for kind, tensors in held.items():
        module.__dict__[kind] = {key: tensor if tensor is None else real(tensor) for key, tensor in tensors.items()}


@torch.no_grad()
def _marked(tensor: Tensor, *, with_ones: bool) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(int(with_ones) if _has_no_mark(tensor) else torch.iinfo(tensor.dtype).min)


def _is_empty(tensor: Tensor) -> bool:
    """Whether an element was left as it was marked."""
    if tensor.is_complex():
        return _is_empty(torch.view_as_real(tensor))
    if tensor.is_floating_point():
        return tensor.numel() > 0 and bool(tensor.min().isnan())  # NaN is the least of all
    return not _has_no_mark(tensor) and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _has_no_mark(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _named(module: nn.Module, prefix: str, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in named)


def listed(names: Collection[str]) -> str:
    """Return the first of some names, for a message."""
    shown = list(names)[:_MOST_NAMED]
    return ", ".join(shown) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
