"""One process of `python -m benchmarks.planning`: trains as `app.train` does, and counts what torch's allocator gives out.

    python -m benchmarks.planning_case FOLDER --recipe ... (the words of app.train)

Counted is what torch's profiler tells of each allocation of this process, from before the model is there, so that the sum is
what is held. The worst moment of the steps is kept; rank R writes FOLDER/R.json.
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
    """Train for three steps, and write `steps` (the most bytes within them) and their `count`."""
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
    thread of its own, as soon as that is done, or now and then in this one. So the copy counts until the reduce-scatter ends.
    """
    assert profile.profiler is not None
    results: Any = profile.profiler.kineto_results
    steps = [(it.start_ns(), it.start_ns() + it.duration_ns()) for it in results.events() if it.name() == _STEP]
    held: dict[int, int] = {}
    copies: set[int] = set()
    total = most = 0
    for moment, address, size, is_copy in sorted(_allocations(results.experimental_event_tree())):
        gone = {address} if is_copy else {address, *copies}  # this thread goes on when a reduce-scatter has ended
        total -= sum(held.pop(one, 0) for one in gone)
        copies -= gone
        if size > 0:
            held[address] = size
            total += size
            copies |= {address} if is_copy else set()
        if any(begin <= moment <= end for begin, end in steps):
            most = max(most, total)
    return {"steps": most, "count": len(steps)}


def _allocations(events: list[Any]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield when each was, its address, its bytes (negative: they were given back), and whether gloo made it for a copy."""
    left = [(event, False) for event in events]
    while left:
        event, within = left.pop()
        within = within or event.name == "c10d::_reduce_scatter_base_"
        left += [(child, within) for child in event.children]
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, within


if __name__ == "__main__":
    main(sys.argv[1:])
