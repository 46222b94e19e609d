"""Tries an optimizer class that is not torch's, on each process before the run: what it keeps, and where it may step.

A tensor is stepped on whole, again, from a state that was saved and loaded as in a checkpoint, and cut at odd places. 8-bit
optimizers quantize states of at least 4,096 elements, in blocks of 256 or 2,048 (bitsandbytes 0.50), some only where the blocks
fill the tensor (torchao 0.18): so it has 112 times 2,048 elements, and its parts odd numbers of them. Weights and gradients
shrink along it, so that whatever is computed over several elements is another value in each part.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from app.checkpoints import tensor_file
from app.checkpoints.sharded_state import Shards
from app.distributed.runtime import Runtime
from app.errors import CheckpointError, PresetError, RecipeError, SamerunError
from app.optim import foreign, parameter_groups
from app.optim.parameter_groups import Rule
from app.recipe import optimizers
from app.recipe.schema import Recipe

_SHAPE = (448, 512)
_CUTS = (0, 3, 4_102, 70_001, 135_542, math.prod(_SHAPE))
"""Where the tensor is cut: parts with and without blocks of 4,096 and 65,536 elements."""
_STEPS = 12
"""More than the 6 after which Lookahead makes its first state."""
_ROUNDING = 1e-5
"""Largest difference that is rounding, as a share of the largest number."""


def check(runtime: Runtime, recipe: Recipe, rule: Rule) -> Rule:
    """Return the rule with the names of the states and settings that the class counts in. All ranks call it together.

    Raises RecipeError for a class whose steps cannot be repeated or resumed, and PresetError for one that needs whole
    parameters where the preset shards them.
    """
    name, strategy, device = recipe.optim.name, runtime.launched.strategy, runtime.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            rule, why = _Trial(runtime, recipe, rule).outcome()
        except SamerunError as error:
            raise RecipeError(f"optim.name is {name}, which {error}: use another optimizer, or other optim.settings") from None
        except Exception as error:  # whatever the class raises
            raise RecipeError(
                f"optim.name is {name}, whose steps fail on a tensor of {list(_SHAPE)}, of {recipe.train.dtype} "
                f"({type(error).__name__}: {error}): use another optimizer, or other optim.settings"
            ) from error
    if refused := optimizers.refusal(name, strategy, runtime.launched.tensor_parallel, why=why):
        raise PresetError(refused)
    if strategy == "deepspeed" and rule.counted:
        raise PresetError(
            f"optim.name is {name}, which counts its steps in its groups ({', '.join(rule.counted)}), and ZeRO-3 steps on the "
            "parts of a group one after the other: use fsdp2 or multi_gpu"
        )
    return rule


class _Trial:
    """Steps of the recipe's optimizer on one tensor, with the same gradients and learning rates each time."""

    def __init__(self, runtime: Runtime, recipe: Recipe, rule: Rule) -> None:
        self._accelerator, self._rule, self._peak = runtime.accelerator, rule, recipe.optim.lr or 1e-3
        self._recipe = replace(recipe.optim, groups=None)
        self._averages = recipe.train.ema_decay is not None
        numbers = torch.randn(1 + _STEPS, _CUTS[-1], generator=torch.Generator().manual_seed(0))
        numbers *= torch.linspace(1.0, 0.05, _CUTS[-1])
        weights, *self._gradients = numbers.to(runtime.device, getattr(torch, recipe.train.dtype)).unbind()
        self._weights = weights * self._peak  # so that a step changes much of them
        self._sharded: Callable[[Tensor], Tensor] = lambda part: part
        """Makes FSDP2's tensor of this process's part."""
        if runtime.launched.strategy == "fsdp2":
            mesh = init_device_mesh(runtime.device.type, (runtime.launched.world_size,))
            self._sharded = lambda part: DTensor.from_local(part, mesh, [Shard(0)])

    def _new(self, part: slice | None = None) -> Shards:
        """Return the tensors of a new optimizer of the whole tensor, or of a part, which it gets as when a model is sharded."""
        model = nn.ParameterDict({"weight": nn.Parameter(self._weights.view(_SHAPE).clone())})
        optimizer = parameter_groups.build_optimizer(self._recipe, model)
        if part:
            model = nn.ParameterDict({"weight": nn.Parameter(self._sharded(self._weights[part].clone()))})
            optimizer.param_groups[0]["params"][0] = model["weight"]
        return Shards(self._accelerator, model, SimpleNamespace(optimizer=optimizer), self._rule)

    def _stepped(
        self, shards: Shards, gradients: Sequence[Tensor], *, first: int = 0, factor: float = 1.0, part: slice | None = None
    ) -> Shards:
        """Take a step on each gradient, each with a learning rate of its own: the steps from `first` on."""
        (parameter,) = shards.model.parameters()
        for step, gradient in enumerate(gradients, start=first):
            parameter_groups.set_learning_rate(shards.stepper, factor * self._peak / (1 + step))
            parameter.grad = self._sharded(gradient[part].clone()) if part else gradient.clone().view(_SHAPE)
            shards.stepper.step()
        parameter.grad = None
        return shards

    def outcome(self) -> tuple[Rule, str]:
        """Return the rule, and why the class needs whole parameters; empty: it may step on parts.

        Raises RecipeError that ends a sentence, or whatever the class raises.
        """
        new, gradients = self._new(), self._gradients
        if self._averages and foreign.has_modes(new.stepper):
            raise RecipeError("has weights of its own for evaluation, and train.ema_decay would average others (null: none)")
        before = _settings(new)
        state = _state(self._stepped(new, gradients))
        other = _state(self._stepped(self._new(), gradients[::-1]))
        scalars = tuple(key for key, it in state.items() if _is_number(it) and it == other[key])
        counted = tuple(key for key, it in _settings(new).items() if key != "lr" and it != before.get(key))
        self._rule = replace(self._rule, scalars=scalars, counted=counted)
        torch.manual_seed(1)
        whole = _values(self._stepped(self._new(), gradients))
        torch.manual_seed(2)
        if not _same(whole, _values(self._stepped(self._new(), gradients))):
            raise RecipeError("draws random numbers, or gives other weights when it takes the same steps again")
        if _same(whole, _values(self._stepped(self._new(), gradients, factor=0.5))):
            raise RecipeError("has a learning rate of its own: with half of it the weights are the same")
        if unsaved := [f"{key} of {it.dtype}" for key, it in whole.items() if not tensor_file.can_save(it.dtype)]:
            raise RecipeError(f"keeps {unsaved[0]}, which a checkpoint cannot hold")
        if not _same(whole, self._resumed()):
            raise RecipeError("cannot be resumed: a step depends on more than states of parameters and settings of groups")
        for key, it in state.items():
            if isinstance(it, Tensor) and key not in scalars and (it.shape != _SHAPE or type(it) is not Tensor):
                kind = f"{type(it).__name__} of {str(it.dtype).removeprefix('torch.')}"
                return self._rule, f"its state {key} is a {kind} {list(it.shape)}, not a number for each element"
        return self._rule, self._difference_of_parts(whole)

    def _resumed(self) -> dict[str, Tensor]:
        """Return the values after all steps, half of them of another optimizer that got those of the first by a checkpoint."""
        half = _STEPS // 2
        source, target = self._stepped(self._new(), self._gradients[:half]), self._new()
        pieces = {piece.key: piece.values for piece in source.pieces()}
        try:
            target.allocate_state(pieces.keys(), source.scalars(), json.loads(json.dumps(source.counts())))
        except CheckpointError:
            return {}  # it makes states in later steps
        for piece in target.pieces():
            piece.values.copy_(pieces[piece.key])
        return _values(self._stepped(target, self._gradients[half:], first=half))

    def _difference_of_parts(self, whole: Mapping[str, Tensor]) -> str:
        """Return why steps on parts are not those on the whole; empty: they are."""
        for start, stop in pairwise(_CUTS):
            part = slice(start, stop)
            try:
                shards = self._stepped(self._new(part), self._gradients, part=part)
                values = {key: it.clone() for key, it in _values(shards).items()}
                shards.stepper.step()  # without a gradient, as in a step that ZeRO skips
            except Exception as error:  # whatever the class raises, or torch for an operation that FSDP2's tensors lack
                return f"a step on a part of a parameter fails: {type(error).__name__}: {error}"
            if not torch.equal(values["weight"], _values(shards)["weight"]):
                return "it changes a parameter that has no gradient"
            for key, it in whole.items():
                expected = (it[part] if it.ndim else it).double()
                largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
                difference = (values[key].double() - expected).abs().max() / largest if key in values else 1.0
                if not difference <= _ROUNDING:
                    return f"it steps on elements together: on a part of a tensor its {key} differs by {difference:.1e}"
        return ""


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)


def _state(shards: Shards) -> Mapping[str, Any]:
    return next(iter(shards.stepper.state.values()), {})


def _settings(shards: Shards) -> dict[str, Any]:
    (group,) = shards.stepper.param_groups
    return copy.deepcopy({name: it for name, it in group.items() if name != "params"})


def _values(shards: Shards) -> dict[str, Tensor]:
    """Return all that a checkpoint has: tensors, 1-D, and numbers, 0-D."""
    numbers = {**shards.scalars(), **shards.counts()[0]}
    pieces = {piece.key: piece.values for piece in shards.pieces()}
    return pieces | {key: torch.tensor(it, dtype=torch.float64) for key, it in numbers.items()}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(it, other[key]) for key, it in one.items())
