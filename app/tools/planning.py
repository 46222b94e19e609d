"""The work of `samerun plan`, whose command line is `plan_command.py`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.errors import LackOfMemoryError, RecipeError, UsageError
from app.metrics import flops
from app.place.inherited import own_environment
from app.planning import devices, kept, memory, picture, plan, table
from app.planning.model import Blueprint, blueprint
from app.planning.plan import Duration, Given, Row, Way
from app.planning.table import Advice, Told
from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe, replaced
from app.recipe.schema import Recipe
from app.task import Form
from launch import cooperation
from launch import preset as presets

_UNKNOWN = ""


def main(options: argparse.Namespace) -> int:
    """Plan, print and keep it; return 0 if something fits.

    Raises RecipeError if nothing can be planned, LackOfMemoryError, after it is printed, if nothing fits, and others.
    """
    loaded = recipe_file.load(options.recipe, options.overrides)
    device = devices.named(options.device)
    precision = options.mixed_precision or ("bf16" if _peak(device, "bf16") else "no")
    made = blueprint(loaded.recipe)
    given = Given(
        recipe=loaded.recipe,
        usable=round(options.memory_utilization * device.memory),
        precision=precision,
        parameters=made.sizes.trainable,
        block_outputs=_block_outputs(made),
        has_blocks=made.sizes.blocks > 0,
        peak=memory.peak,
        host=None if options.host_memory is None else round(options.memory_utilization * options.host_memory),
    )
    advice = [_advice(options, loaded, given, number) for number in options.devices]
    if not any(each.is_planned for each in advice):
        raise RecipeError(*dict.fromkeys(row.problem for each in advice for row in each.rows))
    told = Told(
        recipe=loaded.name,
        parameters=made.sizes.parameters,
        trained=made.sizes.trainable,
        device=device,
        usable=given.usable,
        host_memory=options.host_memory,
        usable_host=given.host,
        precision=precision,
        duration=_duration(loaded.recipe, made, device, precision, options.mfu),
        checkpoint_bytes=_checkpoint_bytes(given, made),
        disk_bytes_per_s=1e9 * options.disk_gb_s,
        advice=advice,
    )
    found = [row.kept(precision) for each in advice for row in each.rows]
    kept.write(loaded.recipe, own_environment(), made.sizes.parameters, filter(None, found))
    if options.plot:
        picture.draw(Path(options.plot), told)
    if options.json:
        sys.stdout.write(json.dumps(as_json(told), indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in table.lines(told))
    if not any(each.best for each in advice):
        planned = [each for each in advice if each.is_planned]
        told_of = "; ".join(f"{each.devices} device{'s' * (each.devices > 1)}: {table.remedy(each)}" for each in planned)
        raise LackOfMemoryError(f"nothing fits, by the plan. {told_of}")
    return 0


def _advice(options: argparse.Namespace, loaded: LoadedRecipe, given: Given, number: int) -> Advice:
    ways = list(ways_on(number, options.presets, per_node=options.nodes_of))
    found = list(plan.rows(given, ways))
    best = plan.cheapest(found, kept.ORDER)
    command = "" if best is None else _command(options, loaded, given, best)
    return Advice(devices=number, rows=found, best=best, command=command)


def ways_on(number: int, chosen: Sequence[str], *, per_node: int) -> list[Way]:
    """Return the ways of running on so many devices, in the order of what they divide: of these presets, or of all shipped.

    Raises UsageError for devices that make no whole nodes, and PresetError.
    """
    nodes, rest = divmod(number, per_node)
    if rest and nodes:
        raise UsageError(
            f"--devices is {number}, and --nodes-of is {per_node}: only whole nodes are planned, so give a "
            f"multiple of {per_node}"
        )
    nodes = max(nodes, 1)
    found = []
    for name in chosen or _suited(nodes):
        strategy = cooperation.strategy(presets.load(name))
        if (strategy == "single") != (number == 1) and strategy != "zero3_offload":
            continue  # one process divides nothing
        replicas, tensor_parallel = cooperation.copies(strategy, nodes=nodes, devices=number)
        if strategy != "hsdp" or (nodes > 1 and number > nodes):
            way = Way(preset=name, strategy=strategy, devices=number, nodes=nodes, replicas=replicas,
                      tensor_parallel=tensor_parallel)  # fmt: skip
            found.append(way)
    return sorted(found, key=lambda way: kept.ORDER.index(way.strategy))


def _suited(nodes: int) -> list[str]:
    """Of presets that do the same, the one for so many nodes."""
    left_out = {"cpu", "multi_gpu" if nodes > 1 else "multi_node"}
    return [name for name in presets.names() if name not in left_out]


def _command(options: argparse.Namespace, loaded: LoadedRecipe, given: Given, row: Row) -> str:
    """What starts a row: on one node at once, on several as a job."""
    train = loaded.recipe.train
    changes = []
    if row.accumulation > 1 or train.max_micro_batch is not None:
        changes.append(f"train.max_micro_batch={row.micro_batch}")
    if getattr(train, "checkpoint_activations", plan.NONE) != row.checkpoint_activations:
        changes.append(f"train.checkpoint_activations={row.checkpoint_activations}")
    recipe = ["--preset", row.way.preset, "--recipe", options.recipe]
    values = replaced(options.overrides, changes)
    precision = [] if given.precision == "no" else ["--mixed-precision", given.precision]
    if row.way.nodes == 1:
        return " ".join(["samerun launch --processes", str(row.way.devices), *recipe, *precision, *values])
    nodes = f"--nodes {row.way.nodes} --gpus-per-node {row.way.devices // row.way.nodes} --time 24:00:00"
    after = ["--", *precision] if precision else []
    return " ".join(["samerun submit", nodes, *recipe, *values, *after])


def _block_outputs(made: Blueprint) -> int:
    """Numbers that all blocks give for one sample: tokens x width x blocks, where the model says its width; 0: unknown."""
    width = getattr(getattr(made.model, "config", None), "hidden_size", 0)
    tokens = made.facts.get("sequence_length", 0)
    return int(width * tokens * made.sizes.blocks)


def _duration(recipe: Recipe, made: Blueprint, device: devices.Device, precision: str, mfu: float) -> Duration | None:
    peak = _peak(device, precision)
    if peak is None:
        return None
    example = made.task.example(made.facts, Form())
    of_batch = flops.of_training(made.model, lambda called: made.task.loss(called, example))
    of_step = of_batch / len(example["samples"]) * recipe.train.global_batch_size
    return Duration(flops=of_step, peak=peak, utilization=mfu, steps=recipe.train.steps)


def _peak(device: devices.Device, precision: str) -> float | None:
    return flops.peak_of(device.torch_name, mixed_precision=precision, tf32=False) if device.torch_name else None


def _checkpoint_bytes(given: Given, made: Blueprint) -> int:
    """Weights, what the optimizer keeps of them, and a moving average: all of them once, in full precision."""
    alone = Way(preset=_UNKNOWN, strategy="single", devices=1, nodes=1)
    smallest = given.recipe.sections.neighbours
    held = memory.peak(plan.case(given, alone, plan.NONE, smallest, precision="no"))
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    return held.optimizer + weights * (1 if given.recipe.train.ema_decay is None else 2)


def as_json(told: Told) -> dict[str, Any]:
    """Return the plan as JSON holds it: bytes, seconds, numbers."""
    return {
        "recipe": told.recipe,
        "parameters": told.parameters,
        "device": {"name": told.device.name, "memory": told.device.memory, "usable": told.usable},
        "host_memory": {"of_a_node": told.host_memory, "usable": told.usable_host},
        "precision": told.precision,
        "calibrated": False,
        "checkpoint": {"bytes": told.checkpoint_bytes, "seconds": told.checkpoint_bytes / told.disk_bytes_per_s},
        "assumed": {
            "disk_bytes_per_s": told.disk_bytes_per_s,
            "flops_of_a_step": told.duration and told.duration.flops,
            "flops_per_s_of_a_device": told.duration and told.duration.peak,
            "utilization": told.duration and told.duration.utilization,
        },
        "devices": [_as_json(told, advice) for advice in told.advice],
    }


def _as_json(told: Told, advice: Advice) -> dict[str, Any]:
    best = advice.best
    return {
        "devices": advice.devices,
        "cheapest": None if best is None else {
            "preset": best.way.preset, "checkpoint_activations": best.checkpoint_activations, "micro_batch": best.micro_batch,
            "why": table.why(told, advice), "command": advice.command,
        },
        "remedy": "" if best else table.remedy(advice),
        "rows": [_row_as_json(told, row) for row in advice.rows],
    }  # fmt: skip


def _row_as_json(told: Told, row: Row) -> dict[str, Any]:
    held: Mapping[str, int] | None = None
    if row.memory is not None:
        held = {**{kind: getattr(row.memory, kind) for kind in table.KINDS}, "total": row.memory.total}
    return {
        **asdict(row.way),
        "checkpoint_activations": row.checkpoint_activations,
        "fits": row.fits,
        "micro_batch": row.micro_batch,
        "accumulation": row.accumulation,
        "memory": held,
        "host_of_a_node": row.host,
        "traffic": asdict(row.traffic),
        "step_s": told.duration.step_s(row) if told.duration and row.fits else None,
        "training_s": told.duration.total_s(row) if told.duration and row.fits else None,
        "problem": row.problem,
    }
