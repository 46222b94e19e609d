"""What each rank measures of itself for a logged line: where its time went, its memory and its throughput."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from app.metrics.clock import Clock, Spent
from app.metrics.communication import Communication
from app.ranks.runtime import Runtime


class Gauges:
    """The readings of all ranks, in one collective."""

    def __init__(
        self,
        runtime: Runtime,
        model: torch.nn.Module,
        *,
        flops_per_sample: float,
        peak_flops_per_s: float | None,
    ) -> None:
        """`model` is as `prepare` returned it.

        `flops_per_sample` is that of a forward and backward pass, 0 if not known; `peak_flops_per_s` is what one device can
        do, if known.
        """
        self._runtime, self.clock = runtime, Clock(runtime.device)
        self.communication = Communication(model, self.clock, runtime.device)
        self._flops_per_sample, self._peak_flops_per_s = flops_per_sample, peak_flops_per_s
        self._process = psutil.Process()

    def read(self, sums: torch.Tensor, spent: Spent, *, samples: int) -> tuple[list[float], dict[str, Any]]:
        """Return the data-parallel ranks' `sums` (float64 [n]) added up, and the readings by name, of so many samples.

        All ranks call it.
        Shares are of the time that was spent training, the mean of the ranks; memory is that of the rank with most. What is
        not known is None: communication where there is no process group, utilization where the device's peak or the
        arithmetic of a sample is not known.
        """
        phases_s = spent.phases_s
        times_s = [phases_s["data_wait"], phases_s["forward_backward"], phases_s["optimizer"], phases_s["communication"]]
        own = [spent.training_s, *times_s, float(self._memory_bytes())]
        readings = torch.cat([sums, torch.tensor(own, dtype=torch.float64).to(sums.device)])
        # In plain numbers from here on: each operation on a small tensor takes as long as all of them.
        ranks: list[list[float]] = self._runtime.accelerator.gather(readings[None]).tolist()
        *totals, _ = (sum(column) for column in zip(*ranks, strict=True))
        training_s, *parts_s = totals[len(sums) :]
        of_data = ranks[:: self._runtime.launched.tensor_parallel]  # the others of a group have the same sums
        added_up = [sum(column) for column in zip(*(rank[: len(sums)] for rank in of_data), strict=True)]
        data_wait, forward_backward, optimizer, communication = (part_s / training_s for part_s in parts_s)
        samples_per_s = samples / (training_s / len(ranks))
        flops_per_s = samples_per_s * self._flops_per_sample if self._flops_per_sample else None
        peak = self._peak_flops_per_s
        return added_up, {
            "samples_per_s": samples_per_s,
            "samples_per_s_per_device": samples_per_s / len(ranks),
            "data_wait_share": data_wait,
            "forward_backward_share": forward_backward,
            "communication_share": communication if self.communication.is_timed else None,
            "optimizer_share": optimizer,
            "flops_per_s": flops_per_s,
            "mfu": None if peak is None or flops_per_s is None else flops_per_s / (peak * len(ranks)),
            "memory_bytes": int(max(rank[-1] for rank in ranks)),
        }

    def _memory_bytes(self) -> int:
        """The most that the GPU's tensors held since the last time; on a CPU, what the process holds now."""
        device = self._runtime.device
        if device.type != "cuda":
            held_bytes: int = self._process.memory_info().rss
            return held_bytes
        peak_bytes: int = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak_bytes
