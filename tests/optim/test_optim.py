"""Parameter groups of the optimizer, against those that the papers ask for."""

import pytest
import torch
from torch import nn

from app.optim import parameter_groups
from app.recipe.schema import OptimRecipe
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe


def undecayed(model: nn.Module) -> set[str]:
    optimizer = parameter_groups.build_optimizer(OptimRecipe(weight_decay=0.1), model)
    groups = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(groups.values()) == {0.1, 0.0}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    return {name for name, parameter in model.named_parameters() if groups[id(parameter)] == 0.0}


@pytest.mark.parametrize(
    ("name", "side", "added"),
    [
        ("convnet", 8, ()),
        ("resnet18", 32, ()),
        ("vit_b_16", 32, ("class_token", "pos_embedding")),
        ("convnext_tiny", 64, ("layer_scale",)),
        ("swin_t", 64, ("relative_position_bias_table",)),
        ("swin_v2_t", 64, ("logit_scale",)),
    ],
)
def test_norms_biases_and_what_only_looks_like_a_matrix_do_not_decay(name, side, added):
    with torch.device("meta"):
        model = models.build(ModelRecipe(name=name), channels=3, image_size=(side, side), num_classes=7)
        found = undecayed(model)
    norms = (nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm)
    of_norms = {
        f"{layer}.{leaf}"
        for layer, module in model.named_modules()
        if isinstance(module, norms)
        for leaf, _ in module.named_parameters(recurse=False)
    }
    parameters = dict(model.named_parameters())
    alike = {key for key in parameters if key.endswith(added)}
    assert of_norms
    assert {ending for ending in added for key in alike if key.endswith(ending)} == {*added}
    assert all(parameters[key].ndim >= 2 for key in alike)
    assert found == of_norms | {key for key in parameters if key.endswith("bias")} | alike
    assert all(parameters[key].ndim >= 2 for key in parameters.keys() - found)


def test_fused_where_supported_and_off_when_asked_and_without_frozen_weights():
    model = models.build(ModelRecipe(), channels=1, image_size=(8, 8), num_classes=10)
    model.conv1.requires_grad_(requires_grad=False)
    optimizer = parameter_groups.build_optimizer(OptimRecipe(name="adamw"), model)
    assert optimizer.defaults["fused"] is True
    assert parameter_groups.build_optimizer(OptimRecipe(name="adamw"), model, fused=False).defaults["fused"] is False
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(parameter) for name, parameter in model.named_parameters() if not name.startswith("conv1.")}
