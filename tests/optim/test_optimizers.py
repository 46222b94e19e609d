"""Optimizers by name, held against torch: what each takes, and where it may step; and parameters that are not trained."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from app.errors import PresetError, RecipeError
from app.optim import parameter_groups, schedule
from app.planning import tracing
from app.recipe import optimizers, recipe_file
from app.recipe.optimizers import TABLE
from app.recipe.schema import OptimRecipe, Recipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe
from launch import preset
from launch.start.launch import launch


@pytest.mark.parametrize("name", [name for name in TABLE if name != "muon"])  # tests/optim/test_muon.py
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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.LayerNorm(4), nn.Linear(4, 1)


def test_who_needs_whole_parameters_is_refused_where_they_are_cut() -> None:
    cut = {name for name in preset.names() if optimizers.refusal("adafactor", preset.load(name).strategy)}
    assert set(preset.names()) - cut == set(optimizers.WHOLE_PRESETS)
    of_muon = {name for name in preset.names() if optimizers.refusal("muon", preset.load(name).strategy)}
    assert of_muon == {name for name in preset.names() if name.startswith("deepspeed")}
    assert not any(optimizers.refusal("nadam", preset.load(name).strategy) for name in preset.names())
    command = ["--preset", "fsdp2", "--processes", "2", "--dry-run", "optim.name=torch.optim.Adafactor"]
    with pytest.raises(PresetError, match=r"optim.name is adafactor, .*shards them: use cpu, single_gpu, .* or an optimizer"):
        launch(command, {}, say=lambda _: None)
    command = ["--preset", "tensor_parallel", "--processes", "2", "--dry-run", "optim.name=muon"]
    with pytest.raises(PresetError, match=r"is muon, .* but the preset's tensor parallelism shards them: use cpu, .* or hsdp,"):
        launch(command, {}, say=lambda _: None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.name=adamx"], "did you mean adamax or adam or radam? expected an optimizer of torch, one of sgd"),
        (["optim.name=torch.optim.Rprop"], "optim.name is 'torch.optim.Rprop': did you mean rmsprop? expected an optimizer"),
        (["optim.settings={alpha: 0.9}"], "optim.settings has alpha: 0.9: adamw has no such setting; it has amsgrad"),
        (["optim.settings={eps: 1}"], "optim.settings has eps: 1.0: give it as optim.eps"),
        (["optim.name=rmsprop", "optim.settings={alpha: much}"], 'optim.settings has alpha: "much": it must be a number'),
        (["optim.name=muon", "optim.settings={adjust_lr_fn: spectral}"], '"spectral": it must be match_rms_adamw or original'),
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
    optimizer = parameter_groups.build_optimizer(alike, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(optimizer).__name__ == TABLE[name].torch_name
    assert {key: optimizer.defaults[key] for key in TABLE[name].keys} == {key: getattr(recipe, key) for key in TABLE[name].keys}
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(0.02, 0.1), (0.02, 0.0)}


def test_settings_reach_torch_and_what_it_refuses_is_said() -> None:
    settings = {"centered": True, "momentum": 0.9, "alpha": 0.9}
    optimizer = parameter_groups.build_optimizer(OptimRecipe(name="rmsprop", settings=settings), nn.Linear(2, 2))
    assert optimizer.defaults.items() >= settings.items()
    with pytest.raises(RecipeError, match=r"torch's RMSprop refuses the settings of optim: Invalid alpha value: -1\.0"):
        parameter_groups.build_optimizer(OptimRecipe(name="rmsprop", settings={"alpha": -1}), nn.Linear(2, 2))
    for setting, value in (("ns_steps", 2.5), ("momentum", 1.0)):
        with pytest.raises(RecipeError, match=f"Invalid {setting} value: {value}"):
            parameter_groups.build_optimizer(OptimRecipe(name="muon", settings={setting: value}), nn.Linear(2, 2))


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


class Layer(nn.Sequential): ...


class Layered(nn.Module):
    """Two stages of two layers with a projection between them, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        layers = [Layer(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4)]
        self.stem, self.first, self.between = nn.Linear(4, 4), nn.Sequential(*layers[:2]), nn.Linear(4, 4)
        self.second, self.head = nn.Sequential(*layers[2:]), nn.Linear(4, 1)


def timm_factor(layer: int, blocks: int, decay: float) -> float:
    """timm's param_groups_layer_decay: scales of decay ** (layer_max - i), where the layers are stem, blocks and head."""
    layer_max = blocks + 1
    return [decay ** (layer_max - i) for i in range(layer_max + 1)][layer]


def layer_factors(model: nn.Module, blocks: Any, **keys: Any) -> dict[str, float]:
    return dict(parameter_groups.Rule.of(OptimRecipe(layer_decay=0.75, **keys), model, blocks).lr_factors)


def test_rates_decay_by_layers_as_in_timm_and_by_groups() -> None:
    layers = {"token": 0, "stem": 0, "first.0": 1, "first.1": 2, "between": 2, "second.0": 3, "second.1": 4, "head": 5}
    for groups in ({}, {"head.*": {"lr_factor": 10.0}, "first.*": {"weight_decay": 0.5}, "stem.*": {"lr_factor": 0.5}}):
        found = layer_factors(Layered(), {"Layer", "Other"}, groups=groups)
        assert len(found) == 1 + 3 * 2 + 4 * 4
        for name, factor in found.items():
            layer = next(layer for prefix, layer in layers.items() if name.startswith(prefix))
            own = groups.get(f"{name.split('.')[0]}.*", {}).get("lr_factor", 1.0)
            assert factor == pytest.approx(own * timm_factor(layer, 4, 0.75), rel=1e-12), name
    with pytest.raises(RecipeError, match=r"layer_decay is 0.75, but the model, a Net, names no blocks: leave it out, or give"):
        layer_factors(Net(), {"Layer"})


@pytest.mark.parametrize(("architecture", "first", "last"), [
    ("llama", "model.embed_tokens.weight", {"model.norm.weight", "lm_head.weight"}),
    ("gpt2", "transformer.wte.weight", {"transformer.ln_f.weight", "transformer.ln_f.bias"}),  # its head is tied
])  # fmt: skip
def test_the_blocks_of_a_language_model_are_its_layers(architecture: str, first: str, last: set[str]) -> None:
    tied = str(architecture == "gpt2").lower()
    words = [f"model.architecture={architecture}", "model.layers=3", f"model.tie_embeddings={tied}", "optim.layer_decay=0.75"]
    recipe = recipe_file.load("lm_tiny", words).recipe
    blueprint = tracing.build_blueprint(recipe)
    rule = parameter_groups.Rule.of(recipe.optim, blueprint.model, blueprint.classes)
    assert rule.lr_factors[first] == pytest.approx(0.75**4, rel=1e-12)
    assert {name for name, factor in rule.lr_factors.items() if factor == 1} == last
    assert sorted({round(factor, 12) for factor in rule.lr_factors.values()}) == [round(0.75**it, 12) for it in (4, 3, 2, 1, 0)]
    assert f"the learning rate is multiplied by 0.316 for {first}" in parameter_groups.notes_on(recipe.optim, rule)[0]


@pytest.mark.parametrize(("name", "count"), [("vit_b_16", 12), ("swin_t", 12), ("swin_v2_t", 12), ("convnext_tiny", 18)])
def test_the_blocks_of_torchvisions_networks(name: str, count: int) -> None:
    with torch.device("meta"):
        model = models.build(ModelRecipe(name=name), channels=3, image_size=(64, 64), num_classes=7)
        factors = layer_factors(model, {models.block_class(name)})
    assert {round(factor, 12) for factor in factors.values()} == {round(0.75**it, 12) for it in range(count + 2)}
    assert [round(factors[key], 12) for key in (next(iter(factors)), [*factors][-1])] == [round(0.75 ** (count + 1), 12), 1]


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
    assert of_norms
    assert all(any(key.endswith(ending) for key in decays) for ending in added)
    for key, parameter in model.named_parameters():
        assert decays[key] == (0.0 if id(parameter) in of_norms or key.endswith(("bias", *added)) else 0.1), key


# Parameters that are not trained ----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """[B, 10] to [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Dropout(0.5))
        self.middle, self.norm, self.head = nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(self.middle(self.encoder(inputs))))
        return output


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_patterns_freeze_what_they_match_and_norms_keep_their_statistics() -> None:
    model = Stack()
    parameter_groups.freeze(model, ["encoder.*", "norm.weight", "?iddle.bias"])
    assert trained(model) == ["middle.weight", "norm.bias", "head.weight", "head.bias"]
    parameter_groups.set_training(model, mode=False)
    parameter_groups.set_training(model, mode=True)
    assert [name for name, layer in model.named_modules() if not layer.training] == ["encoder.1"]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(8, 10) + 3)
    changed = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["encoder.*", "encodr.*"], "has 'encodr.*', which matches no parameter: did you mean encoder.* or encoder.1.*"),
        (["*"], "all 10 parameters of the model, a Stack, are frozen (train.freeze is *), so there is nothing to train"),
    ],
)
def test_what_matches_nothing_or_everything_is_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        parameter_groups.freeze(Stack(), patterns)
