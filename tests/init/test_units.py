"""Initial weights that are drawn unit by unit: all of them, each from its name alone, and what the model ties stays tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drawn_models import Drawn, llama, loss
from torch import nn

from app.errors import RecipeError
from app.init import filling
from app.task import Task


def whole(build: Any, seed: int = 0) -> nn.Module:
    return filling.whole_model(Drawn(build), {}, seed=seed)


def test_a_unit_is_drawn_from_the_seed_and_its_name_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    shallow, deep, other = whole(lambda: llama(num_hidden_layers=2)), whole(llama), whole(llama, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    weights = deep.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in shallow.state_dict().items())
    layers = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)]
    assert len({weights[name].sum().item() for name in layers}) == 3
    assert not torch.equal(other.state_dict()[layers[0]], weights[layers[0]])
    assert all(0.015 < weights[name].std() < 0.025 for name in (*layers, "lm_head.weight"))  # the config's 0.02


def test_buffers_that_no_file_has_are_filled() -> None:
    """Rotary frequencies are lost where a model is built without memory: it would train on, without knowing any order."""
    drawn, plain = whole(llama), llama()
    buffers = dict(plain.named_buffers())
    assert {name.rpartition(".")[2] for name in buffers} >= {"inv_freq"}
    for name, buffer in drawn.named_buffers():
        assert torch.equal(buffer, buffers[name])
    plain.load_state_dict(drawn.state_dict())
    tokens = torch.arange(16)[None] % 7
    assert torch.equal(loss(drawn, tokens), loss(plain, tokens))


class Parts(nn.Module):
    """Parameters of its own beside blocks, one of them in two places; a mask that has no mark; a buffer on a named device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.blocks[0][0].weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("place", torch.arange(3, device="cpu"), persistent=False)


class OfParts(Task):
    blocks = ("Sequential",)

    def __init__(self, forgets: str = "", holds: str = "") -> None:
        self.forgets, self.holds, self.units = forgets, holds, list[str]()

    def model(self, _facts: Any) -> nn.Module:
        model = Parts()
        if self.holds == "plain":
            model.head.plain = torch.zeros(3)  # type: ignore[assignment]
        if self.holds == "real":
            model.head.bias = nn.Parameter(torch.zeros(3, device="cpu"))
        return model

    def init_module(self, _model: nn.Module, name: str, unit: nn.Module) -> None:
        self.units.append(name)
        values = {"mask": torch.tensor([True, False, True]), "place": torch.arange(3)}
        for key, tensor in (*unit.named_parameters(), *unit.named_buffers()):
            if tensor.is_meta or self.forgets == (f"{name}.{key}" if name else key):
                continue
            tensor.copy_(values.get(key, torch.rand(())))


def test_units_are_blocks_and_remaining_modules() -> None:
    task = OfParts()
    model: Any = filling.whole_model(task, {})
    assert [*dict.fromkeys(task.units)] == ["", "blocks.0", "blocks.1", "head"]
    assert model.head.weight is model.blocks[0][0].weight
    assert model.mask.tolist() == [True, False, True]
    assert model.place.tolist() == [0, 1, 2]
    assert set(model.state_dict()) == set(Parts().state_dict())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("name", ["scale", "blocks.1.0.bias", "head.bias", "mask", "place"])
def test_what_a_task_forgets_is_named(name: str) -> None:
    with pytest.raises(RecipeError, match=f"`init_module` has not filled {name}, of the (unit|model)"):
        filling.whole_model(OfParts(forgets=name), {})


def test_what_is_out_of_reach_is_named() -> None:
    with pytest.raises(RecipeError, match=r"head\.plain of the model has no values: .* register_buffer"):
        filling.whole_model(OfParts(holds="plain"), {})
    with pytest.raises(RecipeError, match=r"without memory, but .*head\.bias has memory"):
        filling.whole_model(OfParts(holds="real"), {})
