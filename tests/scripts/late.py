"""Two ranks that let each other wait, where torch's own time-outs are shorter than that.

    accelerate launch ... tests/scripts/late.py SECONDS_BY_TORCH SECONDS_LATE

Those of NCCL and gloo are 600 s and 1800 s, for which no test can wait.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.optim.steps import Steps
from app.recipe.schema import BatchPlan

by_torch_s, late_s = map(float, sys.argv[1:])
distributed_c10d.default_pg_timeout = timedelta(seconds=by_torch_s)

launched = read(os.environ)
runtime = Runtime(launched, BatchPlan(global_batch_size=2, data_ranks=2, accumulation=1))
module = torch.nn.Linear(4, 4)
model, optimizer = runtime.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
steps = Steps(runtime.accelerator, model, optimizer, clip_norm=None)

with runtime.together():
    if runtime.is_main:
        time.sleep(late_s)  # as one that downloads
print(f"rank {launched.rank} came together", flush=True)
if not runtime.is_main:
    time.sleep(late_s)  # as one whose data come late
with steps.micro_batch():
    steps.backward(model(torch.ones(1, 4, device=runtime.device)).sum(), 1.0)
    steps.take(0.1)
print(f"rank {launched.rank} took a step", flush=True)
runtime.close(model, optimizer)
