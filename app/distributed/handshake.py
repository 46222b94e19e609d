"""The checks before the first step: the run that starts is the run that was asked for.

`check_devices` sees that each process has a device of its own, before the processes form a group: NCCL joins no two processes
on one GPU, and reports it with a traceback, perhaps while the group is made, as torch 2.15 binds a device there
(distributed_c10d.py, `_nccl2_device`), and DeepSpeed 0.19 too (comm/torch.py). `check_group` compares what the launcher
promised with what Accelerate and torch.distributed made of it, and proves with a real collective that the ranks belong
together. `check_agreement` compares recipe, data, weights and versions of all ranks. `check_prepared` looks at what `prepare`
returned. Each raises one sentence that says what was expected, what was found and what to change; none of them repairs
anything.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from app.distributed import model_preparation
from app.distributed.agreement import connecting
from app.environment.launched import Launched
from app.environment.topology import listed
from app.errors import PresetError, TopologyError
from app.recipe.schema import BatchPlan

_EXPECTED_TYPE = {
    "ddp": (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
    "deepspeed": (DistributedType.DEEPSPEED,),
    "fsdp2": (DistributedType.FSDP,),
}


class RankDevice(NamedTuple):
    """The device of one process."""

    rank: int
    host: str
    name: str
    """torch's name of it, such as cuda:0."""
    identity: str = ""
    """An identifier that no other device has, however processes number them; empty for a CPU, which several can share."""
    visible: int = 0
    """Devices that the process can see."""


def own_device(launched: Launched, *, on_cpu: bool) -> RankDevice:
    """Return the device that Accelerate will take (accelerate 1.15, state.py, `set_device`)."""
    host, accelerator = socket.gethostname(), torch.accelerator.current_accelerator()
    if on_cpu or accelerator is None:
        return RankDevice(launched.rank, host, "cpu")
    count = torch.accelerator.device_count()
    name = f"{accelerator.type}:{launched.local_rank % count}"
    is_nvidia = accelerator.type == "cuda"
    identity = str(torch.cuda.get_device_properties(name).uuid) if is_nvidia else f"{host} {name}"
    return RankDevice(launched.rank, host, name, identity, count)


def check_devices(store: dist.Store, own: RankDevice, world_size: int) -> None:
    """Check, through the store of all processes, each of which calls this once, that no two would share a device.

    Raises TopologyError naming those that would, or that do not come in time.
    """

    def named(ranks: Sequence[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"

    keys = [f"samerun/device/{rank}" for rank in range(world_size)]
    store.set(keys[own.rank], json.dumps(own))
    try:
        devices = [RankDevice(*json.loads(value)) for value in store.multi_get(keys)]
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TopologyError(
            f"rank {own.rank} on {own.host} waited for {named(missing)} of {world_size}, which are "
            "missing: check why they did not start, or ended."
        ) from error
    by_identity = defaultdict(list)
    for device in devices:
        by_identity[device.identity].append(device)
    shared = [
        f"{named([each.rank for each in takers])} on {takers[0].host} would share {takers[0].name} "
        f"(of {takers[0].visible} visible there)"
        for identity, takers in by_identity.items()
        if identity and len(takers) > 1
    ]
    if shared:
        raise TopologyError(
            f"{'; '.join(shared[:8])}: start at most one process per visible device of a node (--processes, "
            "--num_processes, or the scheduler's tasks per node)."
        )


def check_group(accelerator: Accelerator, launched: Launched, plan: BatchPlan) -> None:
    """Check that the process group is the promised one and really exchanges data.

    Raises TopologyError or PresetError.
    """
    kind = accelerator.distributed_type
    if kind not in _EXPECTED_TYPE[launched.strategy]:
        raise PresetError(
            f"the preset asks for {launched.strategy}, but Accelerate set up {kind.value}: the model would "
            "not be sharded as asked. Try an unchanged preset of accelerate_configs/."
        )
    group = dist.get_world_size() if dist.is_initialized() else 1
    found = {"Accelerate": accelerator.num_processes, "torch.distributed": group}
    wrong = [f"{library} sees {size}" for library, size in found.items() if size != launched.world_size]
    if wrong:
        raise TopologyError(
            f"the launcher started {launched.world_size} processes, but {' and '.join(wrong)}: they would train "
            "unsynchronized copies. A plain Accelerator() does this with distributed_type MULTI_GPU and no "
            "GPU; start app.train with a preset of accelerate_configs/."
        )
    if accelerator.process_index != launched.rank:
        raise TopologyError(
            f"the launcher made this process rank {launched.rank}, Accelerate made it {accelerator.process_index}: check RANK."
        )
    if accelerator.gradient_accumulation_steps != plan.accumulation:
        raise PresetError(
            f"the batch plan needs {plan.accumulation} forward passes a step, and Accelerate is set to "
            f"{accelerator.gradient_accumulation_steps}: remove gradient_accumulation_steps from the preset and "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS from the environment."
        )
    # Each rank contributes its own bit, so the sum shows who took part, not only how many.
    bit = torch.zeros(launched.world_size, dtype=torch.int64, device=accelerator.device)
    bit[launched.rank] = 1
    with connecting(launched.rank):
        seen = accelerator.reduce(bit, "sum").tolist()
    if seen != [1] * launched.world_size:
        raise TopologyError(
            f"{launched.world_size} processes should take part once each, but a sum over the group counted "
            f"per rank {seen}. Either two processes have the same RANK, or two jobs use the same port: check "
            "the machine ranks and the port."
        )


def check_agreement(gather: Callable[[Any], list[Any]], device: torch.device, facts: Mapping[str, str]) -> None:
    """Check that `facts` (what -> value) are the same on every rank; `gather` returns every rank's value, in their order.

    Raises TopologyError, on every rank alike, naming what differs, where (host and device), and the values.
    """
    reports: list[tuple[str, dict[str, str]]] = gather((f"{socket.gethostname()} {device}", dict(facts)))
    differences = []
    for what in facts:
        values = [report[1].get(what, "nothing") for report in reports]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(
                f"{what}: rank 0 ({reports[0][0]}) has {values[0]}, rank {other} ({reports[other][0]}) has {values[other]}"
            )
    if differences:
        raise TopologyError(
            f"the ranks would not train the same run. They differ in {'; '.join(differences)}. Use the same files, environment "
            "and command line on every node."
        )


def check_prepared(accelerator: Accelerator, launched: Launched, model: torch.nn.Module, clip_norm: float | None) -> None:
    """Check that `model`, as `prepare` returned it, is distributed and computes as the preset says. Raises PresetError."""
    config: Any = model
    if launched.strategy == "deepspeed":  # whose config file can set its own
        half = config.bfloat16_enabled() or config.torch_autocast_enabled()
        precision = "fp16" if config.fp16_enabled() else "bf16" if half else "no"
    else:
        precision = accelerator.mixed_precision if accelerator.native_amp else "no"
    if precision != launched.mixed_precision:
        raise PresetError(
            f"the preset's mixed_precision is {launched.mixed_precision}, but the prepared model computes in "
            f"{precision}: set the precision only by mixed_precision, in the preset or on the command line."
        )
    if launched.strategy == "deepspeed":
        found = (config.gradient_clipping(), config.gradient_accumulation_steps())
        wanted = (clip_norm or 0.0, accelerator.gradient_accumulation_steps)
        if found != wanted:
            raise PresetError(
                f"DeepSpeed's (gradient clipping, accumulation) is {found} where the recipe says {wanted}: remove both from "
                "the preset or the DeepSpeed config file it names."
            )
    elif launched.strategy == "fsdp2":
        if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise PresetError("the preset asks for fsdp2, but no parameter is sharded: use accelerate_configs/fsdp2.yaml.")
    elif launched.world_size > 1 and not isinstance(model_preparation.uncompiled(model), DistributedDataParallel):
        raise PresetError(
            f"{launched.world_size} processes train, but the model is a {type(model).__name__}, not DistributedDataParallel: "
            "the copies would drift apart. Use accelerate_configs/multi_gpu.yaml."
        )


def versions() -> dict[str, str]:
    """Return the versions that can change what a run computes, by package; `none` for one that is not installed."""
    found = {}
    for package in ("samerun", "torchvision", "timm", "accelerate", "deepspeed", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is run without being installed, or no DeepSpeed
            found[package] = "none"
    return found | {"torch": torch.__version__}  # with the build, such as +cu130
