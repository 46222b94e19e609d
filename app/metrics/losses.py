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
        """Finish a step; what was skipped (as `Step.skipped`) has no part in the sums. All steps have equally many passes."""
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
        losses, right = torch.stack(self._passes), self._right()
        spoilt = self._spoilt(len(losses))
        if spoilt is not None:
            losses, right = losses.masked_fill(spoilt, 0.0), right & ~spoilt.unsqueeze(1)
        # Without answers the number of the right ones is not known.
        num_right = right.sum().double() if self._answers else torch.full_like(self._sums[1], torch.nan)
        self._sums = self._sums + torch.stack([self._count * losses.sum(dtype=torch.float64), num_right])
        self._passes, self._answers, self._labels, self._skipped = [], [], [], []

    def _right(self) -> torch.Tensor:
        """Which answers were right: bool [passes, count], or [1, 1] if there were none."""
        if not self._answers:
            return torch.zeros(1, 1, dtype=torch.bool, device=self._sums.device)
        answers, labels = torch.stack(self._answers), torch.stack(self._labels)
        return labels == (answers if answers.shape == labels.shape else answers.max(-1).indices)  # on CPU half of argmax's time

    def _spoilt(self, num_passes: int) -> torch.Tensor | None:
        """Which passes are of skipped steps, bool [passes]; None where it is known on the host that there are none."""
        verdicts = [verdict for verdict in self._skipped if isinstance(verdict, torch.Tensor)]
        if not verdicts and not any(self._skipped):
            return None
        told = torch.stack(verdicts).bool() if verdicts else torch.tensor(self._skipped)
        skipped = told.to(self._sums.device, non_blocking=True)
        return skipped.repeat_interleave(num_passes // len(skipped))
