"""How long a rank stands still for the others in a step, as far as its strategy tells."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

_SAMPLE_EVERY_STEPS = 10
"""DDP measures the first ten steps and every hundredth from then on, unless it is told otherwise."""


class Communication:
    """Exposed communication of a prepared model: what is left of it when the backward pass has ended.

    DDP times its own buckets, on GPUs by events (torch/csrc/distributed/c10d/reducer_timer.hpp); FSDP2 and DeepSpeed say
    nothing of it, and what they wait is part of the forward and backward pass and of the step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model if isinstance(model, DistributedDataParallel) else None
        if self._model is not None:
            self._model._set_ddp_runtime_logging_sample_rate(_SAMPLE_EVERY_STEPS)

    def exposed_s(self) -> float | None:
        """Return the seconds of one backward pass: the last that was measured. None: not known."""
        if self._model is None:
            return None
        said = self._model._get_ddp_logging_data()
        total_ns, hidden_ns = said.get("backward_comm_time"), said.get("backward_compute_comm_overlap_time")
        return None if total_ns is None or hidden_ns is None else max(0.0, (total_ns - hidden_ns) / 1e9)
