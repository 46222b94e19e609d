"""What most training scripts do: a plain Accelerator. Then our checks look at what came of it."""

from __future__ import annotations

import os
import sys

from accelerate import Accelerator

from app.distributed import handshake
from app.environment.launched import read
from app.errors import SamerunError
from app.recipe.schema import BatchPlan

launched = read(os.environ)
accelerator = Accelerator(cpu="--cpu" in sys.argv)
plan = BatchPlan(global_batch_size=8, data_ranks=launched.world_size, accumulation=1)
try:
    handshake.check_group(accelerator, launched, plan)
except SamerunError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(error.exit_code)
os._exit(0)
