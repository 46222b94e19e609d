"""`samerun plan`: whether a recipe fits, under which preset, and what that costs. No GPU, no weights, no data, seconds.

samerun plan --recipe gpt3_13b --devices 8,64 --device h100
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app import tasks
from app.environment.launched import Sharding
from app.environment.topology import Degrees, Topology
from app.errors import LackOfMemoryError, PresetError, RecipeError, TopologyError, UsageError, did_you_mean
from app.files.text_files import duration
from app.options import Parser, add_recipe, names, numbers, positive, precision, share
from app.recipe import optimizers, recipe_file
from app.recipe.recipe_file import replaced
from app.recipe.schema import BatchPlan, Recipe
from app.reports.past_run import print_text
from app.reports.runs import Row, print_wrapped, write
from launch import preset as presets
from launch.preset import Preset

GIB = 2**30
_UNITS = {"mib": 2**20, "gib": GIB, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}

# torch's name, and the GiB that torch calls the total capacity: less than a data sheet's 80 GB, because error correction takes
# a share on some, and the driver on all. Each is the least that was observed.
DEVICES = {
    "b200": ("NVIDIA B200", 178.3),  # data sheet: 180 GB
    "h200": ("NVIDIA H200", 139.7),  # 141 GB
    "h100": ("NVIDIA H100 80GB HBM3", 79.1),  # 80 GB
    "h100-pcie": ("NVIDIA H100 PCIe", 79.1),  # 80 GB
    "a100-80": ("NVIDIA A100-SXM4-80GB", 79.1),  # 80 GB
    "a100-40": ("NVIDIA A100-SXM4-40GB", 39.3),  # 40 GB
    "a40": ("NVIDIA A40", 44.3),  # 48 GB, some of it for error correction
    "a10": ("NVIDIA A10", 21.9),  # 24 GB, some of it for error correction
    "l40s": ("NVIDIA L40S", 44.3),  # 48 GB, some of it for error correction
    "l4": ("NVIDIA L4", 21.9),  # 24 GB, some of it for error correction
    "rtx4090": ("NVIDIA GeForce RTX 4090", 23.5),  # 24 GB
    "v100-32": ("Tesla V100-SXM2-32GB", 31.7),  # 32 GB
    "v100-16": ("Tesla V100-SXM2-16GB", 15.7),  # 16 GB
    "t4": ("Tesla T4", 14.5),  # 16 GB, some of it for error correction
    "mi300x": ("AMD Instinct MI300X", 191.9),  # 192 GB
    "mi250x": ("AMD Instinct MI250X", 63.9),  # half of 128 GB: it is two devices
}

_UTILIZATION = 0.9
"""Share of a device's memory to plan with; the rest is for the CUDA context, NCCL and fragmentation."""
_RECOMPUTED = 4 / 3
"""Arithmetic of a step that recomputes its blocks, relative to one that does not: the backward pass is two forward passes."""
_DETAILS = ["buffers", "loss", "gradients", "optimizer", "host per node", "weights", "activations"]
"""Columns that a narrow table leaves out, in this order."""
_BLOCKS = "blocks"
"""The value of train.checkpoint_activations that recomputes blocks."""
_REMEDY = "take more devices, or devices with more memory, or a smaller model"


def main(argv: Sequence[str]) -> int:
    """Run `samerun plan` with these arguments; 0 if something fits.

    Raises RecipeError if nothing can be planned, LackOfMemoryError, after the plan is printed, if nothing fits, and others.
    """
    options = _parser().parse_all(argv)
    plan = planned(options)
    rows = [row for each in plan["devices"] for row in each["rows"]]
    if not any(row["memory"] for row in rows):
        problems = dict.fromkeys(row["problem"] for row in rows)
        raise RecipeError("; ".join(problems) or "these presets are for more devices: raise --devices or leave --presets out")
    if options.json:
        print_text(json.dumps(plan, indent=1))
    else:
        _print(plan, options)
    if not any(row["fits"] for row in rows):
        raise LackOfMemoryError(f"nothing fits, by the plan: {_REMEDY}")
    return 0


def find_device(text: str) -> tuple[str, int]:
    """Return torch's name and the bytes of a device, given by its name or by a memory such as 24GiB. Raises UsageError."""
    name = text.strip().lower()
    if name in DEVICES:
        torch_name, gib = DEVICES[name]
        return torch_name, int(gib * GIB)
    if match := re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})", name):
        return "", int(float(match[1]) * _UNITS[match[2]])
    hint = did_you_mean(name, DEVICES, then=f"Known are {', '.join(DEVICES)}, or give its memory, such as 24GiB")
    raise UsageError(f"--device is {text!r}: {hint}")


@dataclass(frozen=True, kw_only=True)
class _Assumptions:
    """Values that all rows of a plan share."""

    recipe: Recipe
    precision: str
    has_blocks: bool
    """True if the model has blocks, which can be recomputed."""
    usable: int
    """Bytes of each device to plan with."""
    step_s: float | None
    """Seconds of a step on one device at the assumed utilization; None: unknown."""


def planned(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan as JSON holds it: bytes, seconds, numbers. Raises PresetError, RecipeError, UsageError and others."""
    from app.metrics import clock  # only now torch
    from app.planning import tracing
    from app.task import Form

    loaded, (torch_name, bytes_of_device) = recipe_file.load(options.recipe, options.overrides), find_device(options.device)
    loaded = recipe_file.completed(loaded)
    per_s = {name: clock.peak_of(torch_name, mixed_precision=name, tf32=False) for name in presets.PRECISIONS}
    precision = options.mixed_precision or ("bf16" if per_s["bf16"] else "no")
    tasks.of(loaded.recipe).check_training()
    model, flops_per_s, step_flops = tracing.build_blueprint(loaded.recipe), per_s[precision], None
    if flops_per_s:
        example = model.task.example(model.facts, Form())
        of_batch = clock.training_flops(model.model, lambda called: model.task.loss(called, example))
        step_flops = of_batch / len(example["samples"]) * loaded.recipe.train.global_batch_size
    assumed = _Assumptions(
        recipe=loaded.recipe,
        precision=precision,
        has_blocks=any(type(module).__name__ in model.classes for module in model.model.modules()),
        usable=round(_UTILIZATION * bytes_of_device),
        step_s=step_flops / (flops_per_s * options.mfu) if step_flops and flops_per_s else None,
    )
    advice = []
    for number in options.devices:
        rows = _rows(assumed, number, options.presets, per_node=options.nodes_of)
        best = min((row for row in rows if row["fits"]), key=_cost, default=None)  # what shards less is earlier in rows
        cheapest = None if best is None else {**best, "command": _command(options, assumed, best)}
        advice.append({"devices": number, "cheapest": cheapest, "rows": rows})
    return {
        "recipe": loaded.name,
        "parameters": model.parameters,
        "device": {"name": options.device, "memory": bytes_of_device, "usable": assumed.usable},
        "precision": precision,
        "assumed": {"flops_of_a_step": step_flops, "flops_per_s_of_a_device": flops_per_s, "utilization": options.mfu},
        "states_of_a_parameter": 2 if optimizers.is_foreign(loaded.recipe.optim.name) else None,
        "devices": advice,
    }


def _rows(assumed: _Assumptions, number: int, chosen: Sequence[str], *, per_node: int) -> list[Row]:
    """Return the rows of the chosen presets, or of all, without recomputation and with it; what shards least is first.

    Raises UsageError for devices that make no whole nodes, and PresetError.
    """
    nodes, rest = divmod(number, per_node)
    if rest and nodes:
        raise UsageError(f"--devices is {number}: only whole nodes are planned, so give a multiple of {per_node} (--nodes-of)")
    nodes = max(nodes, 1)
    left_out = {"cpu", *(["multi_gpu"] if nodes > 1 else ["multi_node", "hsdp"])}  # others do the same
    found = [presets.load(name) for name in chosen or presets.names() if chosen or name not in left_out]
    rows = [
        _row(assumed, preset, number, nodes, activations)
        for preset in found
        if preset.is_single_process == (number == 1) or preset.sharding(Degrees()).offload
        for activations in (("none", _BLOCKS) if assumed.has_blocks else ("none",))
    ]
    return sorted(rows, key=lambda row: _order(Sharding(**row["sharding"])))


def _cost(row: Row) -> tuple[object, ...]:
    """Return what to avoid, most of all first: offloading, context parallelism, activation checkpointing."""
    return row["sharding"]["offload"], row["sharding"]["context_parallel"] > 1, row["checkpoint_activations"] == _BLOCKS


def _order(sharding: Sharding) -> tuple[object, ...]:
    """Return the place in the order of what is sharded and sent: DDP, ZeRO-1, ZeRO-2, HSDP, FSDP2, ZeRO-3, tensor parallelism,
    context parallelism; offloading is last."""
    is_fsdp2 = sharding.kind == "fsdp2"
    most = (sharding.context_parallel > 1, sharding.tensor_parallel > 1, sharding.stage == 3, is_fsdp2)
    return sharding.offload, *most, -sharding.replicas if is_fsdp2 else sharding.stage


def _row(assumed: _Assumptions, preset: Preset, number: int, nodes: int, activations: str) -> Row:
    """Return a row with the largest micro-batch that fits, or else the smallest that is possible."""
    from app.planning.memory import Case, Memory, peak

    row: Row = {
        "preset": preset.name, "devices": number, "nodes": nodes, "sharding": asdict(preset.sharding(Degrees())),
        "checkpoint_activations": activations, "fits": False, "micro_batch": 0, "accumulation": 0, "memory": None,
        "host_of_a_node": 0, "step_s": None, "training_s": None, "problem": "",
    }  # fmt: skip
    train, group_size = assumed.recipe.train, assumed.recipe.sections.group_size
    found: list[tuple[int, Memory]] = []
    topology = Topology(num_nodes=nodes, processes_per_node=number // nodes, head_address="head", port=1)
    try:
        sharding = preset.sharding(preset.degrees(topology))
        row["sharding"] = asdict(sharding)
        if refusal := optimizers.refusal(assumed.recipe.optim.name, sharding.kind, sharding.tensor_parallel):
            raise PresetError(refusal)
        data_ranks = number // sharding.processes_per_rank
        case = Case(assumed.recipe, sharding, 1, data_ranks, assumed.precision, recomputes=activations == _BLOCKS)
        samples = train.global_batch_size // data_ranks
        for size in range(group_size, BatchPlan.of(assumed.recipe, data_ranks).micro_batch + 1, group_size):
            if samples % size == 0:
                memory = peak(replace(case, micro_batch=size))
                if found and memory.total > assumed.usable:
                    break
                found.append((size, memory))
    except (PresetError, RecipeError, TopologyError) as error:  # such a sharding of the batch or the model is impossible
        return {**row, "problem": str(error)}
    size, memory = found[-1]
    row |= {"fits": memory.total <= assumed.usable, "micro_batch": size, "accumulation": samples // size}
    row |= {"memory": {**memory._asdict(), "total": memory.total}, "host_of_a_node": memory.host * (number // nodes)}
    if row["fits"] and assumed.step_s is not None:
        row["step_s"] = assumed.step_s / number * (_RECOMPUTED if case.recomputes else 1.0)
        row["training_s"] = train.steps and train.steps * row["step_s"]
    return row


def _command(options: argparse.Namespace, assumed: _Assumptions, row: Row) -> str:
    """Return what starts a row: on one node immediately, on several as a job."""
    train, changes = assumed.recipe.train, []
    if row["accumulation"] > 1 or train.max_micro_batch is not None:
        changes.append(f"train.max_micro_batch={row['micro_batch']}")
    if train.checkpoint_activations != row["checkpoint_activations"]:
        changes.append(f"train.checkpoint_activations={row['checkpoint_activations']}")
    recipe = ["--preset", row["preset"], "--recipe", options.recipe]
    values, number, nodes = replaced(options.overrides, changes), row["devices"], row["nodes"]
    precision = [] if assumed.precision == "no" else ["--mixed-precision", assumed.precision]
    if nodes == 1:
        return " ".join(["samerun launch --processes", str(number), *recipe, *precision, *values])
    job = f"samerun submit --nodes {nodes} --gpus-per-node {number // nodes} --time 24:00:00"
    return " ".join([job, *recipe, *values, *(["--", *precision] if precision else [])])


def _print(plan: dict[str, Any], options: argparse.Namespace) -> None:
    """Print a table for each number of devices, the cheapest there, and the assumptions."""
    device, parameters, per_s = plan["device"], plan["parameters"], plan["assumed"]["flops_per_s_of_a_device"]
    amount = f"{parameters / 1e9:,.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"
    print_wrapped(
        f"{plan['recipe']}: {amount} parameters, mixed_precision {plan['precision']}, on {device['name']} "
        f"({device['memory'] / GIB:,.1f} GiB each, {device['usable'] / GIB:,.1f} planned); not calibrated on a GPU"
    )
    for each in plan["devices"]:
        rows, best = [row for row in each["rows"] if row["memory"]], each["cheapest"]
        unit, size = ("GiB", GIB) if any(row["memory"]["total"] >= GIB for row in rows) else ("MiB", 2**20)
        print_text(f"\n{each['devices']} device{'s' * (each['devices'] > 1)}, {unit} on each:")
        if rows:
            write([_cells(row, size) for row in rows], optional=_DETAILS)
        problems = list(dict.fromkeys(row["problem"] for row in each["rows"] if row["problem"]))
        for problem in problems or ([] if rows else ["no preset runs on this number of devices"]):
            print_wrapped(f"  not possible: {problem}")
        if best is None:
            if rows:
                print_text(f"  nothing fits: {_REMEDY}")
            continue
        again = " with activation checkpointing" * (best["checkpoint_activations"] == _BLOCKS)
        print_text(f"  cheapest: {best['preset']}{again}, micro-batch {best['micro_batch']}")
        if best["step_s"] is not None and best["step_s"] < 1e-3:
            print_wrapped("  time unknown: its arithmetic takes less than 1 ms per step, and starting its kernels takes longer")
        elif best["step_s"] is not None:
            whole = "" if best["training_s"] is None else f", {duration(best['training_s'])} for all steps"
            print_text(f"  about {duration(best['step_s'])} per step{whole}")
        print_text(f"  {best['command']}")
    print_wrapped(
        f"\nassumed: {_UTILIZATION:.0%} of a device's memory; the rest is for the CUDA context, NCCL and fragmentation\n"
        "host per node: offloaded state only, without Python, the libraries and the data; whether it fits is not checked"
    )
    if plan["states_of_a_parameter"]:
        print_wrapped("assumed: two states per parameter, because planning does not import the class in optim.name")
    if per_s:
        print_wrapped(
            f"assumed: {options.mfu:.0%} of {per_s / 1e12:,.0f} TFLOP/s per device (--mfu); activation checkpointing adds a "
            "third; communication is assumed to overlap with computing"
        )
    else:
        why = f"no FLOP/s of {device['name']} with mixed_precision {plan['precision']} known"
        if device["name"] in DEVICES:  # whose FLOP/s are known in every precision that they compute in
            why = f"{device['name']} has no {plan['precision']} arithmetic, and emulates it slowly; give --mixed-precision fp16"
        print_wrapped(f"training time unknown: {why}")


def _cells(row: Row, unit: int) -> Row:
    """Return a row as the printed table shows it, with memory in units of `unit` bytes."""
    return {
        "preset": row["preset"],
        "checkpointing": "yes" if row["checkpoint_activations"] == _BLOCKS else "no",
        **{kind: round(size / unit, 1) for kind, size in row["memory"].items() if kind != "host"},
        "host per node": round(row["host_of_a_node"] / unit, 1),
        "fits": "yes" if row["fits"] else "no",
        "micro-batch": f"{row['micro_batch']} x {row['accumulation']}",
    }


def _parser() -> Parser:
    parser = Parser("plan", "Estimate, for each preset, the memory per device of a training step; name the cheapest preset "
        "that fits; and estimate the training time from an assumed utilization. Needs no GPU and no weights, and data only "
        "where the recipe does not describe the model, as for class folders.",
        usage="%(prog)s [options] [key=value ...]")  # fmt: skip
    add = parser.add_argument
    add_recipe(parser)
    add("--presets", type=names, default=[], metavar="NAME,...", help="presets (default: all shipped presets)")
    add("--devices", type=numbers, default=[1, 8], metavar="N,...", help="numbers of devices (default: 1,8)")
    add("--nodes-of", type=positive, default=8, metavar="N", help="devices per node (default: 8)")
    add("--device", default="h100", metavar="NAME|SIZE",
        help=f"kind of device: {', '.join(DEVICES)}; or its memory, such as 24GiB (default: h100)")  # fmt: skip
    add("--mixed-precision", type=precision, choices=presets.PRECISIONS,
        help="precision (default: bf16 if the device is known to support it, else no)")  # fmt: skip
    add("--mfu", type=share, default=0.4, metavar="SHARE",
        help="assumed utilization: model FLOP/s as a share of the device's peak (default: 0.4)")  # fmt: skip
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser
