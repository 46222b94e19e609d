"""The loss and the right answers of the steps that were applied, added up on the device: nothing waits for them."""

from __future__ import annotations

import torch


class Losses:
    """This process's part of the summed loss, and of the samples that were classified right, since they were last taken."""

    # Adding up many steps at once costs what adding up one does, and few enough are kept that it needs no memory.
    _STEPS = 64

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._passes: list[torch.Tensor] = []
        self._answers: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._count = 0
        self._skipped: list[torch.Tensor | bool] = []

    def add(self, loss: torch.Tensor, count: int) -> None:
        """Take in the mean loss, a scalar, of one forward pass over `count` samples: as many in every pass."""
        self._passes.append(loss.detach())
        self._count = count

    def add_answers(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Take in what the same pass answered: logits [count, classes], and the right classes, int64 [count].

        Of the logits only the largest are kept: they may be many, and a CUDA graph writes the next ones over them.
        """
        self._answers.append(logits.detach().argmax(1))
        self._labels.append(labels)

    def end_step(self, skipped: torch.Tensor | bool) -> None:
        """Finish a step; what was skipped (a bool scalar) has no part in the sums. All steps have equally many passes."""
        self._skipped.append(skipped)
        if len(self._skipped) >= self._STEPS:
            self._add_up()

    def take(self) -> torch.Tensor:
        """Return the summed loss and the number of right answers, NaN without answers, float64 [2], and begin new ones."""
        if self._skipped:
            self._add_up()
        taken, self._sums = self._sums, torch.zeros_like(self._sums)
        return taken

    def _add_up(self) -> None:
        num_steps = len(self._skipped)
        losses = self._count * torch.stack(self._passes).double().view(num_steps, -1).sum(1)
        right = torch.full_like(losses, torch.nan)
        if self._answers:
            right = (torch.stack(self._answers) == torch.stack(self._labels)).view(num_steps, -1).sum(1).double()
        skipped = torch.stack([torch.as_tensor(one, device=losses.device) for one in self._skipped])
        self._sums = self._sums + torch.stack([losses, right]).masked_fill(skipped, 0.0).sum(1)
        self._passes, self._answers, self._labels, self._skipped = [], [], [], []
