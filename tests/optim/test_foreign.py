"""Optimizer classes of others: the same run on any topology, or a sentence that says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import own_optimizers
import pytest
import torch
from processes import losses, read, read_lines, train
from safetensors.torch import load_file
from torch import nn

from app.checkpoints import optimizer_trial
from app.checkpoints.step_folders import Reader
from app.distributed.runtime import Runtime
from app.environment.launched import Launched, Strategy
from app.errors import PresetError, RecipeError, SamerunError
from app.init.region import Piece, Region
from app.optim import parameter_groups
from app.recipe import recipe_file
from app.recipe.schema import BatchPlan, OptimRecipe, Recipe, TrainRecipe
from launch.start.launch import launch

SLOW, LONG = pytest.mark.slow, pytest.mark.long
Topology = tuple[str, int]
STEPS, HALF = 20, 10
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=64", "log.every_steps=1", "log.samples=true",
    "model.activation=gelu", "model.pooling=average", "train.evaluate_every_epochs=0", "optim.clip_norm=1.0",
    f"checkpoint.every_steps={HALF}",
)  # fmt: skip
LION = (
    "optim.name=tests.own_optimizers.Lion", "optim.lr=0.001", "optim.weight_decay=0.1", "optim.settings={betas: [0.9, 0.98]}",
    'optim.groups={"head.*": {lr_factor: 0.5}}',
)  # fmt: skip
BLOCKS = ("optim.name=tests.own_optimizers.Blocks", "optim.lr=0.1", "optim.settings={block: 256}", "optim.weight_decay=0")
FREE = ("optim.name=tests.own_optimizers.ScheduleFree", "optim.lr=0.5", "optim.weight_decay=0", "optim.clip_norm=null")


def go(topology: Topology, run_dir: Path, *arguments: str) -> Path:
    train(topology[0], run_dir, *RECIPE, *arguments, processes=topology[1]).check()
    return run_dir


def assert_same(found: Path, expected: Path, *, after: int = 0, tolerance: float = 1e-5) -> None:
    for name in ("step", "learning_rate"):
        assert losses(found, name) == losses(expected, name)[after:]
    samples = [read_lines(folder / "samples.jsonl") for folder in (found, expected)]
    assert samples[0] == samples[1][after:]
    assert losses(found) == pytest.approx(losses(expected)[after:], rel=tolerance)
    results = [read(folder / "result.json")["test_loss"] for folder in (found, expected)]
    assert results[0] == pytest.approx(results[1], rel=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = go(("cpu", 1), tmp_path_factory.mktemp("lion") / "alone", *LION)
    assert losses(run_dir)[-1] < 0.9 * losses(run_dir)[0]
    return run_dir


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("multi_gpu", 2), ("fsdp2", 2)),
        pytest.param(("fsdp2", 2), ("deepspeed_zero2", 2), marks=SLOW),
        pytest.param(("deepspeed_zero3", 2), ("cpu", 1), marks=LONG),
        pytest.param(("deepspeed_zero1", 2), ("hsdp", 4), marks=LONG),
        pytest.param(("deepspeed_zero2", 2), ("deepspeed_zero3", 2), marks=LONG),
        pytest.param(("hsdp", 4), ("multi_gpu", 4), marks=LONG),
        pytest.param(("cpu", 1), ("deepspeed_zero3", 4), marks=LONG),
    ],
)
def test_an_elementwise_class_is_the_same_run_everywhere_and_resumes_anywhere(
    alone: Path, tmp_path: Path, source: Topology, target: Topology
) -> None:
    first = go(source, tmp_path / "first", *LION)
    assert_same(first, alone)
    half = first / "checkpoints" / f"step-{HALF:08d}"
    assert_same(go(target, tmp_path / "second", "--resume", str(half), *LION), alone, after=HALF)


@pytest.mark.multiproc
def test_states_by_blocks_are_refused_where_parameters_are_cut_and_resumed_where_they_are_whole(tmp_path: Path) -> None:
    refused = train("fsdp2", tmp_path / "refused", *RECIPE, *BLOCKS, processes=2)
    assert refused.returncode == PresetError.exit_code
    assert "(its state codes is a Tensor of int8 [896, 256], not a number for each element), but the preset's" in refused.output
    assert not (tmp_path / "refused").exists()
    ddp = go(("multi_gpu", 2), tmp_path / "ddp", *BLOCKS)
    assert losses(ddp)[-1] < 0.9 * losses(ddp)[0]
    half = ddp / "checkpoints" / f"step-{HALF:08d}"
    resumed = go(("multi_gpu", 2), tmp_path / "resumed", "--resume", str(half), *BLOCKS)
    assert_same(resumed, ddp, after=HALF, tolerance=0.0)


def test_weights_for_evaluation_are_evaluated_and_exported_and_change_no_step(tmp_path: Path) -> None:
    undisturbed = go(("cpu", 1), tmp_path / "undisturbed", *FREE)
    evaluated = go(
        ("cpu", 1), tmp_path / "evaluated", *FREE, "train.evaluate_every_epochs=null", "train.evaluate_every_steps=3"
    )
    assert losses(evaluated) == losses(undisturbed)
    half = evaluated / "checkpoints" / f"step-{HALF:08d}"
    assert_same(go(("cpu", 1), tmp_path / "resumed", "--resume", str(half), *FREE), undisturbed, after=HALF, tolerance=0.0)
    exported = load_file(undisturbed / "model.safetensors")
    reader = Reader(undisturbed / "checkpoints" / f"step-{STEPS:08d}")
    assert reader.state["optimizer_counts"] == [{"steps": STEPS}]
    for name, it in reader.tensors("weight").items():
        found = {key: torch.empty(exported[name].numel()) for key in ("weight", "average")}
        for key, values in found.items():
            reader.read_into(Piece(key, name, it.shape, Region.flat(0, len(values)), values))
        assert torch.equal(found["average"], exported[name].flatten())
        assert not torch.equal(found["weight"], found["average"])


def tried(name: str, strategy: Strategy, **keys: Any) -> parameter_groups.Rule:
    """What the check says of a class of own_optimizers, on a process that would be started under this strategy."""
    runtime = Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))
    runtime.launched = replace(runtime.launched, strategy=strategy)
    recipe = Recipe(optim=OptimRecipe(name=f"own_optimizers.{name}", lr=0.01), train=TrainRecipe(**keys))
    return optimizer_trial.check(runtime, recipe, parameter_groups.Rule.of(recipe.optim, nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("name", "strategy", "words"),
    [
        ("Rows", "deepspeed", "(its state row is a Tensor of float32 [448], not a"),
        ("Normed", "deepspeed", "(it steps on elements together: on a part of a tensor its weight differs by "),
        ("ScheduleFree", "deepspeed", "which counts its steps in its groups (steps), and ZeRO-3 steps on the parts"),
        ("Random", "ddp", "Random, which draws random numbers, or "),
        ("Forgetful", "ddp", "cannot be resumed: a step depends on more than states of parameters and"),
        ("OwnRate", "ddp", "has a learning rate of its own"),
        ("Closure", "ddp", "missing 1 required positional argument: 'closure'"),
        ("Nothing", "ddp", "own_optimizers has no subclass of torch.optim.Optimizer of that name"),
    ],
)
def test_what_cannot_be_the_same_is_refused_with_the_reason_that_was_found(name: str, strategy: Strategy, words: str) -> None:
    with pytest.raises(SamerunError) as refused:
        tried(name, strategy)
    assert words in str(refused.value)
    if strategy == "deepspeed":
        assert "its state" in words or tried(name, "ddp").kind is getattr(own_optimizers, name)


def test_an_average_of_averages_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"which has weights of its own for evaluation, and train\.ema_decay would"):
        tried("ScheduleFree", "ddp", ema_decay=0.9)


def built(**keys: Any) -> torch.optim.Optimizer:
    return parameter_groups.build_optimizer(OptimRecipe(**keys), nn.Linear(2, 2))


def test_settings_reach_the_class_as_it_takes_them_and_what_it_refuses_is_said() -> None:
    assert built(name="own_optimizers.Blocks", settings={"block": 64}).defaults == {"lr": 1e-3, "block": 64}
    betas = built(name="own_optimizers.Lion", settings={"betas": [0, 0.5]}).defaults["betas"]
    assert betas == (0, 0.5)
    with pytest.raises(RecipeError, match=r"own_optimizers's Lion refuses the settings of optim: .* argument 'beta'"):
        built(name="own_optimizers.Lion", settings={"beta": 1})
    with pytest.raises(
        RecipeError, match=r"optim.weight_decay is set, which .*Blocks does not take: it takes params, lr, block"
    ):
        built(name="own_optimizers.Blocks", weight_decay=0.1)
    with pytest.raises(RecipeError, match=r"nowhere cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"):
        built(name="nowhere.Lion")


def test_a_login_node_imports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    launch(["--preset", "fsdp2", "--processes", "2", "--dry-run", "optim.name=nowhere.Lion"], {}, say=print)
    assert "optim.name=nowhere.Lion" in capsys.readouterr().out
    with pytest.raises(RecipeError, match=r"optim.settings has lr: 1.0: give it as optim.lr \(command line\)"):
        recipe_file.load("digits", ["optim.name=nowhere.Lion", "optim.settings={lr: 1}"])
