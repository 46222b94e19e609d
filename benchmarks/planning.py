"""How well a plan predicts: `python -m benchmarks.planning [--cases NAME,...]`.

Each case is trained for three steps, in real processes on CPU, through gloo. Beside what app/planning says stands what torch's
allocator gave out within the steps, on the rank that needed most. What is predicted is for the same kernels, those of a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.errors import RecipeError
from app.options.values import names
from app.place.cores import machine
from app.place.topology import Topology
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from benchmarks.figures import versions
from launch import preset
from launch.node_command import accelerate_argv

_MIB = 2**20
_ENV = ("env", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1")  # with ACCELERATE_USE_CPU Accelerate would drop DeepSpeed
_STEPS = ("train.steps=1000", "train.epochs=null", "train.evaluate_every_steps=1000", "train.max_validation_samples=32")
_REPOSITORY = Path(__file__).parent.parent
_LLAMA = ("lm_tiny", ("model.hidden_size=512", "model.heads=8", "model.layers=6", "data.sequence_length=256"))
_GPT2 = ("lm_tiny", ("model.architecture=gpt2", "model.hidden_size=384", "model.layers=8", "model.vocab_size=8192"))
_PRESETS = {
    "ddp": "multi_gpu",
    "fsdp2": "fsdp2",
    "zero1": "deepspeed_zero1",
    "zero2": "deepspeed_zero2",
    "zero3": "deepspeed_zero3",
    "zero3_offload": "deepspeed_zero3_offload",
}


@dataclass(frozen=True)
class Measured:
    """A case that is trained and planned."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    strategy: str = "single"
    processes: int = 1
    precision: str = "no"

    @property
    def words(self) -> tuple[str, ...]:
        """What is said of the recipe."""
        return (*self.overrides, *_STEPS)


@dataclass(frozen=True)
class Figure:
    """Bytes of a case."""

    case: Measured
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """How much too much was predicted, as a share of what was measured."""
        return self.predicted / self.measured - 1


def _with(recipe: tuple[str, tuple[str, ...]], *more: str) -> dict[str, object]:
    return {"recipe": recipe[0], "overrides": (*recipe[1], *more)}


_BLOCKS = "train.checkpoint_activations=blocks"
_RESNET = ("digits", ("model.name=resnet18", "train.global_batch_size=64"))
CASES = (
    Measured("convnet", "digits", ("train.global_batch_size=256",)),
    Measured("resnet18", _RESNET[0], _RESNET[1]),
    Measured("resnet18 sgd", _RESNET[0], (*_RESNET[1], "optim.name=sgd", "optim.lr=0.01")),
    Measured("llama", *_LLAMA),
    Measured("llama bf16", *_LLAMA, precision="bf16"),
    Measured("llama blocks", _LLAMA[0], (*_LLAMA[1], _BLOCKS)),
    Measured("gpt2", *_GPT2),
    Measured("gpt2 accumulation, average", _GPT2[0], (*_GPT2[1], "train.max_micro_batch=4", "train.ema_decay=0.9")),
    Measured("gpt2 nadam blocks", _GPT2[0], (*_GPT2[1], _BLOCKS, "optim.name=nadam")),
    Measured("text.py", str(_REPOSITORY / "examples/text.yaml"), ("model.width=256", "train.global_batch_size=128")),
    Measured("convnet ddp", "digits", ("train.global_batch_size=256",), "ddp", 2),
    Measured("resnet18 ddp", _RESNET[0], _RESNET[1], "ddp", 2),
    Measured("llama ddp", *_LLAMA, "ddp", 2),
    Measured("gpt2 ddp blocks", _GPT2[0], (*_GPT2[1], _BLOCKS), "ddp", 2),
    Measured("resnet18 fsdp2", _RESNET[0], _RESNET[1], "fsdp2", 2),
    Measured("llama fsdp2", *_LLAMA, "fsdp2", 2),
    Measured("llama fsdp2 bf16", *_LLAMA, "fsdp2", 2, "bf16"),
    Measured("llama fsdp2 blocks", _LLAMA[0], (*_LLAMA[1], _BLOCKS), "fsdp2", 2),
    Measured("llama fsdp2 bf16 blocks", _LLAMA[0], (*_LLAMA[1], _BLOCKS), "fsdp2", 2, "bf16"),
    Measured("gpt2 fsdp2", *_GPT2, "fsdp2", 2),
    Measured("text.py fsdp2", str(_REPOSITORY / "examples/text.yaml"), ("model.width=256",), "fsdp2", 2),
    Measured("llama zero1", *_LLAMA, "zero1", 2),
    Measured("llama zero2", *_LLAMA, "zero2", 2),
    Measured("llama zero2 bf16", *_LLAMA, "zero2", 2, "bf16"),
    Measured("llama zero3", *_LLAMA, "zero3", 2),
    Measured("llama zero3 bf16", *_LLAMA, "zero3", 2, "bf16"),
    Measured("llama zero3_offload", *_LLAMA, "zero3_offload", 2),
)


def main(argv: list[str]) -> int:
    """Measure, print the table, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--cases", type=names, metavar="NAMES", help="comma-separated; default: all")
    wanted = parser.parse_args(argv).cases or [case.name for case in CASES]
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"there is no case {', '.join(sorted(unknown))}: there is {', '.join(case.name for case in CASES)}")
    sys.stdout.write("| case | predicted MiB | measured MiB | error |\n" + "|---" * 4 + "|\n")
    for figure in (figure_of(case) for case in CASES if case.name in wanted):
        sys.stdout.write(_row(figure) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{machine()}; {', '.join(f'{name} {number}' for name, number in versions().items())}.\n")
    return 0


def figure_of(case: Measured) -> Figure:
    """Train a case and plan it. Raises RecipeError if the training fails."""
    measured = trained(case)
    return Figure(case, predicted(case), max(it["steps"] for it in measured))


def predicted(case: Measured, device: Literal["cpu", "cuda"] = "cpu") -> int:
    """Return the bytes that the plan says; on a CPU the memory of the machine is added, which there is the same."""
    from app.planning.memory import Case, peak

    loaded = recipe_file.load(case.recipe, case.words)
    plan = BatchPlan.of(loaded.recipe, case.processes)
    memory = peak(
        Case(
            loaded,
            case.strategy,
            data_ranks=case.processes,
            micro_batch=plan.micro_batch,
            precision=case.precision,
            checkpoint_activations=loaded.recipe.train.checkpoint_activations,
            device=device,
        )
    )
    return memory.total + (memory.host if device == "cpu" else 0)


def trained(case: Measured, device: Literal["cpu", "cuda"] = "cpu") -> list[dict[str, int]]:
    """Train a case; return what each process wrote. Raises RecipeError if it fails."""
    environment, alone = (_ENV, "cpu") if device == "cpu" else ((), "single_gpu")
    with tempfile.TemporaryDirectory(prefix="samerun-planning-") as folder:
        words = [folder, "--recipe", case.recipe, "--run-dir", f"{folder}/run", *case.words]
        topology = Topology(processes_per_node=case.processes, origins={"processes_per_node": "--processes"})
        chosen = preset.load(alone if case.strategy == "single" else _PRESETS[case.strategy])
        module = "benchmarks.planning_case" if device == "cpu" else "benchmarks.gpu.memory_case"
        command = accelerate_argv(topology, chosen, words, module=module, mixed_precision=case.precision)
        done = subprocess.run([*environment, *command], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RecipeError(f"{case.name} has failed: {(done.stdout + done.stderr)[-4000:]}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(case.processes)]
    for each in found:
        assert each["count"] == 3, f"{case.name} took {each['count']} steps"
    return found


def _row(figure: Figure) -> str:
    predicted_mib, measured_mib = (f"{count / _MIB:,.1f}" for count in (figure.predicted, figure.measured))
    return f"| {figure.case.name} | {predicted_mib} | {measured_mib} | {100 * figure.error:+.1f} % |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
