"""The optimizers that a recipe may name, what each takes, and under which strategies it may step; groups of parameters.

Most step on each element of a parameter for itself, so that parameters may be cut in any way: ZeRO's flat ranges, FSDP2's rows.
Those that do not are refused where parameters are cut. tests/optim/test_optimizers.py holds all of this against torch.

Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from app.errors import did_you_mean
from app.recipe.kinds import Problem

if TYPE_CHECKING:
    from app.recipe.schema import OptimRecipe


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of `torch.optim`. Each takes `optim.lr` and `optim.weight_decay`."""

    torch_name: str
    """The class in `torch.optim`."""
    keys: tuple[str, ...] = ()
    """Further keys of `optim` that it takes; their defaults are torch's, but for the momentum."""
    settings: Mapping[str, bool | float | str] = field(default_factory=dict)
    """Its other arguments (`optim.settings`), by torch's names, with torch's defaults."""
    whole_because: str = ""
    """Why it needs whole parameters; empty: it may step on any part of one."""
    gathers: bool = False
    """True if it gathers those that FSDP2 shards."""


_MOMENTS = ("betas", "eps")
ADJUSTMENTS = ("match_rms_adamw", "original")
"""Values of Muon's `adjust_lr_fn`; the first is the default."""
_DECOUPLED = {"decoupled_weight_decay": False}
TABLE: Mapping[str, Optimizer] = {
    "sgd": Optimizer("SGD", ("momentum", "nesterov")),
    "adamw": Optimizer("AdamW", _MOMENTS, {"amsgrad": False}),
    "adam": Optimizer("Adam", _MOMENTS, {"amsgrad": False, **_DECOUPLED}),
    "nadam": Optimizer("NAdam", _MOMENTS, {"momentum_decay": 4e-3, **_DECOUPLED}),
    "radam": Optimizer("RAdam", _MOMENTS, _DECOUPLED),
    "adamax": Optimizer("Adamax", _MOMENTS),
    "rmsprop": Optimizer("RMSprop", ("eps",), {"alpha": 0.99, "momentum": 0.0, "centered": False}),
    "adadelta": Optimizer("Adadelta", (), {"rho": 0.9, "eps": 1e-6}),
    "adagrad": Optimizer(
        "Adagrad",
        (),
        {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
        whole_because="torch allocates its sums before parameters are sharded",
    ),
    "adafactor": Optimizer(
        "Adafactor", (), {"beta2_decay": -0.8, "d": 1.0}, whole_because="it keeps means over whole rows and columns of a matrix"
    ),
    "muon": Optimizer(
        "Muon",
        _MOMENTS,
        {"momentum": 0.95, "nesterov": True, "ns_steps": 5.0, "adjust_lr_fn": ADJUSTMENTS[0]},
        whole_because="it orthogonalizes whole matrices, and gathers only what FSDP2 shards",
        gathers=True,
    ),
}
# Not: ASGD (its average would never be evaluated), LBFGS (several losses a step), Rprop (a changing rate has no effect),
# SparseAdam (no preset reduces sparse gradients).
_CLASS = re.compile(r"(?!torch\.optim\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
"""The path of a class of another package, or of the user's own."""
NAMES = {f"{prefix}{found.torch_name}": name for name, found in TABLE.items() for prefix in ("torch.optim.", "")}
"""The name in TABLE of each class of torch, such as torch.optim.AdamW."""

WHOLE_PRESETS = ("cpu", "single_gpu", "multi_gpu", "multi_node")
"""The shipped presets under which each process holds whole parameters."""
_GATHERED_PRESETS = ["fsdp2", "hsdp"]
"""The shipped presets under which processes can gather whole parameters."""
_CUTTING = {"deepspeed": "ZeRO", "fsdp2": "FSDP2"}


def is_foreign(name: str) -> bool:
    """Return True if the name is the path of a class that is not of `torch.optim`, such as lion_pytorch.Lion."""
    return _CLASS.fullmatch(name) is not None


def _entry(name: str) -> Optimizer:
    """Return what is known of an optimizer without importing its class: of one that is not torch's, nothing."""
    return TABLE.get(name, Optimizer(name))


def problems_of(optim: OptimRecipe) -> Iterator[Problem]:
    """Yield what is wrong with the optimizer's name, its settings and its groups, a sentence each."""
    if optim.name not in TABLE and not is_foreign(optim.name):
        which = (
            f"expected an optimizer of torch, one of {', '.join(TABLE)}; or the path of another class, as in lion_pytorch.Lion"
        )
        hint = did_you_mean(optim.name.removeprefix("torch.optim.").lower(), TABLE, then=which)
        yield Problem(f"optim.name is {optim.name!r}: {hint}", "optim.name")
        return
    for key, entries in (("settings", optim.settings), ("groups", optim.groups)):
        for name, value in (entries or {}).items():
            if why := _setting_problem(optim.name, name, value) if key == "settings" else _group_problem(value):
                yield Problem(f"optim.{key} has {name}: {json.dumps(value)}: {why}", f"optim.{key}")


def _setting_problem(optimizer: str, name: str, value: Any) -> str | None:
    found = _entry(optimizer)
    if name in (*found.keys, "lr", "weight_decay"):
        return f"give it as optim.{name}"
    if is_foreign(optimizer):
        return None  # only its class knows
    if name not in found.settings:
        hint = did_you_mean(name, found.settings, then=f"it has {', '.join(found.settings) or 'none'}")
        return f"{optimizer} has no such setting; {hint}"
    expected = type(found.settings[name])
    if expected is str:
        return None if value in ADJUSTMENTS else f"it must be {' or '.join(ADJUSTMENTS)}"
    return None if type(value) is expected else f"it must be {'true or false' if expected is bool else 'a number'}"


def _group_problem(values: Any) -> str | None:
    if not isinstance(values, Mapping) or not values or not values.keys() <= {"lr_factor", "weight_decay"}:
        return "expected {lr_factor: F, weight_decay: W}, or one of the two"
    wrong = [name for name, value in values.items() if not isinstance(value, float) or value < 0]
    return f"{wrong[0]} must be a number, at least 0" if wrong else None


def refusal(name: str, strategy: str, tensor_parallel: int = 1, *, why: str = "") -> str | None:
    """Return why the optimizer may not step under a strategy (`Launched.strategy`), and what may; None: it may.

    `tensor_parallel` is the number of processes that share each large matrix, and `why` the reason that a check of its class
    found, if there was one (`whole_because`).
    """
    why, gathers = why or _entry(name).whole_because, _entry(name).gathers
    cutting = "tensor parallelism" if tensor_parallel > 1 else _CUTTING.get(strategy, "")
    if not why or not cutting or (gathers and cutting == "FSDP2"):
        return None
    anywhere = ", ".join(other for other, found in TABLE.items() if not found.whole_because)
    *presets, last = [*WHOLE_PRESETS, *(_GATHERED_PRESETS if gathers else [])]
    return (
        f"optim.name is {name}, which needs unsharded parameters ({why}), but the preset's {cutting} shards them: use "
        f"{', '.join(presets)} or {last}, or an optimizer that works on shards: {anywhere}"
    )


def notes_on(optim: OptimRecipe) -> list[str]:
    """Return which keys are set and taken by another optimizer only, a sentence each."""
    others = {key for found in TABLE.values() for key in found.keys} - set(_entry(optim.name).keys)
    unlike = [it.name for it in fields(optim) if it.name in others and getattr(optim, it.name) != it.default]
    own = _entry(optim.name).settings
    return [
        f"optim.{key} is {getattr(optim, key)}, and {optim.name} does not take it"
        + (f": its own is optim.settings={{{key}: {own[key]}}}" if key in own else "")
        for key in unlike
    ]
