"""One process of `python -m benchmarks.planning`: trains as `app.train` does, and counts what torch's allocator gives out.

    python -m benchmarks.planning_case FOLDER --recipe ... (the words of app.train)

Counted is what torch's profiler tells of each allocation of this process, from before the model is there, so that the sum is
what is held. Of the steps the worst moment is kept, and of the whole run; rank R writes FOLDER/R.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
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
    """What was held at most.

    The profiler sees what this thread allocates and gives back. gloo gives back its copy of what a reduce-scatter adds up in a
    thread of its own, whenever that comes to it: that is seen when the address is given out again, at the latest.
    """
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    steps = [(it.start_ns(), it.start_ns() + it.duration_ns()) for it in results.events() if it.name() == _STEP]
    held: dict[int, int] = {}
    total = in_steps = in_run = 0
    for moment, address, size in sorted(_allocations(results.experimental_event_tree()), key=lambda it: it[0]):
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
        in_run = max(in_run, total)
        if any(begin <= moment <= end for begin, end in steps):
            in_steps = max(in_steps, total)
    return {"steps": in_steps, "run": in_run, "count": len(steps)}


def _allocations(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield when each was, its address, and its bytes; negative: they were given back."""
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


if __name__ == "__main__":
    main(sys.argv[1:])
