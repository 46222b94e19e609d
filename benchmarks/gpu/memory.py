"""What the steps of real runs take of a GPU's memory, beside what `samerun plan` says they will.

Measured is the most that torch's allocator gave out within three steps, and what it had taken for that from the driver
(`reserved`), which is more for being in pieces. Neither holds CUDA's own context. Some runs go on at the same time: bytes do
not depend on that. In a dry run both are of a CPU, and of tiny models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from app.errors import RecipeError
from benchmarks.gpu import text
from benchmarks.gpu.contest import Goal, failed_line, say
from benchmarks.planning import Measured, predicted, trained

_MIB = 2**20
_GOAL = Goal(most=0.10)
_TOGETHER = 3
_LEAST_S = 20.0
"""With less than this no further run is begun."""
_BLOCKS = "train.checkpoint_activations=blocks"


def _text(name: str, network: text.Network, *more: str, strategy: str = "single", precision: str = "bf16") -> Measured:
    batch = (f"data.sequence_length={network.length}", f"train.global_batch_size={network.rows}")
    steps = ("optim.warmup_steps=10", "optim.cosine_steps=null")
    return Measured(name, network.recipe, (*network.words(), *batch, *steps, *more), strategy, 1, precision)


def _images(*more: str) -> tuple[str, ...]:
    return ("data.source=fakedata", "data.validation_split=null", "optim.warmup_epochs=null", *more)


def cases(*, dry_run: bool) -> list[Measured]:
    """Return what is trained, the most important first."""
    of = {each.name: text.small_like(each) if dry_run else each for each in (text.GPT2_124M, text.GPT3_350M, text.GPT3_1_3B)}
    gpt2, gpt3, larger = of.values()
    llama = replace(text.LLAMA3_8B, overrides=(*text.LLAMA3_8B.overrides, "model.layers=2"))
    llama = text.small_like(text.LLAMA3_8B) if dry_run else llama
    small = ("model.name=resnet18", "data.image_size=32", "data.resize_size=32", "train.global_batch_size=8")
    resnet = _images(*(small if dry_run else ("train.global_batch_size=128",)))
    return [
        _text("GPT-2 124M", gpt2),
        _text("GPT-2 124M, blocks", gpt2, _BLOCKS),
        _text("GPT-3 350M", gpt3),
        _text("Llama 3 8B of 2 layers, blocks", llama, _BLOCKS),
        Measured("ResNet-50", "imagenet_resnet50", resnet, "single", 1, "bf16"),
        _text("GPT-2 124M, float32", gpt2, precision="no"),
        _text("GPT-2 124M, whole logits", gpt2, "model.head=whole"),
        _text("GPT-3 1.3B, blocks", larger, _BLOCKS),
        _text("GPT-2 124M, fsdp2", gpt2, strategy="fsdp2"),
        Measured("ResNet-50, float32", "imagenet_resnet50", resnet, "single", 1, "no"),
    ]


def measure(options: argparse.Namespace, folder: Path) -> int:  # noqa: ARG001
    """Train them, and print the table; return 0 if all were trained."""
    say("| | predicted MiB | allocated MiB | error | reserved MiB | goal of the error |")
    say("|---" * 6 + "|")
    device, failed = "cpu" if options.dry_run else "cuda", 0
    with ThreadPoolExecutor(1 if options.dry_run else _TOGETHER) as pool:
        for case, taken in _begun(pool, options):
            try:
                said = predicted(case, device)  # type: ignore[arg-type]
                (found,) = taken.result()
            except (RecipeError, TimeoutError) as why:
                say(failed_line(case.name, str(why), columns=6))
                failed = 1
                continue
            error = said / found["steps"] - 1
            mib = [f"{count / _MIB:,.0f}" for count in (said, found["steps"])]
            reserved = f"{found['reserved'] / _MIB:,.0f}" if "reserved" in found else ""
            say(f"| {case.name} | {' | '.join(mib)} | {error:+.1%} | {reserved} | {_GOAL.verdict(abs(error))} |")
    return failed


def _begun(pool: ThreadPoolExecutor, options: argparse.Namespace) -> Iterator[tuple[Measured, Future[list[dict[str, int]]]]]:
    def take(case: Measured) -> list[dict[str, int]]:
        if time.monotonic() + _LEAST_S > options.end_s:
            raise TimeoutError("left out, no time was left")
        return trained(case, "cpu" if options.dry_run else "cuda")

    yield from [(case, pool.submit(take, case)) for case in cases(dry_run=options.dry_run)]
