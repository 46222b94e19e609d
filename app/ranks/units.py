"""FSDP2's units, the parts of a model whose weights are gathered together: its layers, where it names them.

A preset knows no model, and Accelerate takes it at its word. By size it picks lists of layers too, which are never called and
which torch refuses; of a transformers model it picks the embeddings, and what holds them as well. So what the preset leaves
open is chosen here, for the model that is about to be prepared, and said in the plugin's own fields.
Facts: accelerate 1.15, utils/fsdp_utils.py (`fsdp2_prepare_model`), with torch 2.15.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from app.errors import PresetError


def choose(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Have `plugin` cut `model`, which is not sharded yet, into units that it can be cut into.

    They are of the classes that the preset names; or of those that the model or a part of it names in `_no_split_modules`, as
    transformers' do; or what has more weights than the preset's fsdp_min_num_params, with the layers of a list in its place.
    NO_WRAP stays one unit. Raises PresetError if the preset asks for classes and the model lacks one, or neither of them names
    any; and for a model whose embeddings Accelerate cannot make a unit of.
    """
    cut = _Model(model)
    asked = plugin.auto_wrap_policy
    if asked is transformer_auto_wrap_policy and plugin.transformer_cls_names_to_wrap:
        cut.check(plugin.transformer_cls_names_to_wrap)
        return
    if asked not in (transformer_auto_wrap_policy, size_based_auto_wrap_policy):
        return
    names = cut.named()
    if asked is transformer_auto_wrap_policy and not names:
        raise PresetError(
            "the preset's fsdp_auto_wrap_policy is TRANSFORMER_BASED_WRAP, and neither its fsdp_transformer_layer_cls_to_wrap "
            f"nor the model names a layer: name one of {cut.classes()}; or use SIZE_BASED_WRAP with fsdp_min_num_params, as "
            "fsdp2.yaml does."
        )
    if not names:
        large = cut.larger_than(plugin.min_num_params)
        if not plugin.min_num_params or all(map(cut.can_be_unit, large)):
            return
        names = cut.classes_within(large)
    plugin.auto_wrap_policy = transformer_auto_wrap_policy if names else None
    plugin.transformer_cls_names_to_wrap = names


class _Model:
    """A model that is to be cut. Its root is always a unit, which holds what no other one does."""

    def __init__(self, model: nn.Module) -> None:
        """Raises PresetError if Accelerate cannot make a unit of the embeddings, which it does of those of the root."""
        self._root = model
        self._parts = [part for part in model.modules() if part is not model]
        self._users = _users(model.modules())
        self._embeddings = _embeddings(model)
        tied = len({id(getattr(part, "weight", part)) for part in self._embeddings}) < len(self._embeddings)
        groups = [self._embeddings] if tied else [[part] for part in self._embeddings]
        if any(self._is_used_elsewhere(group) for group in groups):
            raise PresetError(_refusal(model, "whose weights other parts of it use as well"))

    def check(self, names: list[str]) -> None:
        """Raise PresetError if there is no part of one of these classes, or one that cannot be a unit."""
        given = f"the preset's fsdp_transformer_layer_cls_to_wrap is {','.join(names)}, and the {type(self._root).__name__}"
        for name in names:
            parts = self._taken_for(name)
            if not parts:
                raise PresetError(f"{given} has no {name}: name one of {self.classes()}.")
            if not all(map(self.can_be_unit, parts)):
                raise PresetError(
                    f"{given} has a {name} that cannot be a unit: it is not called, or another unit has weights of it, such "
                    "as those of embeddings. Leave it out."
                )

    def classes(self) -> str:
        """Return the names of the classes that its parts with weights have."""
        return ", ".join(sorted({type(part).__name__ for part in self._parts if _size(part)}))

    def named(self) -> list[str]:
        """Return the classes that the model or a part of it names, and that can be units."""
        named = {name for part in (self._root, *self._parts) for name in getattr(part, "_no_split_modules", None) or ()}
        found = {name: self._taken_for(name) for name in sorted(named)}
        return [name for name, parts in found.items() if parts and all(map(self.can_be_unit, parts))]

    def larger_than(self, size: int) -> list[nn.Module]:
        """Return the parts with more weights."""
        return [part for part in self._parts if _size(part) > size]

    def can_be_unit(self, part: nn.Module) -> bool:
        """Whether calling `part` is what its weights are needed for, and no other unit's."""
        below = [inner for inner in part.modules() if inner is not part]
        holds_embeddings = any(inner is one for inner in below for one in self._embeddings)
        return _is_called(part) and not holds_embeddings and not self._is_used_elsewhere([part])

    def classes_within(self, large: list[nn.Module]) -> list[str]:
        """Return the classes of these parts, and of the layers in lists among them, that no other part has.

        Linear is often none: attention hands the weights of its own to a function, which would find them sharded.
        """
        layers = [layer for part in large if not _is_called(part) for layer in _layers(part)]
        units = {part for part in (*large, *layers) if self.can_be_unit(part)}
        names = sorted({type(part).__name__ for part in units})
        return [name for name in names if units.issuperset(self._taken_for(name))]

    def _taken_for(self, name: str) -> list[nn.Module]:
        """The parts that Accelerate takes for a class of this name: it asks `isinstance`."""
        return [part for part in self._parts if any(kind.__name__ == name for kind in type(part).__mro__)]

    def _is_used_elsewhere(self, parts: list[nn.Module]) -> bool:
        """Whether a weight of these parts is that of another part too: torch refuses to have it in two units."""
        inside = _users({inner for part in parts for inner in part.modules()})
        return any(self._users[weight] > count for weight, count in inside.items())


def _users(modules: Iterable[nn.Module]) -> Counter[int]:
    """How many of the modules hold each parameter themselves, by its id."""
    return Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))


def _size(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _is_called(part: nn.Module) -> bool:
    """Lists and dicts of modules, of parameters as well, are not: their weights would never be gathered."""
    return type(part).forward is not nn.Module.forward


def _layers(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if _is_called(child):
            yield child
        else:
            yield from _layers(child)


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """What Accelerate makes units of by itself: it asks the root as here, and lets an error pass."""
    try:
        found = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    except NotImplementedError as error:
        raise PresetError(_refusal(model, "which it does not say")) from error
    return [part for part in found if isinstance(part, nn.Module)]


def _refusal(model: nn.Module, why: str) -> str:
    return (
        f"under FSDP2 Accelerate makes a unit of the embeddings of a {type(model).__name__}, {why}: put it into a "
        "torch.nn.Module of your own, whose forward calls it, or use deepspeed_zero3.yaml."
    )
