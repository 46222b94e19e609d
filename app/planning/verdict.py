"""What is said of a run by what was planned of its recipe: that it will not fit, and what to change. Standard library only."""

from __future__ import annotations

from app.planning.devices import GIB
from app.planning.kept import ORDER, Kept, KeptPlan

_MORE = {
    "single": "several devices with --preset fsdp2", "ddp": "--preset fsdp2", "zero1": "--preset fsdp2",
    "zero2": "--preset fsdp2",
    "hsdp": "--preset fsdp2", "fsdp2": "more devices, or --preset deepspeed_zero3_offload",
    "zero3": "more devices, or --preset deepspeed_zero3_offload", "tensor_parallel": "more devices",
    "zero3_offload": "more devices",
}  # fmt: skip
"""What divides more than each strategy."""


def too_large(kept: KeptPlan | None, wanted: Kept, micro_batch: int, *, memory: int, device: str) -> str | None:
    """Return that a run will not fit, by the plan, and what to change; None: it will, or nothing was planned of it.

    Args:
        kept: what was planned of the recipe.
        wanted: how it is to run, whatever it says of memory.
        micro_batch: samples of a pass.
        memory: bytes of each device.
        device: what it is called.
    """
    planned = kept and kept.find(wanted)
    if not kept or not planned or (total := planned.total(micro_batch)) <= memory:
        return None
    return (
        f"it will not fit, by the plan (not calibrated on a GPU): micro-batch {micro_batch} takes {_gib(total)} GiB of "
        f"{device}'s {_gib(memory)}. {what_to_change(kept, wanted, micro_batch, memory=memory)}"
    )


def too_large_for_host(planned: Kept, processes: int, *, memory: int, where: str) -> str | None:
    """Return that what so many processes of a node offload will not fit into its host's memory, and what to change."""
    if (total := planned.host * processes) <= memory:
        return None
    return (
        f"it will not fit, by the plan: {processes} process{'es' * (processes > 1)} of a node offload {_gib(total)} GiB, and "
        f"its host has {_gib(memory)} GiB ({where}). Take more nodes, or nodes with more memory"
    )


def never_fits(strategy: str, *, needed: int, memory: int, where: str, on_cpu: bool = False) -> str:
    """Return that no batch makes a run fit, and what to change: it takes `needed` bytes of the `memory` that is `where`."""
    return (
        f"weights, gradients and optimizer state alone take {_gib(needed)} GiB, and there are {_gib(memory)} "
        f"GiB {where}: no batch is small enough. Take {_more(strategy, on_cpu=on_cpu)}, or a smaller model"
    )


def ended(kept: KeptPlan | None, wanted: Kept, micro_batch: int, *, memory: int | None = None, on_cpu: bool = False) -> str:
    """Return what is said after a run has ended for lack of memory: what the plan said, and what to change.

    `on_cpu`: what it computes on is the host, where nothing is gained by offloading to it.
    """
    planned = kept.find(wanted) if kept else None
    said = "it was not planned (samerun plan)"
    if planned:
        of_device = f" of {_gib(memory)}" if memory else ""
        said = f"the plan said {_gib(planned.total(micro_batch))} GiB{of_device} for micro-batch {micro_batch}"
    # It did not fit, whatever the plan says: what is advised must take less than that.
    least = min([size for size in (memory, planned and planned.total(micro_batch)) if size], default=None)
    allowed = None if least is None else round(0.9 * least)
    return f"{said}. {what_to_change(kept, wanted, micro_batch, memory=allowed, on_cpu=on_cpu)}"


def what_to_change(kept: KeptPlan | None, wanted: Kept, micro_batch: int, *, memory: int | None, on_cpu: bool = False) -> str:
    """Return the change that costs the least, by what was planned; `memory` is what there is of a device, where it is known."""
    if kept and memory:
        ways = [way for way in kept.ways if not (on_cpu and way.strategy == "zero3_offload")]
        fitting = [found for way in ways if (found := _fitting(way, wanted, micro_batch, memory))]
        if fitting:
            _, change = min(fitting)
            return f"By the plan this fits: {change}"
    changes = []
    if micro_batch > 1:
        changes.append(f"train.max_micro_batch={micro_batch // 2}")
    if wanted.checkpoint_activations == "none":
        changes.append("train.checkpoint_activations=blocks")
    changes.append(_more(wanted.strategy, on_cpu=on_cpu))
    return f"Change {', or '.join(changes)}"


def _more(strategy: str, *, on_cpu: bool) -> str:
    """What divides more."""
    more = _MORE.get(strategy, "more devices")
    return more.replace("devices", "machines").partition(", or")[0] if on_cpu else more


def _fitting(way: Kept, wanted: Kept, micro_batch: int, memory: int) -> tuple[tuple[bool, bool, int], str] | None:
    """The change to a way on as many devices with which it fits, and how much it costs."""
    devices = wanted.data_ranks * wanted.tensor_parallel
    sizes = [size for size, total in way.totals if size <= micro_batch and total <= memory]
    if way.data_ranks * way.tensor_parallel != devices or way.precision != wanted.precision or not sizes:
        return None
    words = []
    if way.strategy != wanted.strategy:
        words.append(f"--preset {way.preset}")
    if sizes[-1] < micro_batch:
        words.append(f"train.max_micro_batch={sizes[-1]}")
    if way.checkpoint_activations != wanted.checkpoint_activations:
        words.append(f"train.checkpoint_activations={way.checkpoint_activations}")
    if not words:
        return None
    is_other = way.strategy != wanted.strategy
    return (is_other, way.checkpoint_activations == "blocks", ORDER.index(way.strategy)), " ".join(words)


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}"
