"""The optimizer, against updates written by hand in float64 and against the groups that the papers ask for."""

import pytest
import torch
from torch import nn

from app.optim import parameter_groups
from app.recipe.schema import OptimRecipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe


class Tiny(nn.Module):
    """One matrix, one bias, one norm and one token, in float64."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.token = nn.Parameter(torch.zeros(1, 1, 4, dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in model.named_parameters()}


def trained(recipe: OptimRecipe, *, fused: bool | None, rates: list[float]) -> dict[str, torch.Tensor]:
    model = Tiny()
    optimizer = parameter_groups.build_optimizer(recipe, model, fused=fused)
    for step, rate in enumerate(rates):
        parameter_groups.set_learning_rate(optimizer, rate)
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def adamw_by_hand(recipe: OptimRecipe, rates: list[float]) -> dict[str, torch.Tensor]:
    """Algorithm 2 of Loshchilov and Hutter 2019 (arXiv:1711.05101), the decay multiplied with the rate as in torch."""
    model, (beta1, beta2) = Tiny(), recipe.betas
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, rate in enumerate(rates):
        for name, gradient in gradients(model, step).items():
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            mean = first[name] / (1 - beta1 ** (step + 1))
            variance = second[name] / (1 - beta2 ** (step + 1))
            decay = recipe.weight_decay if name == "linear.weight" else 0.0
            weights[name] = weights[name] - rate * decay * weights[name] - rate * mean / (variance.sqrt() + recipe.eps)
    return weights


def sgd_by_hand(recipe: OptimRecipe, rates: list[float]) -> dict[str, torch.Tensor]:
    """Momentum as in Goyal et al. 2017, equation 9 (the rate outside of the sum), with the decay in the gradient."""
    model = Tiny()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    speed = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, rate in enumerate(rates):
        for name, gradient in gradients(model, step).items():
            decayed = gradient + (recipe.weight_decay if name == "linear.weight" else 0.0) * weights[name]
            speed[name] = recipe.momentum * speed[name] + decayed
            direction = decayed + recipe.momentum * speed[name] if recipe.nesterov else speed[name]
            weights[name] = weights[name] - rate * direction
    return weights


RATES = [0.01, 0.02, 0.03, 0.02, 0.005]


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        (OptimRecipe(name="adamw", weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6), adamw_by_hand),
        (OptimRecipe(name="sgd", weight_decay=0.1, momentum=0.9), sgd_by_hand),
        (OptimRecipe(name="sgd", weight_decay=0.1, momentum=0.9, nesterov=True), sgd_by_hand),
    ],
    ids=["adamw", "sgd", "nesterov"],
)
def test_update_is_the_one_written_by_hand(recipe, by_hand, fused):
    found, expected = trained(recipe, fused=fused, rates=RATES), by_hand(recipe, RATES)
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-13)
        assert not torch.equal(weight, Tiny().get_parameter(name))


def undecayed(model: nn.Module) -> set[str]:
    optimizer = parameter_groups.build_optimizer(OptimRecipe(weight_decay=0.1), model)
    groups = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(groups.values()) == {0.1, 0.0}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    return {name for name, parameter in model.named_parameters() if groups[id(parameter)] == 0.0}


def parameters_of(model: nn.Module, *layers: type[nn.Module], only: str = "") -> set[str]:
    found = {
        f"{name}.{leaf}"
        for name, layer in model.named_modules()
        if isinstance(layer, layers)
        for leaf, _ in layer.named_parameters(recurse=False)
    }
    return {name for name in found if name.endswith(only)}


@pytest.mark.parametrize(
    ("name", "side", "extra"),
    [
        ("convnet", 8, set()),
        ("resnet18", 32, set()),
        ("vit_b_16", 32, {"class_token", "encoder.pos_embedding"}),
    ],
)
def test_norms_biases_and_embeddings_do_not_decay(name, side, extra):
    with torch.device("meta"):
        model = models.build(ModelRecipe(name=name), channels=3, image_size=(side, side), num_classes=7)
        found = undecayed(model)
    norms = parameters_of(model, nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm)
    biases = {parameter for parameter, _ in model.named_parameters() if parameter.endswith("bias")}
    assert norms
    assert found == norms | biases | extra
    assert all(parameter.ndim >= 2 for key, parameter in model.named_parameters() if key not in found)


@pytest.mark.parametrize(
    ("name", "scales"),
    [("convnext_tiny", "layer_scale"), ("swin_t", "relative_position_bias_table"), ("swin_v2_t", "logit_scale")],
)
def test_what_only_looks_like_a_matrix_does_not_decay(name, scales):
    with torch.device("meta"):
        model = models.build(ModelRecipe(name=name), channels=3, image_size=(64, 64), num_classes=7)
    alike = {key: parameter for key, parameter in model.named_parameters() if key.endswith(scales)}
    assert alike
    assert all(parameter.ndim >= 2 for parameter in alike.values())
    assert alike.keys() <= undecayed(model)


def test_fused_where_supported_and_off_when_asked():
    model = models.build(ModelRecipe(), channels=1, image_size=(8, 8), num_classes=10)
    assert parameter_groups.build_optimizer(OptimRecipe(name="adamw"), model).defaults["fused"] is True
    assert parameter_groups.build_optimizer(OptimRecipe(name="adamw"), model, fused=False).defaults["fused"] is False


def test_frozen_weights_are_left_out():
    model = models.build(ModelRecipe(), channels=1, image_size=(8, 8), num_classes=10)
    model.conv1.requires_grad_(requires_grad=False)
    held = {id(p) for group in parameter_groups.build_optimizer(OptimRecipe(), model).param_groups for p in group["params"]}
    assert held == {id(parameter) for name, parameter in model.named_parameters() if not name.startswith("conv1.")}


def test_set_learning_rate_reaches_every_group():
    optimizer = parameter_groups.build_optimizer(OptimRecipe(lr=1.0, weight_decay=0.1), Tiny())
    assert len(optimizer.param_groups) == 2
    parameter_groups.set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
