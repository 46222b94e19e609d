"""Muon: a plain loop of one process, torch's own class, the same run on every topology, and a chain of resumes."""

from __future__ import annotations

import copy
import inspect
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from processes import losses, read, train
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from app.checkpoints import step_folders
from app.checks.verify import verify
from app.environment.topology import Degrees
from app.errors import RecipeError
from app.optim import muon, parameter_groups
from app.optim.muon import Muon
from app.optim.steps import Steps
from app.planning import memory, tracing
from app.planning.memory import Case
from app.recipe import optimizers, recipe_file
from app.recipe.schema import OptimRecipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe
from launch import preset

STEPS, VOCABULARY = 20, 97
LLAMA = {"LlamaDecoderLayer"}


def language_model() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def convnet() -> nn.Module:
    return models.build(
        ModelRecipe(name="convnet", activation="gelu", pooling="average"), channels=1, image_size=(8, 8), num_classes=10
    )


def loss_of_tokens(model: nn.Module, step: int) -> torch.Tensor:
    rows = (torch.randint(VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step)) + torch.arange(17)) % VOCABULARY
    return nn.functional.cross_entropy(model(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())


def loss_of_images(model: nn.Module, step: int) -> torch.Tensor:
    labels = torch.arange(16) % 10
    noise = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(noise + labels.view(-1, 1, 1, 1) / 3), labels)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    matrix = matrix / matrix.norm()
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


def plain_losses(model: nn.Module, loss: Any, names: list[str], lr: float) -> list[float]:
    """Train `model` as the recipe of the test does; Muon steps on the parameters of these names."""
    parameters = dict(model.named_parameters())
    rest = {name: it for name, it in parameters.items() if name not in names}
    decaying = [it for name, it in rest.items() if it.ndim >= 2]
    others = [{"params": decaying, "weight_decay": 0.1}, {"params": [it for it in rest.values() if it.ndim < 2]}]
    adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, foreach=False)
    momenta = {name: torch.zeros_like(parameters[name]) for name in names}
    found = []
    for step in range(STEPS):
        value = loss(model, step)
        value.backward()
        found.append(value.item())
        nn.utils.clip_grad_norm_(parameters.values(), 0.5)
        adamw.step()
        for name, momentum in momenta.items():
            weights, gradient = parameters[name].detach(), parameters[name].grad
            assert gradient is not None
            momentum.mul_(0.95).add_(0.05 * gradient)
            matrix = (0.05 * gradient + 0.95 * momentum).flatten(1)
            weights -= lr * (0.1 * weights + 0.2 * max(matrix.shape) ** 0.5 * newton_schulz(matrix).view_as(weights))
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("build", "loss", "blocks", "matrices"),
    [(language_model, loss_of_tokens, LLAMA, 14), (convnet, loss_of_images, (), 2)],
)
def test_twenty_steps_are_those_of_a_plain_loop(build: Any, loss: Any, blocks: Any, matrices: int) -> None:
    torch.manual_seed(0)
    ours, accelerator = build(), Accelerator(cpu=True)
    theirs, lr = copy.deepcopy(ours), 0.01
    recipe = OptimRecipe(name="muon", lr=lr, weight_decay=0.1)
    rule = parameter_groups.Rule.of(recipe, ours, blocks)
    model, optimizer = accelerator.prepare(ours, parameter_groups.build_optimizer(recipe, ours, rule))
    steps, found = Steps(accelerator, model, optimizer, clip_norm=0.5), []
    for step in range(STEPS):
        found.append(loss(model, step))
        steps.backward(found[-1], 1.0)
        steps.take(lr)
    names = [name for name, _ in theirs.named_parameters() if "proj" in name or name in ("conv2.weight", "hidden.weight")]
    assert len(names) == matrices
    expected = plain_losses(theirs, loss, names, lr)
    assert [it.item() for it in found] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.9 * expected[0]
    stepped = sum(theirs.get_parameter(name).numel() for name in names)
    (note,) = rule.notes()
    assert f"muon steps on {matrices} matrices with {stepped:,} parameters, and adamw on the other " in note


@pytest.mark.parametrize("adjust_lr_fn", optimizers.ADJUSTMENTS)
def test_in_bfloat16_it_is_torchs_own(adjust_lr_fn: str) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((24, 40), (40, 8), (9, 9))]
    theirs = copy.deepcopy(ours)
    defaults = inspect.signature(torch.optim.Muon).parameters
    of_torch = {name: defaults[name].default for name in ("momentum", "nesterov", "ns_steps")}
    assert optimizers.TABLE["muon"].settings == {**of_torch, "adjust_lr_fn": "match_rms_adamw"}
    assert defaults["ns_coefficients"].default == (muon._A, muon._B, muon._C)
    keys: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": adjust_lr_fn}
    both = Muon([{"params": ours, "matrices": True}], **keys), torch.optim.Muon(theirs, **keys)
    for _ in range(2):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0.016, atol=0.01)


def test_embeddings_heads_and_stacked_experts_are_not_matrices() -> None:
    with torch.device("meta"):
        model = language_model()
        mlp: Any = model.get_submodule("model.layers.1.mlp")
        mlp.weight, mlp.table = nn.Parameter(torch.empty(2, 3, 4)), nn.Embedding(5, 6)
        model.get_parameter("model.layers.0.mlp.up_proj.weight").requires_grad = False
        matrices = parameter_groups.by_muon(model, LLAMA)
    assert {name.split(".")[2] for name in matrices} == {"0", "1"}
    assert len(matrices) == 13
    assert not [name for name in matrices if name.endswith(("norm.weight", "mlp.weight", "table.weight"))]
    with pytest.raises(RecipeError, match=r"optim.name is muon, .* and the model, a Linear, has none that are trained: use"):
        parameter_groups.Rule.of(OptimRecipe(name="muon"), nn.Linear(2, 2))


def test_a_plan_counts_one_state_of_a_matrix_and_two_of_others() -> None:
    recipe = recipe_file.load("lm_tiny", ["optim.name=muon"]).recipe
    model = tracing.build_blueprint(recipe).model
    stepped = sum(it.numel() for name, it in model.named_parameters() if "proj" in name)
    others = sum(it.numel() for it in model.parameters()) - stepped
    sharding = preset.load("multi_gpu").sharding(Degrees())
    counted = memory.peak(Case(recipe, sharding, data_ranks=2, device="cpu")).optimizer
    assert 4 * (stepped + 2 * others) <= counted < 1.001 * 4 * (stepped + 2 * others)


# Real processes ---------------------------------------------------------------------------------------------------------------

Topology = tuple[str, int, int]
"""Preset, processes, accumulation."""
COMMON = f"""optim.name=muon train.steps={STEPS} train.global_batch_size=8 train.evaluate_every_epochs=0 optim.clip_norm=0.5
    optim.weight_decay=0.1 optim.lr=0.01 optim.warmup_steps=3 log.every_steps=1 checkpoint.every_steps=5
    checkpoint.keep_last=9"""
RECIPES = {  # no dimension of the first is a multiple of 4, so ranks have unequal rows
    "llama": """--recipe lm_tiny model.hidden_size=30 model.layers=2 model.heads=3 model.intermediate_size=70
        data.sequence_length=64 train.evaluate_every_steps=null train.max_validation_samples=64""",
    "convnet": "--recipe digits optim.warmup_epochs=null train.epochs=null",
}
TOPOLOGIES: list[Topology] = [
    ("cpu", 1, 2), ("multi_gpu", 2, 1), ("multi_gpu", 2, 2), ("multi_gpu", 4, 1), ("fsdp2", 2, 1), ("fsdp2", 2, 2),
    ("fsdp2", 4, 1), ("hsdp", 4, 1), ("hsdp", 4, 2),
]  # fmt: skip
CHAIN: tuple[Topology, ...] = (("fsdp2", 2, 2), ("multi_gpu", 2, 1), ("hsdp", 4, 1), ("cpu", 1, 2))
SIZES = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}}


def trained(folder: Path, model: str, topology: Topology) -> Path:
    name, processes, accumulation = topology
    words = [*RECIPES[model].split(), *COMMON.split(), f"train.max_micro_batch={8 // (processes * accumulation)}"]
    train(name, folder, *words, "--resume", "auto", processes=processes, env=SIZES.get(name)).check()
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the run of one process of each model, started when first asked for."""
    folder = tmp_path_factory.mktemp("alone")
    return lambda model: folder / model if (folder / model).exists() else trained(folder / model, model, ("cpu", 1, 1))


def difference(run_dir: Path, reference: Path) -> float:
    """Return the largest relative difference of the losses; the rates are equal, and each batch was processed once."""
    assert losses(run_dir, "learning_rate") == losses(reference, "learning_rate")
    assert verify(run_dir)[0].is_good
    pairs = list(zip(losses(run_dir), losses(reference), strict=True))
    assert len(pairs) == STEPS
    pairs.append((read(run_dir / "result.json")["test_loss"], read(reference / "result.json")["test_loss"]))
    return max(abs(one / other - 1) for one, other in pairs)


def chains() -> Iterator[Any]:
    """Yield a chain of resumes of each model, and each topology alone."""
    for model in RECIPES:
        for chain in (CHAIN, *((topology,) for topology in TOPOLOGIES)):
            yield pytest.param(model, chain, marks=() if (model, chain) == ("llama", CHAIN) else pytest.mark.long)


@pytest.mark.multiproc
@pytest.mark.parametrize(("model", "chain"), list(chains()))
def test_it_is_the_same_run(alone: Any, model: str, chain: tuple[Topology, ...], tmp_path: Path) -> None:
    """Each topology of a chain resumes from the step, 5 later than the one before, and ends the run."""
    run_dir = tmp_path / "run"
    for first, topology in zip(range(0, STEPS, 5), chain, strict=False):
        for folder in step_folders.committed(run_dir) if first else ():
            if folder > step_folders.path_of(run_dir, first):
                shutil.rmtree(folder)
        (run_dir / "result.json").unlink(missing_ok=True)
        trained(run_dir, model, topology)
        facts = read(run_dir / "run.json")
        assert (facts["world_size"], facts["accumulation"], facts.get("resumed_step", 0)) == (*topology[1:], first)
        found = difference(run_dir, alone(model))
        print(f"{model} from step {first} on {topology}: {found:.1e}")
        assert found < 1e-5
