"""GPU memory of the steps of real runs, compared with the prediction of `samerun plan`.

Measured is the most that torch's allocator gave out within two steps after the first, and what it had taken for that from the
driver (`reserved`), which is more because of fragmentation. Neither holds CUDA's own context. Several runs train at the same
time: bytes do not depend on that. In a dry run both are the memory of a process on a CPU, and the models are tiny.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from app.errors import TrainingError
from app.recipe import recipe_file
from benchmarks.contest import ON_CPU, SAMERUN, TEXT, Entry, failed_line, say, start, verdict
from benchmarks.gpu import images, text

_TOGETHER, _STEPS, _LEAST_S = 3, 2, 20.0
"""Runs at the same time, their steps, and the seconds without which no further run is begun."""
_BLOCKS = "train.checkpoint_activations=blocks"


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Train and plan, and print the table; return 0 if all were trained."""
    from app.environment.launched import Sharding
    from app.planning.memory import Case, peak

    runs = _runs(options, folder)
    say("| | predicted MiB | allocated MiB | error | reserved MiB | goal of the error |\n|---|---|---|---|---|---|")

    def take(name: str) -> dict[str, float]:
        if time.monotonic() + _LEAST_S > options.end_s:
            raise TrainingError("left out, no time was left")
        with start(name, runs[name], threads=1, log=folder / f"{name}.log") as running:
            running.answer()
            return running.run(_STEPS)

    failed = 0
    with ThreadPoolExecutor(1 if options.dry_run else _TOGETHER) as pool:
        for name, taken in [(name, pool.submit(take, name)) for name in runs]:
            try:
                found = taken.result()
            except TrainingError as error:
                say(failed_line(name, str(error), columns=6))
                failed = 1
                continue
            loaded = recipe_file.load(runs[name].task["recipe"], runs[name].task["overrides"])
            train = loaded.recipe.train
            case = Case(
                loaded.recipe, Sharding("fsdp2" if "fsdp2" in name else "ddp"), micro_batch=train.global_batch_size,
                precision=runs[name].variables["ACCELERATE_MIXED_PRECISION"],
                recomputes=train.checkpoint_activations == "blocks", device="cpu" if options.dry_run else "cuda",
            )  # fmt: skip
            predicted = peak(case).total
            off = predicted / found["allocated"] - 1
            mib = [f"{count / 2**20:,.0f}" for count in (predicted, found["allocated"], found["reserved"])]
            say(f"| {name} | {mib[0]} | {mib[1]} | {off:+.1%} | {mib[2]} | {verdict('<= 0.1', abs(off))} |")
    return failed


def _runs(options: argparse.Namespace, folder: Path) -> dict[str, Entry]:
    """Return what is trained, the most important first."""
    networks = (text.GPT2_124M, text.GPT3_350M, text.GPT3_1_3B, text.LLAMA3_8B)
    gpt2, gpt3, larger, llama = (text.small_like(each) if options.dry_run else each for each in networks)
    layers, batch = ((), ()) if options.dry_run else (("model.layers=2",), ("train.global_batch_size=128",))
    resnet = {**images.resnet(options, folder, *batch), "program": SAMERUN}
    alone = ON_CPU if options.dry_run else {}
    sharded = {**images.variables_of(["fsdp2"], folder, on_cpu=options.dry_run)["fsdp2"], **alone}

    def run(task: dict[str, Any], precision: str = "bf16", variables: Mapping[str, str] = alone) -> Entry:
        return Entry(task=task, variables={**variables, "ACCELERATE_MIXED_PRECISION": precision})

    def of(network: text.Network, *more: str) -> dict[str, Any]:
        tokens = text.tokens(network, folder, dry_run=options.dry_run)
        words = (*TEXT, *network.words(), *more, f"data.path={tokens}")
        return {"program": SAMERUN, "recipe": network.recipe, "overrides": words}

    return {
        "GPT-2 124M": run(of(gpt2)),
        "GPT-2 124M, blocks": run(of(gpt2, _BLOCKS)),
        "GPT-3 350M": run(of(gpt3)),
        "Llama 3 8B of 2 layers, blocks": run(of(llama, _BLOCKS, *layers)),
        "ResNet-50": run(resnet),
        "GPT-2 124M, float32": run(of(gpt2), "no"),
        "GPT-2 124M, whole logits": run(of(gpt2, "model.head=whole")),
        "GPT-3 1.3B, blocks": run(of(larger, _BLOCKS)),
        "GPT-2 124M, fsdp2": run(of(gpt2), variables=sharded),
        "ResNet-50, float32": run(resnet, "no"),
    }
