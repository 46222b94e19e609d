"""One process with a GPU that is busy for seconds: what ranks tell each other by gloo does not wait for it.

accelerate launch --num_processes 1 ... tests/scripts/busy.py
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from app.distributed.agreement import LONGEST_WAIT, _on_hosts, let_wait
from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.recipe.schema import BatchPlan

CYCLES = 4 * 10**9  # two seconds at 2 GHz

runtime = Runtime(read(os.environ), BatchPlan(global_batch_size=1, data_ranks=1, accumulation=1))
runtime.accelerator.reduce(torch.ones(1, device=runtime.device))  # the first collective connects
let_wait(dist.group.WORLD, LONGEST_WAIT)
hosts = _on_hosts(LONGEST_WAIT)
told = [None]
dist.all_gather_object(told, "so", group=hosts)
torch.accelerator.synchronize()

torch.cuda._sleep(CYCLES)
done = torch.cuda.Event()
done.record()
start_s = time.perf_counter()
dist.all_gather_object(told, "so", group=hosts)
elapsed_s = time.perf_counter() - start_s
was_busy = not done.query()
assert told == ["so"]
assert was_busy, f"the GPU was done before the words, which took {elapsed_s:.3f} s"
print(f"told while the GPU was busy, in {elapsed_s:.6f} s", flush=True)
runtime.close()
