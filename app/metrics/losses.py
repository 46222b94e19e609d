"""Sums of the loss and digests of the samples over the applied steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from app.errors import TrainingError
from app.runs import ledger
from app.task import Later, Loss


class Losses:
    """This process's part of the summed loss, and of the task's own sums, since they were last taken."""

    _STEPS = 64  # Adding up many steps at once costs what adding up one does, and few enough are kept that it needs no memory.

    def __init__(self, device: torch.device, *, with_sums: bool = True) -> None:
        """`with_sums`: whether the task's own sums are wanted."""
        self._device, self._with_sums = device, with_sums
        self.names: tuple[str, ...] | None = None
        """Of the task's sums; known after the first pass."""
        self._taken = torch.zeros(2, dtype=torch.float64, device=device)
        self._means: list[Tensor] = []
        self._counts: list[int | Tensor] = []
        self._sums: list[Mapping[str, Later]] = []
        self._skipped: list[Tensor | bool] = []

    def add(self, loss: Loss) -> None:
        """Take in the loss of one forward pass."""
        sums = loss.sums if self._with_sums else {}
        if self.names is None:
            self.names = tuple(sums)
            self._taken = torch.zeros(2 + 2 * len(sums), dtype=torch.float64, device=self._device)
        elif self.names != tuple(sums):
            raise TrainingError(
                f"the task's loss reports {', '.join(sums) or 'nothing'}, but reported in its first pass "
                f"{', '.join(self.names) or 'nothing'}: Loss.sums must have the same names, in the same "
                "order, in every pass"
            )
        self._means.append(loss.mean.detach())
        self._counts.append(loss.count)
        self._sums.append(sums)

    def counted(self) -> Tensor:
        """Return what the passes of the first step were means over, together, a float64 scalar; called before its end."""
        return torch.stack([torch.as_tensor(count, device=self._device).double() for count in self._counts]).sum()

    def end_step(self, skipped: Tensor | bool) -> None:
        """Finish a step; what was skipped (as `Step.skipped`) has no part in the sums. All steps have equally many passes."""
        self._skipped.append(skipped)
        if len(self._skipped) >= self._STEPS:
            self._add_up()

    def take(self) -> Tensor:
        """Return the summed loss and its count, and those of each of `names`, float64 [2 + 2 * names]; begin new ones."""
        if self._skipped:
            self._add_up()
        taken, self._taken = self._taken, torch.zeros_like(self._taken)
        return taken

    def _add_up(self) -> None:
        spoilt = self._spoilt(len(self._means))
        added_up = [_summed(*self._losses(), spoilt)]
        for name in self.names or ():
            added_up.append(_summed(*self._of([sums[name] for sums in self._sums]), spoilt))
        self._taken = self._taken + torch.cat(added_up)
        self._means, self._counts, self._sums, self._skipped = [], [], [], []

    def _losses(self) -> tuple[Tensor, Tensor | float, float]:
        """The losses of the passes, their counts, and by what to multiply."""
        means, counts = torch.stack(self._means), self._counts
        if set(map(type, counts)) == {int} and len(set(counts)) == 1:
            return means, 1.0, float(counts[0])  # a product once, after the sum: as it always was, to the last bit
        each = torch.stack([torch.as_tensor(count, device=self._device) for count in counts]).double()
        return torch.where(each > 0, means.double() * each, 0.0), each, 1.0

    def _of(self, passes: Sequence[Later]) -> tuple[Tensor, Tensor | float, float]:
        stacked = map(torch.stack, zip(*[later.tensors for later in passes], strict=True))
        found, counts = passes[0].of(*stacked)
        return found, counts, 1.0

    def _spoilt(self, num_passes: int) -> Tensor | None:
        """Which passes are of skipped steps, bool [passes]; None where it is known on the host that there are none."""
        verdicts = [verdict for verdict in self._skipped if isinstance(verdict, Tensor)]
        if not verdicts and not any(self._skipped):
            return None
        told = torch.stack(verdicts).bool() if verdicts else torch.tensor(self._skipped)
        skipped = told.to(self._device, non_blocking=True)
        return skipped.repeat_interleave(num_passes // len(skipped))


def _summed(values: Tensor, counts: Tensor | float, factor: float, spoilt: Tensor | None) -> Tensor:
    """The sum of the values [P] and of the counts, that of each or [P], times the factor, float64 [2]; without the spoilt."""
    if spoilt is not None:
        values = values.masked_fill(spoilt, 0)
        counts = torch.where(spoilt, 0.0, counts)
    total = values.sum(dtype=torch.float64)
    counted = counts.sum(dtype=torch.float64) if isinstance(counts, Tensor) else torch.full_like(total, counts * len(values))
    return torch.stack([total, counted]) * factor


class Fed:
    """What this process was fed, as one number a step: made on the device, and nothing waits for it."""

    # Hashing many batches at once costs what hashing one of them does, and few enough are kept that it needs no memory.
    _BATCHES = 256

    def __init__(self) -> None:
        self._batches: list[torch.Tensor] = []
        self._steps = 0
        self._digests: list[torch.Tensor] = []

    def add(self, samples: torch.Tensor) -> None:
        """Take in the sample numbers, int64 [micro-batch], of one forward pass."""
        self._batches.append(samples)

    def end_step(self) -> None:
        """Finish a step; all steps have equally many forward passes."""
        self._steps += 1
        if len(self._batches) >= self._BATCHES:
            self._hash()

    def take(self) -> torch.Tensor:
        """Return the digests, int64 [steps], of all steps since the last call, of which there is at least one."""
        if self._batches:
            self._hash()
        digests, self._digests = torch.cat(self._digests), []
        return digests

    def _hash(self) -> None:
        self._digests.append(ledger.digest(torch.stack(self._batches).view(self._steps, -1)))
        self._batches, self._steps = [], 0
