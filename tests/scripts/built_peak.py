"""Fills a Llama of 334 million parameters under a preset; writes the peak of each rank's own memory meanwhile, in MiB.

python tests/scripts/built_peak.py OUT.json
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "init"))
MIB = 2**20
SIZES = {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 4096, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 1024}  # fmt: skip


def own_mib() -> float:
    """What this process has for itself: neither files nor memory that it shares (proc(5), RssAnon)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Peak(threading.Thread):
    """Looks every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.highest = own_mib()
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.highest = max(self.highest, own_mib())
            time.sleep(0.002)


def main(out: str) -> None:
    from drawn_models import Drawn, llama

    from app.distributed.runtime import Runtime
    from app.environment.launched import read
    from app.init import filling, model_tensors
    from app.recipe.schema import BatchPlan

    launched = read(os.environ)
    runtime = Runtime(launched, BatchPlan(global_batch_size=12, data_ranks=launched.world_size, accumulation=1))
    task = Drawn(lambda: llama(**SIZES))
    # Memory of before is not to be had again, and what is loaded late not to be counted.
    small, units = filling.made(Drawn(llama), {}, seed=0)
    assert units is not None
    filling.fill(runtime, small, units)
    torch.ones(2, 2) @ torch.ones(2, 2)
    peak = Peak()
    peak.start()
    model, units = filling.made(task, {}, seed=0)
    assert units is not None
    parameters = [it.numel() * it.element_size() / MIB for it in model.parameters()]
    filling.fill(runtime, model, units)
    peak.is_over = True
    peak.join()
    share = sum(it.values.numel() * it.values.element_size() for it in {*model_tensors.local_pieces(model).values()}) / MIB
    found = {"peak": peak.highest - peak.before, "share": share, "largest": max(parameters), "whole": sum(parameters)}
    everywhere = runtime.gather(found)
    if runtime.is_main:
        Path(out).write_text(json.dumps(everywhere))
    runtime.gather(None)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
