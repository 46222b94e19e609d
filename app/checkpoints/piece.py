"""The unit of a checkpoint: a region of one tensor, addressed by the tensor's name, never by a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from app.initial.region import Region

WEIGHT, AVERAGE = "weight", "average"
"""The keys of the full-precision weights and of their moving average."""
FROZEN = "frozen"
"""The key of parameters that are not trained, and the folder of their file."""


@dataclass(frozen=True)
class Piece:
    """Some elements of one tensor that belongs to a parameter, or all."""

    key: str
    """What it is: WEIGHT, AVERAGE, or the optimizer's own name of a state tensor ("exp_avg", "momentum_buffer", ...)."""
    name: str
    """The parameter's plain name, as in model.safetensors."""
    shape: tuple[int, ...]
    """Of the whole tensor: the parameter's, but for states of optimizers that step on whole parameters only."""
    region: Region
    """Which elements they are."""
    values: torch.Tensor
    """The elements, 1-D, on any device; a view of live memory where it is read into."""
