"""Digests of the samples that a process was fed in each step; they add up over the processes and can be checked later."""

from __future__ import annotations

import torch

from app.record import ledger


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
