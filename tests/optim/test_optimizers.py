"""Optimizers by name, held against torch: what each takes, and where it may step."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from processes import REPOSITORY
from torch import nn

from app.errors import PresetError, RecipeError
from app.optim import parameter_groups, schedule
from app.recipe import optimizers, recipe_file
from app.recipe.optimizers import TABLE
from app.recipe.schema import OptimRecipe, Recipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe
from launch import preset
from launch.start.launch import launch

# Each optimizer as it is, and with the settings that change what it keeps.
VARIANTS = {
    **{name: (name, None) for name in TABLE},
    "adamw amsgrad": ("adamw", {"amsgrad": True}),
    "nadam decoupled": ("nadam", {"decoupled_weight_decay": True}),
    "rmsprop centered": ("rmsprop", {"centered": True, "momentum": 0.9, "alpha": 0.9}),
    "adagrad decaying": ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
}


def recipe_of(variant: str) -> OptimRecipe:
    name, settings = VARIANTS[variant]
    return OptimRecipe(name=name, lr=0.02, weight_decay=0.1, settings=settings)


def gradient(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 3.0**step


def test_every_optimizer_of_torch_has_a_name_or_a_reason() -> None:
    there = {name for name in dir(torch.optim) if inspect.isclass(getattr(torch.optim, name))} - {"Optimizer"}
    named = {optimizer.torch_name for optimizer in TABLE.values()}
    assert there == named | {"ASGD", "LBFGS", "Muon", "Rprop", "SparseAdam"}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_says_what_torch_takes(name: str) -> None:
    """Every number and switch of torch's that changes what is learnt, with torch's default, is a key or a setting."""
    optimizer = TABLE[name]
    of_torch = inspect.signature(getattr(torch.optim, optimizer.torch_name)).parameters
    assert {"lr", "weight_decay", *optimizer.keys} <= of_torch.keys()
    defaults = {field.name: field.default for field in fields(OptimRecipe)}
    for key in set(optimizer.keys) - {"momentum"}:
        assert defaults[key] == of_torch[key].default, key
    for key, default in optimizer.settings.items():
        assert (default, type(default)) == (of_torch[key].default, type(default)), key
    left_out = {"params", "lr", "weight_decay", "maximize", *parameter_groups._ONLY_HOW}
    left_out |= {"sgd": {"dampening"}, "adafactor": {"eps"}}.get(name, set())  # no kernel that is used has the one
    assert {*optimizer.keys, *optimizer.settings} == of_torch.keys() - left_out


@pytest.mark.parametrize("variant", VARIANTS)
def test_who_may_step_on_parts_of_a_parameter_does_the_same_there(variant: str) -> None:
    """A matrix, and its elements cut into flat parts, with the same gradients: ZeRO cuts so, and FSDP2 by rows."""
    recipe, whole, steps = recipe_of(variant), nn.Linear(6, 5, bias=False), 6
    torch.nn.init.normal_(whole.weight, generator=torch.Generator().manual_seed(7))
    parts = [nn.Parameter(part.clone()) for part in whole.weight.detach().flatten().split(11)]
    on_whole = parameter_groups.build_optimizer(recipe, whole)
    taken = inspect.signature(type(on_whole)).parameters.keys() & on_whole.defaults.keys()
    on_parts = type(on_whole)(parts, **{key: on_whole.defaults[key] for key in taken} | {"weight_decay": 0.1})
    for step in range(steps):
        whole.weight.grad = gradient(step, 5, 6)
        for part, values in zip(parts, whole.weight.grad.flatten().split(11), strict=True):
            part.grad = values.clone()
        for optimizer in (on_whole, on_parts):
            parameter_groups.set_learning_rate(optimizer, 0.02 / (step + 1))
            optimizer.step()
    found = torch.cat([part.detach() for part in parts])
    difference = (found - whole.weight.detach().flatten()).abs().max().item()
    if recipe.name == "adafactor":
        assert difference > 0.01
    else:
        assert difference < 1e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.LayerNorm(4), nn.Linear(4, 1)


def test_who_needs_whole_parameters_is_refused_where_they_are_cut() -> None:
    cut = {name for name in preset.names() if optimizers.refusal("adafactor", preset.load(name).strategy)}
    assert set(preset.names()) - cut == set(optimizers.WHOLE_PRESETS)
    assert not any(optimizers.refusal("nadam", preset.load(name).strategy) for name in preset.names())
    command = ["--preset", "fsdp2", "--processes", "2", "--dry-run", "optim.name=torch.optim.Adafactor"]
    with pytest.raises(PresetError, match=r"optim.name is adafactor, .*shards them: use cpu, single_gpu, .* or an optimizer"):
        launch(command, {}, say=lambda _: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.name=adamx"], "optim.name is 'adamx': did you mean adamax or adam or radam?; there is sgd, adamw"),
        (["optim.name=torch.optim.Muon"], "optim.name is 'torch.optim.Muon': it is not supported"),
        (["optim.settings={alpha: 0.9}"], "optim.settings has alpha: 0.9: adamw has no such setting; it has amsgrad"),
        (["optim.settings={eps: 1}"], "optim.settings has eps: 1.0: give it as optim.eps"),
        (["optim.name=rmsprop", "optim.settings={alpha: much}"], 'optim.settings has alpha: "much": it must be a number'),
        (["optim.groups={head.*: {lr_facto: 2}}"], 'groups has head.*: {"lr_facto": 2.0}: expected {lr_factor: F, weight'),
        (["optim.groups={head.*: {lr_factor: -1}}"], "lr_factor must be a number, at least 0"),
    ],
)
def test_what_cannot_be_is_said_before_torch_is_there(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        recipe_file.load("digits", words)
    assert said in str(refused.value)
    assert "(command line)" in str(refused.value)


@pytest.mark.parametrize("name", TABLE)
def test_keys_reach_torch_and_its_class_is_the_short_name(name: str) -> None:
    keys: Any = {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "momentum": 0.5, "nesterov": True}
    recipe, alike = (OptimRecipe(name=it, lr=0.02, **keys) for it in (name, f"torch.optim.{TABLE[name].torch_name}"))
    assert recipe_file.digest(Recipe(optim=recipe)) == recipe_file.digest(Recipe(optim=alike))
    optimizer = parameter_groups.build_optimizer(alike, nn.Linear(2, 2))
    assert type(optimizer).__name__ == TABLE[name].torch_name
    assert {key: optimizer.defaults[key] for key in TABLE[name].keys} == {key: getattr(recipe, key) for key in TABLE[name].keys}
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.1), (0.02, 0.0)]


def test_settings_reach_torch_and_what_it_refuses_is_said() -> None:
    optimizer = parameter_groups.build_optimizer(recipe_of("rmsprop centered"), nn.Linear(2, 2))
    assert optimizer.defaults.items() >= {"centered": True, "momentum": 0.9, "alpha": 0.9}.items()
    with pytest.raises(RecipeError, match=r"torch's RMSprop refuses the settings of optim: Invalid alpha value: -1\.0"):
        parameter_groups.build_optimizer(OptimRecipe(name="rmsprop", settings={"alpha": -1}), nn.Linear(2, 2))


def test_a_key_that_the_optimizer_does_not_take_is_noted() -> None:
    length = schedule.Length(steps_per_epoch=10, total_steps=20)
    (note,) = schedule.notes_on(OptimRecipe(name="adam", momentum=0.8), length)
    assert note == "optim.momentum is 0.8, and adam does not take it"
    for name in TABLE:
        assert schedule.notes_on(OptimRecipe(name=name), length) == []


def groups(values: dict[str, dict[str, float]], **keys: Any) -> list[tuple[set[str], float, float]]:
    """Which parameters are in each group, with its learning rate in a step of 0.5, and its weight decay."""
    model = Net()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = parameter_groups.build_optimizer(OptimRecipe(lr=0.1, groups=values, **keys), model)
    parameter_groups.set_learning_rate(optimizer, 0.5)
    return [
        ({names[id(parameter)] for parameter in group["params"]}, group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]


def test_groups_have_their_rates_and_their_weight_decay() -> None:
    assert groups({"head.*": {"lr_factor": 10, "weight_decay": 0.5}, "conv.*": {"lr_factor": 0}}, weight_decay=0.2) == [
        ({"norm.weight", "norm.bias"}, 0.5, 0.0),
        ({"conv.weight"}, 0.0, 0.2),
        ({"conv.bias"}, 0.0, 0.0),
        ({"head.weight", "head.bias"}, 5.0, 0.5),
    ]
    first = groups({"conv.bias": {"lr_factor": 2}, "conv.*": {"lr_factor": 3}, "*.bias": {"weight_decay": 0.1}})
    assert ({"conv.bias"}, 1.0, 0.0) in first
    assert ({"conv.weight"}, 1.5, 0.0) in first
    assert ({"norm.bias", "head.bias"}, 0.5, 0.1) in first


def test_groups_of_nothing_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"optim.groups has haed.\*, which .*: did you mean head.\*\?"):
        groups({"haed.*": {"lr_factor": 2}})
    with pytest.raises(RecipeError, match=r"optim.groups has \*.bias, which matches no parameter that earlier groups do not"):
        groups({"*": {"lr_factor": 2}, "*.bias": {"weight_decay": 0}})


def test_the_documentation_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "optimizers.md").read_text()
    for name, optimizer in TABLE.items():
        taken = ", ".join([*(f"`optim.{key}`" for key in optimizer.keys), *(f"`{key}`" for key in optimizer.settings)])
        where = "whole parameters only" if optimizer.whole_because else "every preset"
        assert f"| `{name}` | {taken} | {where} |" in page


@pytest.mark.parametrize(
    ("name", "side", "added"),
    [
        ("convnet", 8, ()),
        ("vit_b_16", 32, ("class_token", "pos_embedding")),
        ("convnext_tiny", 64, ("layer_scale",)),
        ("swin_t", 64, ("relative_position_bias_table",)),
    ],
)
def test_norms_biases_and_what_only_looks_like_a_matrix_do_not_decay(name, side, added):
    with torch.device("meta"):
        model = models.build(ModelRecipe(name=name), channels=3, image_size=(side, side), num_classes=7)
        decays = parameter_groups.Rule.of(OptimRecipe(weight_decay=0.1), model).weight_decays
    norms = (nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm)
    of_norms = {id(parameter) for module in model.modules() if isinstance(module, norms) for parameter in module.parameters()}
    parameters = dict(model.named_parameters())
    alike = {key for key in parameters if key.endswith(added)}
    assert of_norms
    assert {ending for ending in added for key in alike if key.endswith(ending)} == {*added}
    assert decays == {
        key: 0.0 if id(parameter) in of_norms or key.endswith("bias") or key in alike else 0.1
        for key, parameter in parameters.items()
    }
