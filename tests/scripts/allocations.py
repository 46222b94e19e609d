"""Trains as `app.train` does, and counts what torch's allocator gives out.

    python tests/scripts/allocations.py FOLDER --recipe ... (the words of app.train)

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
_CONVOLUTIONS = ("aten::mkldnn_convolution", "aten::convolution_backward")


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

    A convolution's scratch memory is left out: oneDNN takes from 0 to 38 MB for a layer, as the CPU's instructions have it, and
    a plan is made for other machines.

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
        scratch = _scratch(event.children) if event.name in _CONVOLUTIONS else []
        left += [(child, within) for child in event.children if child not in scratch]
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, within


def _scratch(children: list[Any]) -> list[Any]:
    """What an operation itself takes and gives back before it ends."""
    memory = [child for child in children if child.name == "[memory]"]
    fields = [child.extra_fields for child in memory]
    given_back = {(it.ptr, -it.alloc_size) for it in fields if it.alloc_size < 0}
    taken = {(it.ptr, it.alloc_size) for it in fields if it.alloc_size > 0} & given_back
    return [child for child, it in zip(memory, fields, strict=True) if (it.ptr, abs(it.alloc_size)) in taken]


if __name__ == "__main__":
    main(sys.argv[1:])
