"""The units of a model whose initial weights are drawn one at a time: each from its own seed, whole, on the CPU.

A unit is a block, such as a transformer's layer, or a remaining module with parameters or buffers of its own. Its weights
depend only on the recipe's seed and its name, so they are the same on every rank and in any order. A parameter that
several units share, such as a tied embedding, is drawn with the first of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from app.data import order
from app.environment import host
from app.environment.topology import listed
from app.errors import RecipeError

_EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")
"""How a model of transformers is asked for them."""
_MARK = 0xA5
"""Bytes of an integer or boolean tensor that nothing has filled."""


class Units:
    """The units of a model, which a task with `init_module` fills."""

    def __init__(self, task: Any, model: nn.Module, *, seed: int) -> None:
        """Copy `model`, as the task built it. Raises RecipeError for tensors with memory, or that no unit has."""
        if real := [name for name, parameter in model.named_parameters() if not parameter.is_meta]:
            raise RecipeError(
                f"{type(task).__name__} has `init_module`, so its model must be built on torch's meta device, "
                f"without memory, but {listed(real)} has memory: do not set a device where the model is built"
            )
        if plain := [
            f"{prefix}.{key}" if prefix else key
            for prefix, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value.is_meta
        ]:
            raise RecipeError(
                f"{listed(plain)} of the model has no values: it is neither a parameter nor a buffer, so `init_module` "
                "never sees it. Register it with register_buffer(..., persistent=False)"
            )
        self._task, self._seed, self._model = task, seed, copy.deepcopy(model)
        classes = block_classes(task, model)
        self._is_block: dict[str, bool] = {}
        """Each unit in the order of the modules, and whether it is a block, which includes its submodules."""
        self.blocks: set[str] = set()
        """Classes of the model's blocks."""
        inside: set[nn.Module] = set()
        for name, module in self._model.named_modules():
            if module in inside:
                continue
            if type(module).__name__ in classes:
                self._is_block[name] = True
                self.blocks.add(type(module).__name__)
                inside.update(module.modules())
            elif any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())):
                self._is_block[name] = False

    def drawn(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each unit's name, and its parameters and buffers, on the CPU, by their names in the model; each tensor once.

        Take tensors out of the dict to have the memory of one unit at a time.
        Raises RecipeError for tensors that the task's `init_module` has not filled.
        """
        owned: set[int] = set()
        for unit, is_block in self._is_block.items():
            names = {id(it): name for name, it in _named(self._model.get_submodule(unit), unit, recurse=is_block)}
            own = {name for key, name in names.items() if key not in owned}
            owned |= names.keys()
            if not own:  # all of it is tied to an earlier unit
                continue
            found = {name: it for name, it in self._draw(unit, is_block=is_block).items() if name in own}
            yield unit, found
            found.clear()
            host.give_back()  # shares that stay fragment the memory of earlier units: larger units would not fit there

    def _draw(self, unit: str, *, is_block: bool) -> dict[str, Tensor]:
        module = self._model.get_submodule(unit)
        twin = copy.deepcopy(module) if is_block else copy.copy(module)
        made: dict[int, Tensor] = {}
        for part in twin.modules() if is_block else [twin]:
            _materialize(part, made)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(order.derive_key(self._seed, "initial weights", unit))
            self._task.init_module(self._model, unit, twin)
        found = {name: tensor.detach() for name, tensor in _named(twin, unit, recurse=is_block)}
        if empty := [name for name, tensor in found.items() if _is_empty(tensor)]:
            raise RecipeError(
                f"the task's `init_module` has not filled {listed(empty)}, of "
                f"{f'the unit {unit}' if unit else 'the model itself'}, a {type(module).__name__}: it must "
                "fill every parameter and buffer of a unit, without NaN"
            )
        return found


def block_classes(task: Any, model: nn.Module) -> set[str]:
    """Return the names of the classes whose modules are blocks, from the task or else from the model.

    Classes that hold the model's embeddings, as BERT's do, are left out: Accelerate's FSDP2 gathers embeddings separately, and
    torch refuses to shard a parameter twice (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`).
    """
    blocks = set(getattr(model, "_no_split_modules", None) or () if task.blocks is None else task.blocks)
    apart = {id(found()) for name in _EMBEDDINGS if callable(found := getattr(model, name, None))}
    within = {type(it).__name__ for it in model.modules() if any(id(part) in apart for part in it.modules() if part is not it)}
    return blocks - within


def places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return the places of each parameter and buffer, by the first of its names: a module and the name in it, once or more."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = first.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                found.setdefault(name, []).append((module, key))
    return found


def place(
    places: Mapping[str, list[tuple[nn.Module, str]]],
    drawn: dict[str, Tensor],
    note: Callable[[str, Tensor], None],
    half: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Put drawn tensors into a model on the meta device, whole and on the CPU, and return the parameters among them.

    They get the types (parameters `half`, if it is given) and strides of the model's tensors; a tensor with several `places`
    stays one. `note` is called with each, by its name.
    """
    parameters = []
    for name in list(drawn):
        values = drawn.pop(name)
        module, key = places[name][0]
        meta = getattr(module, key)
        is_parameter = isinstance(meta, nn.Parameter)
        dtype = half if half is not None and is_parameter and meta.is_floating_point() else meta.dtype
        real = values
        if values.dtype != dtype or values.stride() != meta.stride():
            real = torch.empty_like(meta, device="cpu", dtype=dtype).copy_(values)
        note(name, real)
        if is_parameter:
            real = nn.Parameter(real, requires_grad=meta.requires_grad)
            parameters.append(real)
        for module, key in places[name]:
            setattr(module, key, real)
    return parameters


@torch.no_grad()
def _materialize(module: nn.Module, made: dict[int, Tensor]) -> None:
    """Give a module's own tensors memory, marked as empty; `made` has the new tensor of each old one's `id`, for ties."""
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None and id(tensor) not in made:
                values = torch.empty_like(tensor, device="cpu")
                if values.is_floating_point() or values.is_complex():
                    values.fill_(torch.nan)
                else:
                    values.as_strided((values.numel(),), (1,)).view(torch.uint8).fill_(_MARK)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
    for kind in ("_parameters", "_buffers"):  # new dicts, because a copied module shares those of its original
        module.__dict__[kind] = {key: it if it is None else made[id(it)] for key, it in module.__dict__[kind].items()}


def _is_empty(tensor: Tensor) -> bool:
    """Return whether a tensor still has its mark: an element that is NaN, or nothing but marked bytes."""
    if tensor.is_complex():
        return _is_empty(torch.view_as_real(tensor))
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point():
        return bool(tensor.min().isnan())  # NaN is the least of all
    return bool((tensor.contiguous().view(-1).view(torch.uint8) == _MARK).all())


def _named(module: nn.Module, prefix: str, *, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    named = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    return ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in named)
