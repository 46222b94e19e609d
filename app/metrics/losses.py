"""The loss and the right answers of the steps that were applied, added up on the device: nothing waits for them."""

from __future__ import annotations

import torch


class Losses:
    """This process's part of the summed loss, and of the samples that were classified right, since they were last taken."""

    # Adding up many steps at once costs what adding up one does, and few enough are kept that it needs no memory.
    _STEPS = 64
    _FEW_LOGITS = 16_384

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

        Many logits are not kept, only the largest of them; nor are those that a CUDA graph writes the next ones over.
        """
        answers = logits.detach()
        self._answers.append(answers if answers.is_cpu and answers.numel() <= self._FEW_LOGITS else answers.argmax(1))
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
            answers, labels = torch.stack(self._answers), torch.stack(self._labels)
            chosen = answers if answers.shape == labels.shape else answers.max(-1).indices  # on CPU half of argmax's time
            right = (chosen == labels).view(num_steps, -1).sum(1).double()
        skipped = _stacked(self._skipped).to(losses.device)
        self._sums = self._sums + torch.stack([losses, right]).masked_fill(skipped, 0.0).sum(1)
        self._passes, self._answers, self._labels, self._skipped = [], [], [], []


def _stacked(verdicts: list[torch.Tensor | bool]) -> torch.Tensor:
    tensors = [verdict for verdict in verdicts if isinstance(verdict, torch.Tensor)]
    return torch.stack(tensors) if tensors else torch.tensor(verdicts)
