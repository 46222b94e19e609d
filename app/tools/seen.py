"""What a rank saw of a few steps: a digest of each field of each sample, losses, norms; written as JSON and read again.

Two fields are the same if their bytes are, or if they differ by no more than rounding: a vectorised function may round the last
samples of a batch otherwise than the ones before. So beside the digest stands a projection, a sum with weights that follow from
the place alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.data.samples import Batch
from app.task import Loss

_OF_THE_FEED = ("samples", "numbers")
ROUNDING = 1e-6
"""Of a projection, as a share of the sum of magnitudes, in float32 and finer types."""


class Print(NamedTuple):
    """What stands for a field of a sample."""

    digest: str
    """Of its type and bytes."""
    shape: tuple[int, ...]
    projection: float
    magnitude: float
    """Sum of the absolute values."""
    rounding: float
    """Share of the magnitude by which rounding may change the projection; 0: nothing is rounded."""

    def is_like(self, other: Print) -> bool:
        """Whether the two can stand for the same values. Of another shape they can: a batch may be filled up to its longest."""
        if self.shape != other.shape or self.digest == other.digest:
            return True
        if not self.rounding or not other.rounding:
            return False
        most = max(self.rounding, other.rounding) * max(self.magnitude, other.magnitude)
        return abs(self.projection - other.projection) <= most  # false where one is not a number


class Pass(NamedTuple):
    """A forward pass."""

    step: int
    numbers: tuple[int, ...]
    total: float
    """The summed loss."""
    counted: float


Prints = dict[int, dict[str, Print]]
"""Of each field, by sample number."""


@dataclass
class Seen:
    """What one rank has seen, or several have."""

    path: Path
    sources: str = ""
    """`app.tasks.digest` of the task."""
    depends: list[str] = field(default_factory=list)
    """Sentences: through which layers losses depend on the topology anyway."""
    broken: list[tuple[str, str]] = field(default_factory=list)
    """What one process could see by itself: the rule, and a sentence."""
    fetch: Prints = field(default_factory=dict)
    ready: Prints = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of the gradient of each step, before clipping."""
    weighed: list[float] = field(default_factory=list)
    """What the counts of each step were taken to add up to."""

    def fetched(self, batch: Batch) -> None:
        """Take in a batch as `fetch` has made it."""
        self.fetch |= prints_of(batch)

    def made_ready(self, batch: Batch) -> None:
        """Take in a batch as `ready` has made it."""
        self.ready |= prints_of(batch)

    def passed(self, step: int, numbers: Sequence[int], loss: Loss) -> None:
        """Take in a forward pass over these samples."""
        count = float(loss.count)
        self.passes.append(Pass(step, tuple(numbers), float(loss.mean.detach()) * count, count))

    def stepped(self, norm: Tensor | float, weighed: Tensor | float) -> None:
        """Take in a step."""
        self.norms.append(float(norm))
        self.weighed.append(float(weighed))

    def write(self) -> None:
        """Write all of it."""
        self.path.write_text(json.dumps({**asdict(self), "path": str(self.path)}))


def prints_of(batch: Batch) -> Prints:
    """Return the prints of a batch's samples: of each tensor that has a row for each."""
    numbers = batch["samples"].tolist()
    found: Prints = {number: {} for number in numbers}
    for name, value in batch.items():
        if name not in _OF_THE_FEED and isinstance(value, Tensor) and value.ndim and len(value) == len(numbers):
            for number, one in zip(numbers, _prints(value.detach().cpu()), strict=True):
                found[number][name] = one
    return found


def _prints(values: Tensor) -> list[Print]:
    shape = tuple(values.shape[1:])
    flat = values.contiguous().reshape(len(values), -1)
    weights = (torch.arange(1, flat.shape[1] + 1, dtype=torch.float64) * 0.6180339887498949) % 1 + 0.5
    if values.is_floating_point():
        fine = flat.double()
        projections, magnitudes = (fine @ weights).tolist(), fine.abs().sum(1).tolist()
        rounding = max(ROUNDING, 8 * torch.finfo(values.dtype).eps)
    else:
        projections, magnitudes = [0.0] * len(values), [0.0] * len(values)
        rounding = 0.0
    rows = flat.view(torch.uint8).numpy() if flat.shape[1] else flat.numpy()
    digests = [hashlib.blake2b(row.tobytes() + str(values.dtype).encode(), digest_size=8).hexdigest() for row in rows]
    values_of = zip(digests, projections, magnitudes, strict=True)
    return [Print(digest, shape, projection, magnitude, rounding) for digest, projection, magnitude in values_of]


def read(folder: Path) -> Seen:
    """Return what all ranks of a topology have seen and written there, in the order of the ranks."""
    whole = Seen(folder)
    for path in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
        told = json.loads(path.read_text())
        whole.sources, whole.depends = told["sources"], told["depends"]
        whole.broken += [(rule, text) for rule, text in told["broken"]]
        whole.fetch |= _prints_read(told["fetch"])
        whole.ready |= _prints_read(told["ready"])
        whole.passes += [Pass(step, tuple(numbers), total, count) for step, numbers, total, count in told["passes"]]
        whole.norms, whole.weighed = told["norms"], told["weighed"]
    return whole


def _prints_read(told: dict[str, Any]) -> Prints:
    return {
        int(number): {name: Print(one[0], tuple(one[1]), *one[2:]) for name, one in fields.items()}
        for number, fields in told.items()
    }
