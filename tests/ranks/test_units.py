"""What FSDP2 gathers together: the layers that a model names, large parts elsewhere, and never what torch cannot shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, get_module_children_bottom_up
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from processes import SCRIPTS, read, run
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torchvision.models import get_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from app.errors import PresetError
from app.ranks import units

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BY_SIZE: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000}
BY_CLASS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.mlp(self.attention(x, x, x, need_weights=False)[0])
        return y


class Language(nn.Module):
    """As people write them: blocks in a list in a dict, and a head with the weights of the embeddings."""

    def __init__(self, *, names: object = None) -> None:
        super().__init__()
        self._no_split_modules = names
        self.parts = nn.ModuleDict({"embedding": nn.Embedding(100, 16), "blocks": nn.ModuleList([Block(), Block()])})
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.parts["embedding"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.parts["embedding"](tokens)
        for block in self.parts["blocks"]:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


class Inside(nn.Module):
    """A module of one's own around somebody else's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> object:
        return self.inner(x)


class Lists(nn.Module):
    """Weights in lists that nobody calls, beside attention, whose own are not to be sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(40, 40)])
        self.linears = nn.ModuleList([nn.Linear(40, 40)])
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def bert(kind: type[nn.Module] = BertForSequenceClassification) -> nn.Module:
    return kind(BertConfig(vocab_size=100, **SMALL))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(image_size=32, **SMALL))


def cut(model: nn.Module, **settings: Any) -> set[str]:
    """The classes of the parts that Accelerate would shard, but for those that it does by itself."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    units.choose(plugin, model)
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    parts = get_module_children_bottom_up(model)[:-1]
    return {type(part).__name__ for part in parts if is_unit is not None and is_unit(part)}


@pytest.mark.parametrize("settings", [BY_SIZE, BY_SIZE | {"min_num_params": 0}, BY_CLASS], ids=["size", "any size", "class"])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (bert, {"BertLayer"}),  # Accelerate itself makes a unit of the embeddings of the root, so what holds them is none
        (vit, {"ViTLayer"}),
        (lambda: Inside(bert()), {"BertEmbeddings", "BertLayer"}),
        (lambda: Inside(bert(BertForMaskedLM)), {"BertLayer"}),  # the head has the weights of the embeddings
        (lambda: Language(names=["Block"]), {"Block"}),
        (lambda: Language(names={"Block", "NotHere"}), {"Block"}),
    ],
)
def test_layers_that_the_model_names_are_units(
    build: Callable[[], nn.Module], expected: set[str], settings: dict[str, Any]
) -> None:
    assert cut(build(), **settings) == expected


@pytest.mark.parametrize("names", [None, [], ["NotHere"]])
def test_without_names_the_layers_of_a_large_list_are(names: object) -> None:
    """What in them is large is as well, but neither the tied embeddings nor the weights that attention hands on."""
    assert cut(Language(names=names), **BY_SIZE) == {"Block", "MultiheadAttention", "Sequential"}
    assert cut(Language(names=names), **BY_SIZE | {"min_num_params": 4000}) == {"Block"}
    assert cut(Language(names=names), **BY_SIZE | {"min_num_params": 10**6}) == set()


def test_what_cannot_be_a_unit_is_left_to_the_whole() -> None:
    assert cut(Lists(), **BY_SIZE) == {"MultiheadAttention"}
    assert cut(Lists(), **BY_SIZE | {"min_num_params": 1500}) == set()


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16", "swin_b", "convnext_base"])
def test_size_decides_as_accelerate_has_it_where_it_can(name: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **BY_SIZE | {"min_num_params": 4_000_000})
    with torch.device("meta"):
        units.choose(plugin, get_model(name))
    assert plugin.auto_wrap_policy is size_based_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap is None


def test_a_network_with_a_list_of_blocks_can_be_cut() -> None:
    with torch.device("meta"):
        assert cut(get_model("maxvit_t", input_size=(224, 224)), **BY_SIZE | {"min_num_params": 4_000_000}) == {"MaxVitBlock"}


def test_one_unit_stays_one() -> None:
    assert cut(bert(), auto_wrap_policy="no_wrap") == set()


def test_layers_that_the_preset_names_come_first() -> None:
    assert cut(Language(names=["Block"]), **BY_CLASS, transformer_cls_names_to_wrap=["MultiheadAttention"]) == {
        "MultiheadAttention"
    }


@pytest.mark.parametrize(
    ("build", "settings", "sentence"),
    [
        (
            Language,
            BY_CLASS | {"transformer_cls_names_to_wrap": ["Blok"]},
            "fsdp_transformer_layer_cls_to_wrap is Blok, and the Language has no Blok: name one of Block, Embedding, Linear, "
            "ModuleDict, ModuleList, MultiheadAttention, NonDynamicallyQuantizableLinear, Sequential.",
        ),
        (
            bert,
            BY_CLASS | {"transformer_cls_names_to_wrap": ["BertLayer", "BertEmbeddings"]},
            "has a BertEmbeddings that cannot be a unit",
        ),
        (Language, BY_CLASS, "nor the model names a layer: name one of Block, Embedding"),
        (
            lambda: bert(BertForMaskedLM),
            BY_SIZE,
            "BertForMaskedLM, whose weights other parts of it use as well: put it into",
        ),
        (lambda: ResNetForImageClassification(ResNetConfig()), BY_SIZE, "ResNetForImageClassification, which it does not say"),
    ],
)
def test_refused(build: Callable[[], nn.Module], settings: dict[str, Any], sentence: str) -> None:
    with torch.device("meta"), pytest.raises(PresetError, match=re.escape(sentence)):
        cut(build(), **settings)


@pytest.mark.multiproc
def test_an_encoder_of_30_million_weights_takes_the_same_steps_in_shards(tmp_path: Path) -> None:
    """By size alone Accelerate would shard its list of layers, and transformers would build it otherwise under ZeRO-3.

    The norms are torch's, which adds up squares in float32 on a CPU: of one process's gradients, with 12 million weights in a
    tensor, it is 2.3e-6 less than in float64, of their halves 1.0e-6. The losses are means of few values, and the clipped steps
    have the error of the norm: 3e-7 of the second one.
    """
    found = {}
    for preset, processes, layers in (
        ("cpu", 1, "named"),
        ("fsdp2", 2, "named"),
        ("fsdp2", 2, "unnamed"),
        ("deepspeed_zero3", 2, "named"),
    ):
        out = tmp_path / f"{preset}-{layers}.json"
        run(preset, processes, str(SCRIPTS / "encoder.py"), str(out), layers).check()
        found[preset, layers] = read(out)
    whole = found["cpu", "named"]
    assert whole["weights"] == pytest.approx(30e6, rel=0.02)
    assert whole["losses"][1] < 0.9 * whole["losses"][0]
    for case, one in found.items():
        assert one["digest"] == whole["digest"], case
        assert one["losses"] == pytest.approx(whole["losses"], rel=1e-6), case
        assert one["norms"] == pytest.approx(whole["norms"], rel=5e-6), case
    for layers in ("named", "unnamed"):
        assert found["fsdp2", layers]["units"]["FSDPBertLayer"] == 10
