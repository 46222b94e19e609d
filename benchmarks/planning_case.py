"""One process of `python -m benchmarks.planning`: trains as `app.train` does, and counts what torch's allocator gives out.

    python -m benchmarks.planning_case FOLDER --recipe ... (the words of app.train)

Counted is what torch's profiler tells of each allocation of this process, from before the model is there, so that the sum is
what is held. Of the steps the worst moment is kept, and of the whole run; rank R writes FOLDER/R.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app import loop, train

_STEP = "a step of the training"
_STEPS = 3


def main(argv: list[str]) -> None:
    """Train for three steps, and write `steps` (the most bytes within steps) and `run` (at any time until then)."""
    folder, *words = argv
    take, taken = loop._take_step, 0
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def named(*arguments: Any) -> Any:
        nonlocal taken
        with torch.profiler.record_function(_STEP):
            step = take(*arguments)
        taken += 1
        if taken == _STEPS:
            profile.stop()
            file = Path(folder) / f"{os.environ.get('RANK', '0')}.json"
            file.write_text(json.dumps(_peaks(profile)))
            if dist.is_initialized():
                dist.barrier()  # the others may still be in their step
            os._exit(0)  # what comes after the steps takes longer, and is not asked for
        return step

    loop._take_step = named  # type: ignore[assignment]
    profile.start()
    train.main(words)


def _peaks(profile: torch.profiler.profile) -> dict[str, int]:
    assert profile.profiler is not None
    events: list[Any] = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = [(it.start_ns(), it.start_ns() + it.duration_ns()) for it in events if it.name() == _STEP]
    held = in_steps = in_run = 0
    for event in sorted((it for it in events if it.name() == "[memory]"), key=lambda it: it.start_ns()):
        held += event.nbytes()
        in_run = max(in_run, held)
        if any(begin <= event.start_ns() <= end for begin, end in steps):
            in_steps = max(in_steps, held)
    return {"steps": in_steps, "run": in_run, "count": len(steps)}


if __name__ == "__main__":
    main(sys.argv[1:])
