"""The loss of the steps that were applied, added up on the device: nothing waits for it."""

from __future__ import annotations

import torch


class Losses:
    """This process's part of the summed loss since it was last taken."""

    # Adding up many steps at once costs what adding up one does, and few enough are kept that it needs no memory.
    _STEPS = 64

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._passes: list[torch.Tensor] = []
        self._count = 0
        self._skipped: list[torch.Tensor | bool] = []

    def add(self, loss: torch.Tensor, count: int) -> None:
        """Take in the mean loss, a scalar, of one forward pass over `count` samples: as many in every pass."""
        self._passes.append(loss.detach())
        self._count = count

    def end_step(self, skipped: torch.Tensor | bool) -> None:
        """Finish a step; what was skipped (a bool scalar) has no part in the sum. All steps have equally many passes."""
        self._skipped.append(skipped)
        if len(self._skipped) >= self._STEPS:
            self._add_up()

    def take(self) -> torch.Tensor:
        """Return the sum, a float64 scalar, and begin a new one."""
        if self._skipped:
            self._add_up()
        taken, self._sum = self._sum, torch.zeros_like(self._sum)
        return taken

    def _add_up(self) -> None:
        steps = self._count * torch.stack(self._passes).double().view(len(self._skipped), -1).sum(1)
        skipped = torch.stack([torch.as_tensor(one, device=steps.device) for one in self._skipped])
        self._sum = self._sum + steps.masked_fill(skipped, 0.0).sum()
        self._passes, self._skipped = [], []
