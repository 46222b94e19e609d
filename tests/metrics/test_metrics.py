"""What metrics keep of each step, and how they read it."""

from __future__ import annotations

import pytest
import torch
import waits

from app.metrics.metrics import Losses, SampleDigests, _on_host
from app.optim.steps import SpikeGuard
from app.task import Later, Loss
from app.tasks.image_classification.task import _right

STEPS = 3


@pytest.mark.parametrize("verdict", ["on the device", "skipped", "taken"])
@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_nothing_waits_for_a_gpu_while_it_is_kept(verdict: str, with_sums: bool, counted: bool) -> None:
    with waits.without_any() as device:
        losses, digests, spikes = Losses(device, with_sums=with_sums), SampleDigests(), SpikeGuard(100.0)
        number, logits = torch.zeros((), device=device), torch.zeros(8, 10, device=device)
        labels = logits[:, 0].long()
        for _ in range(STEPS):
            for _ in range(2):
                losses.add(Loss(number, number if counted else 8, {"accuracy": Later(_right, (logits.argmax(1), labels))}))
                digests.add(labels)
            digests.end_step()
            losses.end_step(number if verdict == "on the device" else verdict == "skipped")
            if verdict == "on the device":
                spikes.see(number, skipped=number)
        sums, steps = losses.take(), digests.take()
    assert (sums.device, sums.shape) == (device, (4 if with_sums else 2,))
    assert (steps.device, steps.shape) == (device, (STEPS,))


def test_verdicts_are_read_in_their_order_and_together() -> None:
    verdicts = [True, torch.tensor(1.0), torch.tensor(0.0), False, torch.tensor(1.0)]
    assert _on_host(verdicts) == [True, True, False, False, True]
    assert _on_host([]) == []
    assert {type(verdict) for verdict in _on_host(verdicts)} == {bool}
