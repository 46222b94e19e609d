"""A process that another library has told to compute otherwise builds a Runtime, and says what torch is told then.

Usage: numerics.py OUT TF32 DETERMINISTIC, each of these two 0 or 1; rank 0 writes the settings to OUT as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from app.distributed.runtime import Runtime
from app.environment.launched import read
from app.environment.slurm_variables import own_environment
from app.recipe.schema import BatchPlan


def settings() -> dict[str, object]:
    """Return all that torch has to say of float32 and of determinism; the old names raise an error if the new ones disagree."""
    backends = torch.backends
    return {
        "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": backends.cudnn.allow_tf32,
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cuda.matmul": backends.cuda.matmul.fp32_precision,
        "cudnn": backends.cudnn.fp32_precision,
        "mkldnn.matmul": backends.mkldnn.matmul.fp32_precision,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def spoil() -> None:
    """Set what others set: Accelerate and inference scripts the first, torchvision's and timm's training the last."""
    torch.set_float32_matmul_precision("medium")  # bf16 on CPUs with instructions for it
    torch.backends.fp32_precision = "bf16"
    torch.backends.cudnn.benchmark = True


if __name__ == "__main__":
    spoil()
    launched = read(own_environment())
    plan = BatchPlan(global_batch_size=launched.world_size, data_ranks=launched.world_size, accumulation=1)
    runtime = Runtime(launched, plan, tf32=sys.argv[2] == "1", deterministic=sys.argv[3] == "1")
    if runtime.is_main:
        Path(sys.argv[1]).write_text(json.dumps(settings()))
    runtime.close()
