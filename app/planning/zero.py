"""What DeepSpeed takes for ZeRO, worked out from its settings, as the shipped presets leave them: at its defaults.

It is not traced: DeepSpeed's engine does not run on tensors without data. What stands here was read in deepspeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py, config.py) and is measured beside in docs/big-models-measured.md.
"""

from __future__ import annotations

import math

from app.planning import states
from app.planning.case import Case, Memory
from app.planning.model import Blueprint

BUCKET = 500_000_000
"""Elements of the buffer that gradients are added up in, whatever the size of the model (`reduce_bucket_size`)."""
LIVE = 1_000_000_000
"""Elements of weights that ZeRO-3 may keep gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""
SUBGROUP = 1_000_000_000
"""Elements that ZeRO-3 steps on at a time (`sub_group_size`)."""
_WHOLE = 4
"""Bytes of a number of what the optimizer steps on."""


def kept(case: Case, blueprint: Blueprint) -> Memory:
    """Return what lies there during the whole step, without buffers."""
    width, share = _width(case), _share(case, blueprint)
    trainable = blueprint.sizes.trainable
    frozen = blueprint.sizes.parameters - trainable
    state = states.of_shapes(case.plain_recipe.optim, [(share,)])
    average = share * _WHOLE if case.plain_recipe.train.ema_decay is not None else 0
    copies = share * _WHOLE
    if case.strategy in ("zero1", "zero2"):
        return Memory(weights=(trainable + frozen) * width, optimizer=copies + state + average)
    of_weights = (share + math.ceil(frozen / case.data_ranks)) * width
    gradients = share * width
    if case.strategy == "zero3":
        copies = 0 if width == _WHOLE else copies  # in float32 it steps on the weights themselves
        return Memory(weights=of_weights, gradients=gradients + _bucket(case), optimizer=copies + state + average)
    # The float32 weights that are stepped on, their gradients, the states, and what is kept of the weights.
    return Memory(gradients=_bucket(case), host=of_weights + gradients + 2 * copies + state + average)


def in_pass(case: Case, blueprint: Blueprint, phase: str) -> dict[str, int]:
    """Return what is taken in a phase of a pass, by kind."""
    width, sizes = _width(case), blueprint.sizes
    if case.strategy in ("zero1", "zero2"):
        if not phase.startswith("backward"):
            return {"gradients": _share(case, blueprint) * width if case.accumulation > 1 else 0}
        of_all = sizes.trainable * width if case.strategy == "zero1" else 0
        return {"gradients": of_all + _share(case, blueprint) * width + _bucket(case)}
    return {"weights": min(sizes.parameters, LIVE + sizes.largest_unit) * width}


def step(case: Case, blueprint: Blueprint, kept: Memory) -> Memory:
    """Return what is held while the optimizer steps."""
    share, width = _share(case, blueprint), _width(case)
    is_offloaded = case.strategy == "zero3_offload"  # then the optimizer steps on the host
    extra = states.of_step(case.plain_recipe.optim, [share * _WHOLE], on_gpu=case.device == "cuda" and not is_offloaded)
    if case.strategy in ("zero1", "zero2"):
        return kept.plus(gradients=share * (width + _WHOLE), optimizer=extra)
    if case.strategy == "zero3":
        at_a_time = min(share, SUBGROUP)
        live = min(blueprint.sizes.parameters, LIVE)
        return kept.plus(gradients=at_a_time * _WHOLE, optimizer=extra, weights=live * width)
    return kept.plus(host=extra)


def _width(case: Case) -> int:
    return _WHOLE if case.precision == "no" else 2


def _bucket(case: Case) -> int:
    return BUCKET * _width(case)


def _share(case: Case, blueprint: Blueprint) -> int:
    """Elements of a rank's part of what is trained."""
    return math.ceil(blueprint.sizes.trainable / case.data_ranks)
