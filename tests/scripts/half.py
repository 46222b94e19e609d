"""app.train on a CPU in fp16, with torch's gradient scaler for it, from a scale of SCALE on: as on a GPU."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator

from app.distributed import runtime
from app.train import main


def half(*given: object, **settings: object) -> Accelerator:
    accelerator = exact(*given, **settings)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(os.environ["SCALE"]))
    return accelerator


exact, runtime._build_accelerator = runtime._build_accelerator, half
with torch.autocast("cpu", torch.float16):
    main(sys.argv[1:])
