"""What metrics keep of each step, and how they read it."""

from __future__ import annotations

import pytest
import torch
import waits

from app.metrics.fed import Fed
from app.metrics.losses import Losses
from app.metrics.metrics import _on_host
from app.optim.spikes import SpikeGuard

STEPS = 3 * 64
"""In which everything is added up that is kept for a while."""


@pytest.mark.parametrize("verdict", ["on the device", "skipped", "taken"])
@pytest.mark.parametrize("counts_right", [True, False])
def test_nothing_waits_for_a_gpu_while_it_is_kept(verdict: str, counts_right: bool) -> None:
    with waits.without_any() as device:
        losses, fed, spikes = Losses(device), Fed(), SpikeGuard(100.0)
        number, logits = torch.zeros((), device=device), torch.zeros(8, 10, device=device)
        labels = logits[:, 0].long()
        for _ in range(STEPS):
            for _ in range(2):
                losses.add(number, 8)
                fed.add(labels)
                if counts_right:
                    losses.add_answers(logits, labels)
            fed.end_step()
            losses.end_step(number if verdict == "on the device" else verdict == "skipped")
            if verdict == "on the device":
                spikes.see(number, skipped=number)
        sums, digests = losses.take(), fed.take()
    assert (sums.device, sums.shape) == (digests.device, (2,)) == (device, (2,))
    assert digests.shape == (STEPS,)


def test_verdicts_are_read_in_their_order_and_together() -> None:
    verdicts = [True, torch.tensor(1.0), torch.tensor(0.0), False, torch.tensor(1.0)]
    assert _on_host(verdicts) == [True, True, False, False, True]
    assert _on_host([]) == []
    assert {type(verdict) for verdict in _on_host(verdicts)} == {bool}
