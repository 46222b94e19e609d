"""Trains under a preset, shows every rank's pieces, and goes on from pieces that another topology has left.

`reference` is the same training written out in plain torch, for the test that starts this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from app.optim import parameter_groups
from app.recipe.schema import OptimRecipe

BEFORE, AFTER = 3, 2  # steps of the first model, and of the second, which goes on from there
BATCH = 8
DECAY = 0.75
SCALARS = ("step", "mu_product")
# Group -> {tensor of the parameter's shape}: {"weight": {"conv.weight": ...}, "exp_avg": {...}, ...}
Tensors = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One training."""

    optim: OptimRecipe
    dtype: torch.dtype = torch.float32
    keep_gathered: bool = False
    """FSDP2 keeps weights gathered after a forward pass."""
    persistence_threshold: int | None = None
    """ZeRO-3 keeps parameters of fewer elements whole on every rank."""


ADAMW = OptimRecipe(name="adamw", lr=0.01, weight_decay=0.1)
SGD = OptimRecipe(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.1)
# All that the learning rates, the weight decay and the states of parameters may differ in.
GROUPED = OptimRecipe(
    name="nadam",
    lr=0.01,
    weight_decay=0.1,
    groups={"head.*": {"lr_factor": 3, "weight_decay": 0.2}, "conv.*": {"lr_factor": 0.5}},
)
RMSPROP = OptimRecipe(name="rmsprop", lr=0.01, settings={"alpha": 0.9}, groups={"norm.*": {"lr_factor": 0.1}})
CASES = {
    "nadam": Case(GROUPED),
    "rmsprop": Case(RMSPROP),
    **{name: Case(OptimRecipe(name=name, lr=0.02, weight_decay=0.1)) for name in ("adam", "radam", "adamax")},
    "adadelta": Case(OptimRecipe(name="adadelta", lr=1.0, weight_decay=0.1)),
    **{name: Case(OptimRecipe(name=name, lr=0.02, weight_decay=0.1)) for name in ("adagrad", "adafactor")},
    "amsgrad": Case(OptimRecipe(name="adamw", lr=0.01, settings={"amsgrad": True})),
    "centered": Case(OptimRecipe(name="rmsprop", lr=0.01, settings={"centered": True, "momentum": 0.9, "alpha": 0.9})),
    "decaying": Case(OptimRecipe(name="adagrad", lr=0.02, settings={"lr_decay": 0.1, "initial_accumulator_value": 0.5})),
    "adamw": Case(ADAMW),
    "sgd": Case(SGD, persistence_threshold=20),
    "float64": Case(ADAMW, dtype=torch.float64),
    "gathered": Case(ADAMW, keep_gathered=True),
}


@dataclass
class Record:
    """What a training left, first at the change of models, then at the end."""

    losses: list[float] = field(default_factory=list)
    averaged_losses: list[float] = field(default_factory=list)
    scalars: list[dict[str, float]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)


class Net(nn.Module):
    """No dimension can be halved, and one cannot be shared at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, kernel_size=3)
        self.norm = nn.GroupNorm(1, 5)
        self.hidden = nn.Linear(5 * 3 * 3, 7)
        self.head = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        hidden = F.gelu(self.hidden(F.gelu(self.norm(self.conv(images))).flatten(1)))
        output: torch.Tensor = self.head(hidden)
        return output


def build(case: Case, *, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().to(case.dtype)


def batch(step: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    images, targets = torch.randn(BATCH, 1, 5, 5, generator=generator), torch.randn(BATCH, 1, generator=generator)
    return images.to(case.dtype), targets.to(case.dtype)


def reference(case: Case) -> Record:
    """The undisturbed training in plain torch."""
    model = build(case, seed=0)
    optimizer = parameter_groups.build_optimizer(case.optim, model, fused=False if case.optim.name == "adamw" else None)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    record = Record()
    for step in range(BEFORE + AFTER):
        images, targets = batch(step, case)
        loss = F.mse_loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            average[name] = DECAY * average[name] + (1 - DECAY) * parameter.detach()
        model.eval()
        averaged = torch.func.functional_call(model, average, (images,))
        model.train()
        record.losses.append(loss.item())
        record.averaged_losses.append(F.mse_loss(averaged, targets).item())
        if step + 1 in (BEFORE, BEFORE + AFTER):
            tensors: Tensors = {"weight": {}, "average": {name: values.clone() for name, values in average.items()}}
            for name, parameter in model.named_parameters():
                tensors["weight"][name] = parameter.detach().clone()
                for key, values in optimizer.state[parameter].items():
                    if key not in SCALARS:
                        tensors.setdefault(key, {})[name] = values.clone()
            record.tensors.append(tensors)
            state = optimizer.state[model.head.bias]
            record.scalars.append({key: float(state[key]) for key in SCALARS if key in state})
            record.seen.append(step + 1)
    return record


def run(runtime: Any, case: Case, left: Record) -> Record:
    """Train a model, then load what the reference left at that time into another one, and train that."""
    record = Record()
    for seed, steps in ((0, range(BEFORE)), (1, range(BEFORE, BEFORE + AFTER))):
        for prepared in prepared_pair(runtime, case, seed):
            shards, average = parts(runtime, prepared)
            if seed == 1:
                load(shards, left)
            for step in steps:
                take_step(runtime, case, prepared, average, step, record)
            owned = [(p.key, p.name, p.shape, p.region.start, p.values.clone()) for p in shards.owned_pieces()]
            record.tensors.append(runtime.gather(owned))
            record.scalars.append(shards.scalars())
            record.seen.append(int(shards.buffers()["seen"]))
            assert list(shards.buffers()) == ["seen"]
    return record


def prepared_pair(runtime: Any, case: Case, seed: int) -> Iterator[tuple[Any, Any]]:
    """Yield the prepared model and optimizer, and release them: with DeepSpeed there can be one model at a time."""
    accelerator = runtime.accelerator
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and case.persistence_threshold is not None:
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = case.persistence_threshold
    model = build(case, seed=seed)
    prepared = runtime.prepare(model, parameter_groups.build_optimizer(case.optim, model))
    if case.keep_gathered:
        prepared[0].set_reshard_after_forward(False)
    yield prepared
    accelerator.free_memory(*prepared)


def parts(runtime: Any, prepared: tuple[Any, Any]) -> tuple[Any, Any]:
    from app.checkpoints.sharded_state import Shards, WeightAverage

    shards = Shards(runtime.accelerator, *prepared)
    return shards, WeightAverage(shards, decay=DECAY)


def load(shards: Any, left: Record) -> None:
    shards.allocate_state(left.tensors[0], left.scalars[0])
    expected = {(key, name) for key, tensors in left.tensors[0].items() for name in tensors}
    pieces = shards.pieces()
    assert {(piece.key, piece.name) for piece in pieces} <= expected
    for piece in pieces:
        whole = left.tensors[0][piece.key][piece.name]
        assert piece.shape == whole.shape
        piece.values.copy_(piece.region.take(whole.contiguous()))
    shards.publish()
    shards.buffers()["seen"].fill_(left.seen[0])


def take_step(runtime: Any, case: Case, prepared: tuple[Any, Any], average: Any, step: int, record: Record) -> None:
    (model, optimizer), accelerator = prepared, runtime.accelerator
    size = BATCH // accelerator.num_processes
    images, targets = (part.split(size)[accelerator.process_index] for part in batch(step, case))
    images = images.to(runtime.input_dtype(case.dtype))
    with accelerator.accumulate(model):
        loss = F.mse_loss(model(images).to(case.dtype), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    average.update()
    model.eval()
    with average.applied(), torch.no_grad():
        averaged = F.mse_loss(model(images).to(case.dtype), targets)
    model.train()
    for losses, value in ((record.losses, loss), (record.averaged_losses, averaged)):
        losses.append(accelerator.reduce(value.detach(), "mean").item())


def write_records(records: dict[str, Record], file: str | Path) -> None:
    torch.save({name: vars(record) for name, record in records.items()}, file)


def read_records(file: str | Path) -> dict[str, Record]:
    return {name: Record(**values) for name, values in torch.load(file).items()}


def main(names: list[str], left_file: str, found_file: str) -> None:
    from app.distributed.runtime import Runtime
    from app.environment.launched import read
    from app.recipe.schema import BatchPlan

    launched = read(os.environ)
    runtime = Runtime(launched, BatchPlan(global_batch_size=BATCH, data_ranks=launched.world_size, accumulation=1))
    left = read_records(left_file)
    found = {name: run(runtime, CASES[name], left[name]) for name in names}
    if runtime.is_main:
        write_records(found, found_file)
    runtime.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1].split(","), *sys.argv[2:])
