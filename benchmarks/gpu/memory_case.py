"""One process of `benchmarks.gpu.memory`: trains as `app.train` does on a GPU, whose allocator counts what it gives out.

python -m benchmarks.gpu.memory_case FOLDER --recipe ... (the words of app.train)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from app import loop, train

_STEPS = 3


def main(argv: list[str]) -> None:
    """Train for three steps, and write FOLDER/0.json.

    It has `steps` (the most bytes within steps), `reserved` (those taken from the driver by then) and `count`.
    """
    folder, *words = argv
    take, taken = loop._take_step, 0

    def counted(*arguments: Any) -> Any:
        nonlocal taken
        if taken == 0:
            torch.cuda.reset_peak_memory_stats()
        step = take(*arguments)
        taken += 1
        if taken == _STEPS:
            most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            found = {"steps": most, "reserved": reserved, "count": taken}
            Path(folder, "0.json").write_text(json.dumps(found))
            os._exit(0)  # what comes after the steps takes longer, and is not asked for
        return step

    loop._take_step = counted  # type: ignore[assignment]
    train.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
