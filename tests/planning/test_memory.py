"""What a plan says of memory, compared with torch's own tracker, with whole models, and with torch's optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.integrations import moe

from app.environment.launched import Sharding
from app.planning import memory, tracing
from app.planning.memory import Case, peak
from app.planning.tracing import LATER, PassOptions
from app.recipe import recipe_file
from app.recipe.optimizers import TABLE
from app.recipe.schema import OptimRecipe
from app.task import Form

EXPERTS = (
    "model.architecture=qwen3_moe",
    "model.settings={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 48}",
    "model.balance_loss=0.1",
)
DEEP = recipe_file.load("lm_tiny", ["model.layers=9"]).recipe


@pytest.fixture(scope="module")
def deep() -> tracing.Blueprint:
    return tracing.build_blueprint(DEEP)


@pytest.mark.parametrize(
    "how", [PassOptions(3), PassOptions(3, "bf16", recomputes=True), PassOptions(3, keeps_gradients=False, shards=4)]
)
def test_shallow_models_tell_of_a_deep_one_to_the_byte(deep: tracing.Blueprint, how: PassOptions) -> None:
    whole, extended = tracing.traced(deep, how), tracing.peaks(deep, how)
    assert max(map(sum, extended.values())) == max(map(sum, whole.values()))


@pytest.mark.parametrize(
    "how", [PassOptions(6, shards=4), pytest.param(PassOptions(6, "bf16", recomputes=True, shards=32), marks=pytest.mark.slow)]
)
def test_two_sizes_determine_all_others(deep: tracing.Blueprint, how: PassOptions) -> None:
    whole, line = tracing.traced(deep, how), memory.interpolate(DEEP, 1, how)
    assert max(map(sum, line.values())) == pytest.approx(max(map(sum, whole.values())), rel=0.005)


@pytest.mark.parametrize("words", [(), EXPERTS], ids=["dense", "experts"])
def test_the_peak_is_that_of_torchs_own_tracker(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools are private parts of torch: this is where a new version of it that changes them is seen.

    torch cannot infer shapes of grouped products in float32. transformers can, for its own operation in their place.
    """
    blueprint = tracing.build_blueprint(recipe_file.load("lm_tiny", ["model.layers=3", *words]).recipe)
    model = blueprint.cut_to(3).model
    with FakeTensorMode():
        tracing.bring_to_cpu(model)
        batch = tracing.make_batch(blueprint, 2, Form())
        tracker = MemTracker()
        tracker.track_external(model, *(it for it in batch.values() if isinstance(it, torch.Tensor)))
        with tracker, monkeypatch.context() as patch:
            patch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
            blueprint.task.loss(model, batch).mean.backward()
        (theirs,) = (held["Total"] for held in tracker.get_tracker_snapshot("peak").values())
    kept = sum(it.nbytes for it in (*blueprint.model.parameters(), *blueprint.model.buffers()))
    first = {name: held for name, held in tracing.peaks(blueprint, PassOptions(2)).items() if not name.endswith(LATER)}
    assert kept + max(map(sum, first.values())) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in TABLE if name != "muon"])  # tests/optim/test_muon.py
def test_states_are_those_of_a_real_step(name: str) -> None:
    recipe, shapes = OptimRecipe(name=name), [(24, 10), (7,), (4, 3, 2)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, TABLE[name].torch_name)(parameters, **({"momentum": 0.9} if name == "sgd" else {}))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = sum(it.nbytes for of_one in optimizer.state.values() for it in of_one.values() if isinstance(it, torch.Tensor))
    assert memory.bytes_of_states(recipe, shapes) == real


def test_what_a_plan_says_of_shardings() -> None:
    recipe = recipe_file.load("lm_tiny", ["model.hidden_size=256", "model.vocab_size=1024"]).recipe
    weights = 4 * tracing.build_blueprint(recipe).parameters
    one = peak(Case(recipe, Sharding(), micro_batch=4))
    assert (one.weights, one.total) == (weights, sum(one[:-1]))
    case = Case(recipe, Sharding(), data_ranks=4, micro_batch=4)
    ddp = peak(case)
    assert ddp.gradients >= weights
    fsdp2, hsdp = (peak(replace(case, sharding=Sharding("fsdp2", replicas=replicas))) for replicas in (1, 2))
    assert fsdp2.total < hsdp.total < ddp.total
    split = peak(replace(case, sharding=Sharding("fsdp2", tensor_parallel=2), data_ranks=2))
    assert split.optimizer < ddp.optimizer / 3
    parts = replace(case, sharding=Sharding("fsdp2", context_parallel=4), data_ranks=1)
    assert peak(parts).activations < fsdp2.activations / 2.5, "the keys and values are whole"
    assert peak(parts).optimizer == fsdp2.optimizer
    assert peak(replace(case, recomputes=True)).activations < ddp.activations / 2
    for sharding in (Sharding("deepspeed", stage=3, offload=True), Sharding("fsdp2", offload=True)):
        offloaded = peak(replace(case, sharding=sharding))
        assert offloaded.optimizer == 0
        assert offloaded.host > 3 * weights / 4
