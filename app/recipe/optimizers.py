"""The optimizers that a recipe may name, what each takes, and under which strategies it may step; groups of parameters.

Most step on each element of a parameter for itself, so that parameters may be cut in any way: ZeRO's flat ranges, FSDP2's rows.
Those that do not are refused where parameters are cut. tests/optim/test_optimizers.py holds all of this against torch.

Standard library only: it is read on login nodes, before torch is there.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.recipe.schema import OptimRecipe


@dataclass(frozen=True)
class Optimizer:
    """What of `torch.optim` a name stands for. Each takes `optim.lr` and `optim.weight_decay`."""

    torch_name: str
    """The class in `torch.optim`."""
    keys: tuple[str, ...] = ()
    """Further keys of `optim` that it takes; their defaults are torch's, but for the momentum."""
    settings: Mapping[str, bool | float] = field(default_factory=dict)
    """What else it takes (`optim.settings`), by torch's names, with torch's defaults."""
    whole_because: str = ""
    """Why it needs whole parameters; empty: it may step on any part of one."""


_MOMENTS = ("betas", "eps")
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
}
LEFT_OUT: Mapping[str, str] = {
    "ASGD": "its average of the weights would never be evaluated: use train.ema_decay",
    "LBFGS": "it computes the loss several times in a step",
    "Muon": "it updates only matrices, and models have other parameters too",
    "Rprop": "its learning rate cannot change after the first step",
    "SparseAdam": "it is for sparse gradients, which no preset can reduce",
}
"""The other classes of `torch.optim`, and why there is no name for them."""
_SHORT = {f"{prefix}{found.torch_name}": name for name, found in TABLE.items() for prefix in ("torch.optim.", "")}

WHOLE_PRESETS = ("cpu", "single_gpu", "multi_gpu", "multi_node")
"""The shipped presets under which each process holds whole parameters."""
_CUTTING = {"deepspeed": "ZeRO", "fsdp2": "FSDP2"}


def short(name: str) -> str:
    """Return the name in TABLE of one that may also be the class of torch, as torch.optim.AdamW; an unknown one as it is."""
    return _SHORT.get(name, name)


def problems_of(optim: OptimRecipe) -> Iterator[str]:
    """Yield what is wrong with the optimizer's name, its settings and its groups, a sentence each."""
    if optim.name not in TABLE:
        yield _unknown(optim.name)
    else:
        yield from _refused("settings", optim.settings, lambda text: _setting(TABLE[optim.name], optim.name, text))
        names = [text.partition("=")[0].strip() for text in optim.settings or ()]
        yield from (f"optim.settings has {name} twice" for name in sorted(set(names)) if names.count(name) > 1)
    yield from _refused("groups", optim.groups, Group.of)


def refusal(name: str, strategy: str) -> str | None:
    """Return why the optimizer may not step under a strategy (`Launched.strategy`), and what may; None: it may."""
    why = TABLE[name].whole_because
    if not why or strategy not in _CUTTING:
        return None
    anywhere = ", ".join(other for other, found in TABLE.items() if not found.whole_because)
    return (
        f"optim.name is {name}, which needs unsharded parameters ({why}), but the preset's "
        f"{_CUTTING[strategy]} shards them: use {', '.join(WHOLE_PRESETS[:-1])} or {WHOLE_PRESETS[-1]}, or an "
        f"optimizer that works on shards: {anywhere}"
    )


def notes_on(optim: OptimRecipe) -> list[str]:
    """Return which keys are set and taken by another optimizer only, a sentence each."""
    others = {key for found in TABLE.values() for key in found.keys} - set(TABLE[optim.name].keys)
    unlike = [it.name for it in fields(optim) if it.name in others and getattr(optim, it.name) != it.default]
    own = TABLE[optim.name].settings
    return [
        f"optim.{key} is {getattr(optim, key)}, and {optim.name} does not take it"
        + (f": its own is optim.settings={key}={own[key]}" if key in own else "")
        for key in unlike
    ]


def settings_of(optim: OptimRecipe) -> dict[str, Any]:
    """Return what the optimizer takes, by torch's names, but for lr and weight_decay, where it is not torch's default."""
    found = TABLE[optim.name]
    keys = {key: getattr(optim, key) for key in found.keys}
    return {**keys, **dict(_setting(found, optim.name, text) for text in optim.settings or ())}


@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate or a weight decay of their own."""

    pattern: str
    """Of their names, as the shell has it (`fnmatch`)."""
    lr_factor: float = 1.0
    """Their learning rate, as a multiple of the step's."""
    weight_decay: float | None = None
    """That of all of them; None: the recipe's, of their matrices and kernels."""

    @classmethod
    def of(cls, text: str) -> Group:
        """Read `PATTERN lr_factor=F weight_decay=W`, of which one number may be left out. Raises ValueError."""
        pattern, *words = text.split() or [""]
        given: dict[str, float] = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in ("lr_factor", "weight_decay"):
                raise ValueError(f"{word} is neither lr_factor=F nor weight_decay=W")
            if name in given:
                raise ValueError(f"{name} is given twice")
            given[name] = _number(name, number)
            if given[name] < 0:
                raise ValueError(f"{name} is {number}: it must be at least 0")
        if "=" in pattern or not given:
            raise ValueError("expected PATTERN lr_factor=F weight_decay=W, or one of the two numbers")
        return cls(pattern, **given)


def groups_of(optim: OptimRecipe) -> list[Group]:
    """Return the recipe's groups, in its order: the first that matches a parameter is that parameter's."""
    return [Group.of(text) for text in optim.groups or ()]


def _unknown(name: str) -> str:
    left_out = {key: why for other, why in LEFT_OUT.items() for key in (other, other.lower(), f"torch.optim.{other}")}
    if name in left_out:
        why = left_out[name]
    else:
        near = difflib.get_close_matches(name.rpartition(".")[2].lower(), TABLE, n=2, cutoff=0.6)
        why = f"did you mean {' or '.join(near)}?" if near else "there is no such optimizer"
    return f"optim.name is {name!r}: {why}; there is {', '.join(TABLE)}"


def _refused(key: str, texts: Sequence[str] | None, read: Any) -> Iterator[str]:
    for text in texts or ():
        try:
            read(text)
        except ValueError as error:
            yield f"optim.{key} has {text!r}: {error}"


def _setting(optimizer: Optimizer, name: str, text: str) -> tuple[str, bool | float]:
    """The name and value of a `NAME=VALUE`, of the type that the default has. Raises ValueError."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ValueError("expected NAME=VALUE")
    if key in (*optimizer.keys, "lr", "weight_decay"):
        raise ValueError(f"give it as optim.{key}")
    if key not in optimizer.settings:
        near = difflib.get_close_matches(key, optimizer.settings, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{name} has no such setting; {hint}it has {', '.join(optimizer.settings) or 'none'}")
    if isinstance(optimizer.settings[key], bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{key} is {value}: it must be true or false")
        return key, value.lower() == "true"
    return key, _number(key, value)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text or 'empty'}: it must be a number")
    return number
