"""Dropout that belongs to the sample: its masks, whatever else is in the pass, and what cannot have them."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from app.distributed import sample_dropout
from app.distributed.sample_dropout import PassDraws, SampleDropout, give_to_samples
from app.errors import RecipeError, TrainingError
from app.recipe.schema import BatchPlan

SEED = 5
ALONE, SEVERAL = (BatchPlan(global_batch_size=8, data_ranks=count, accumulation=1) for count in (1, 2))


def kept(layers: nn.Module, draws: PassDraws, samples: list[int], shape: tuple[int, ...], dtype: Any = torch.float32) -> Tensor:
    """Which elements of ones [len(samples), *shape] a pass lets through."""
    draws.begin(torch.tensor(samples))
    output: Tensor = layers(torch.ones(len(samples), *shape, dtype=dtype))
    return output != 0


def one(layer: nn.Module, seed: int = SEED) -> tuple[nn.Module, PassDraws]:
    model = nn.Sequential(layer)
    return model, give_to_samples(model, seed)


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent masks have."""
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]) * math.sqrt(a.numel())


def test_a_sample_loses_the_same_in_any_batch_and_pass() -> None:
    model, draws = one(nn.Dropout(0.3))
    whole = kept(model, draws, [3, 70, 9, 1_000_003], (50, 7))
    assert torch.equal(kept(model, draws, [9], (50, 7))[0], whole[2])
    assert torch.equal(kept(model, draws, [1_000_003, 3], (50, 7)), whole[[3, 0]])
    # Longer sequences go on where shorter ones end, so places of padding change nothing.
    assert torch.equal(kept(model, draws, [3], (80, 7))[0, :50], whole[0])
    other, of_other = one(nn.Dropout(0.3))
    assert torch.equal(kept(other, of_other, [70], (50, 7))[0], whole[1])
    assert not torch.equal(kept(*one(nn.Dropout(0.3), seed=6), [70], (50, 7))[0], whole[1])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.9])
def test_the_rate_is_right_and_masks_are_independent(p: float) -> None:
    """Over samples, epochs, layers, calls, places and neighbouring places; 5 standard deviations of a million and more."""
    model = nn.Sequential(nn.Dropout(p), nn.Identity(), nn.Dropout(p))
    draws = give_to_samples(model, SEED)
    samples = [0, 1, 2, 3, 60_000, 60_001, 120_000, 7_000_000]
    draws.begin(torch.tensor(samples))
    ones = torch.ones(8, 400, 625)
    masks = [layer(ones) != 0 for layer in (model[0], model[2], model[2])]
    for mask in masks:
        for part in (*mask, mask):
            assert abs(float(part.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / part.numel())
    for a, b in itertools.combinations([*masks[0], masks[1][0], masks[2][0]], 2):
        assert abs(correlation(a, b)) < 5
    rows = masks[0]
    assert abs(correlation(rows[:, :, 1:], rows[:, :, :-1])) < 5
    assert abs(correlation(rows[:, 1:], rows[:, :-1])) < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_torch_in_each_precision(dtype: torch.dtype) -> None:
    order = torch.channels_last
    model, draws = one(nn.Dropout(0.1))
    mask = kept(model, draws, [4, 2], (3, 8, 8))
    x = torch.randn(2, 3, 8, 8, dtype=dtype).to(memory_format=order).requires_grad_()
    x.data[0, 0, 0, 0] = torch.inf if not mask[0, 0, 0, 0] else 1.0
    draws.begin(torch.tensor([4, 2]))
    output = model(x)
    output.backward(torch.ones_like(output))
    # One rounding: the scale itself, 1.111 in bf16, would be off by 0.16 %.
    expected = torch.where(mask, (x.detach().double() / 0.9), 0.0)
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert output.dtype == dtype
    assert output.is_contiguous(memory_format=order)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), mask.double() / 0.9, rtol=torch.finfo(dtype).eps, atol=0)


def test_whole_channels_and_samples_are_lost() -> None:
    channels = kept(*one(nn.Dropout2d(0.5)), list(range(64)), (32, 4, 4))
    assert torch.equal(channels, channels[:, :, :1, :1].expand_as(channels))
    assert 0.45 < float(channels[:, :, 0, 0].double().mean()) < 0.55
    rows = kept(*one(torchvision.ops.StochasticDepth(0.5, "row")), list(range(2000)), (3, 2))
    assert torch.equal(rows, rows[:, :1, :1].expand_as(rows))
    assert 0.45 < float(rows[:, 0, 0].double().mean()) < 0.55


def test_evaluation_and_passes_without_samples_are_torchs() -> None:
    model, draws = one(nn.Dropout(0.5))
    ones = torch.ones(4, 100)
    torch.manual_seed(1)
    drawn = model(ones)
    torch.manual_seed(1)
    assert torch.equal(drawn, F.dropout(ones, 0.5))
    draws.begin(torch.arange(4))
    assert torch.equal(model.eval()(ones), ones)
    model.train()
    assert torch.equal(copy.deepcopy(model)(ones), model(ones)), "a copy is told by the same feed"
    draws.end()
    torch.manual_seed(1)
    assert torch.equal(model(ones), drawn)
    always, draws = one(nn.Dropout(1.0))
    assert not kept(always, draws, [1], (9,)).any()


class Twice(nn.Module):
    """Calls one dropout layer twice, in parts that are computed again one by one."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.reentrant = nn.Linear(16, 16), nn.Dropout(0.4), reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        # As Accelerate's plugin for FSDP2 does it: torch's generators are not put back.
        options: dict[str, Any] = {"use_reentrant": self.reentrant, "preserve_rng_state": False}
        return checkpoint(self.part, checkpoint(self.part, x, **options), **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_cannot_be_told_apart_are_refused(reentrant: bool) -> None:
    model = Twice(reentrant=reentrant)
    give_to_samples(model, SEED).begin(torch.arange(6))
    with pytest.raises(TrainingError, match=r"dropout is called 2 times in a forward pass.*a separate layer for each call"):
        model(torch.randn(6, 16, requires_grad=True)).square().mean().backward()


class Windows(nn.Module):
    """Takes images apart into windows [B*4, ...], as Swin does, or has the samples in the second dimension."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout, self.dropout = layout, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:  # [B, 8, 3]
        if self.layout == "windows":
            return self.dropout(x.reshape(-1, 2, 3)).reshape(x.shape)
        if self.layout == "second":
            return self.dropout(x.transpose(0, 1)).transpose(0, 1)
        return self.dropout(x.sum(0, keepdim=True)) + x


def looked_at(layout: str) -> tuple[Windows, PassDraws]:
    model = Windows(layout)
    draws = give_to_samples(model, SEED)
    example = {"x": torch.ones(2, 8, 3, device="meta"), "samples": torch.zeros(2, device="meta")}
    draws.look(lambda times: model(sample_dropout.repeated(example, times)["x"]))
    return model, draws


def test_windows_of_a_sample_are_places_in_it() -> None:
    model, draws = looked_at("windows")
    assert not draws.left
    whole = kept(model, draws, [8, 3, 5], (8, 3))
    assert torch.equal(kept(model, draws, [5], (8, 3))[0], whole[2])
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 3


@pytest.mark.parametrize("layout", ["second", "sum"])
def test_other_layouts_are_drawn_by_torch_and_refused_where_that_matters(layout: str) -> None:
    size = 4  # of 8 rows, the samples would seem to be 4 without a look
    model, draws = looked_at(layout)
    draws.refuse_others(ALONE)
    with pytest.raises(RecipeError, match=r"\(dropout: the first dimension of its input, \d, is not that of the samples"):
        draws.refuse_others(SEVERAL)
    draws.begin(torch.arange(size))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model(torch.ones(size, 8, 3))
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_was_not_called_or_has_other_inputs_later_is_refused_where_that_matters() -> None:
    for rows, why in ((8, "it was not called when"), (7, "the first dimension of its input [7, 2, 3] is not 2, the number of")):
        model, draws = looked_at("windows")
        if rows == 8:
            draws.compare({}, [])
        draws.begin(torch.arange(2))
        draws.refuse_others(ALONE)
        model.dropout(torch.ones(rows, 2, 3))
        assert draws.left["dropout"].startswith(why)
        draws.left.clear()
        draws.refuse_others(SEVERAL)
        with pytest.raises(RecipeError, match="random numbers that do not belong to samples"):
            model.dropout(torch.ones(rows, 2, 3))


class DropPath(nn.Module):
    """As timm and transformers have it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


def test_names_places_and_what_is_left() -> None:
    shared = nn.Dropout(0.1)
    model = nn.Sequential(
        nn.Linear(3, 3), shared, nn.Sequential(shared, DropPath(0.2)), nn.MultiheadAttention(3, 1, dropout=0.1)
    )
    model.append(torchvision.ops.StochasticDepth(0.1, "batch")).append(nn.MultiheadAttention(3, 1))
    names = [list(model.state_dict()), [name for name, _ in model.named_modules()]]
    model[2].eval()
    draws = give_to_samples(model, SEED)
    assert [list(model.state_dict()), [name for name, _ in model.named_modules()]] == names
    assert [(layer.name, layer.p, layer.training) for layer in draws.layers] == [("1", 0.1, False), ("2.1", 0.2, False)]
    assert model[1] is model[2][0]
    assert isinstance(model[2][1], SampleDropout)
    assert list(draws.left) == ["3", "4"]
    with pytest.raises(RecipeError, match=r"3: it draws .* 4: .*2 processes\)\. Set the dropout of attention to 0"):
        draws.refuse_others(SEVERAL)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout2d(0.3), torchvision.ops.StochasticDepth(0.3, "row")])
def test_compiled_code_drops_the_same(layer: nn.Module) -> None:
    """Also of a copy, and of an input that a layer drops twice; two layers of a kind share their code."""
    model, torch_layer = nn.Sequential(layer, nn.Tanh(), copy.deepcopy(layer)), copy.deepcopy(layer)
    draws = give_to_samples(model, SEED)
    x = torch.rand(6, 3, 4, 4) + 1

    def passes(call: Any) -> list[Tensor]:
        draws.begin(torch.arange(6))
        return [call(each, x.clone().requires_grad_()) for each in (model[0], model[2], copy.deepcopy(model[2]))]

    def twice(each: nn.Module, value: Tensor) -> Tensor:
        output = each(value) + 10 * each(value)
        (gradient,) = torch.autograd.grad(output.sum(), value)
        return torch.stack([output.detach(), gradient])

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda each, value: each(value) + 10 * each(value), backend="aot_eager", fullgraph=True)

    def compiled_twice(each: nn.Module, value: Tensor) -> Tensor:
        output = compiled(each, value)
        (gradient,) = torch.autograd.grad(output.sum(), value)
        return torch.stack([output.detach(), gradient])

    torch.testing.assert_close(passes(compiled_twice), passes(twice))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    draws.end()
    torch.manual_seed(1)
    drawn = compiled(model[0], x)
    torch.manual_seed(1)
    torch.testing.assert_close(drawn, torch_layer(x) + 10 * torch_layer(x))


def test_a_call_that_compiled_code_recomputes_must_be_the_only_one() -> None:
    model, draws = one(nn.Dropout(0.3))
    x = torch.rand(6, 4, requires_grad=True)
    once = torch.compile(lambda value: model(value.tanh()).sin(), backend="aot_eager")
    draws.begin(torch.arange(6))
    mask = once(x) == 0
    draws.begin(torch.arange(6))
    (gradient,) = torch.autograd.grad(checkpoint(once, x, use_reentrant=False).sum(), x)
    assert torch.equal(gradient == 0, mask)
    draws.begin(torch.arange(6))
    found = checkpoint(once, checkpoint(once, x, use_reentrant=False), use_reentrant=False)
    with pytest.raises(TrainingError, match=r"the dropout layer 0 is called 2 times .* recomputes it in compiled code"):
        found.sum().backward()
