"""What a plan says of memory, held against torch's own tracker, against whole models, and against torch's optimizers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from app.planning import ledger, memory, passes, states
from app.planning import model as models
from app.planning.memory import LEFT_OUT, Case, largest_micro_batch, of_model, peak
from app.recipe import recipe_file
from app.recipe.optimizers import TABLE
from app.recipe.schema import OptimRecipe
from app.task import Form


@pytest.fixture(scope="module")
def deep() -> models.Blueprint:
    return models.blueprint(recipe_file.load("lm_tiny", ["model.layers=9"]).recipe)


@pytest.mark.parametrize("how", [passes.How(3), passes.How(3, "bf16", checkpoints=True, passes=2), passes.How(3, shards=4)])
def test_shallow_models_tell_of_a_deep_one_to_the_byte(deep: models.Blueprint, how: passes.How) -> None:
    whole, told = passes._traced(deep, how), passes.peaks(deep, how)
    assert max(map(sum, told.values())) == max(map(sum, whole.values()))


@pytest.mark.parametrize("how", [passes.How(6, shards=4), passes.How(6, "bf16", checkpoints=True, passes=2, shards=32)])
def test_two_numbers_of_shards_and_two_sizes_tell_of_others(deep: models.Blueprint, how: passes.How) -> None:
    whole = passes._traced(deep, how)
    told = memory._of_any_size(recipe_file.load("lm_tiny", ["model.layers=9"]).recipe, 1, how)
    assert max(map(sum, told.values())) == pytest.approx(max(map(sum, whole.values())), rel=0.005)
    first = [{name: held for name, held in of.items() if not name.endswith(passes.LATER)} for of in (told, whole)]
    one_pass = passes._traced(deep, how._replace(passes=1))
    assert first[1] == one_pass
    assert max(map(sum, first[0].values())) == pytest.approx(max(map(sum, one_pass.values())), rel=0.005)


def test_the_peak_is_that_of_torchs_own_tracker(deep: models.Blueprint) -> None:
    """The tools are private parts of torch: this is where a new version of it that changes them is seen."""
    blueprint, how = deep.cut_to(3), passes.How(2)
    with FakeTensorMode() as mode:
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            model = blueprint.cut_to(3).model
        assert mode is torch._guards.active_fake_mode()
        models.bring_to_cpu(model)
        batch = models.batch_of(blueprint, 2, Form())
        tracker = MemTracker()
        tracker.track_external(model, *(it for it in batch.values() if isinstance(it, torch.Tensor)))
        with tracker:
            blueprint.task.loss(model, batch).mean.backward()
        (theirs,) = (held["Total"] for held in tracker.get_tracker_snapshot("peak").values())
    kept = sum(it.nbytes for it in (*blueprint.model.parameters(), *blueprint.model.buffers()))
    ours = kept + max(map(sum, passes.peaks(blueprint, how).values()))
    assert abs(ours - theirs) <= 1e-3 * theirs


@pytest.mark.parametrize("name", TABLE)
def test_states_are_those_of_a_real_step(name: str) -> None:
    recipe, shapes = OptimRecipe(name=name), [(24, 10), (7,), (4, 3, 2)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, TABLE[name].torch_name)(parameters, **({"momentum": 0.9} if name == "sgd" else {}))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    real = sum(it.nbytes for of_one in optimizer.state.values() for it in of_one.values() if isinstance(it, torch.Tensor))
    assert states.of_shapes(recipe, shapes) == real


def test_what_a_plan_says_of_presets() -> None:
    loaded = recipe_file.load("lm_tiny", ["model.hidden_size=256", "model.vocab_size=1024"])
    sizes = of_model(loaded)
    assert sizes.blocks == 4
    weights = 4 * sizes.parameters
    one = peak(Case(loaded, micro_batch=4))
    assert (one.weights, one.total, one.libraries) == (weights, sum(one.by_kind.values()), 0)
    assert any("not calibrated on a GPU" in sentence for sentence in LEFT_OUT)
    case = Case(loaded, "ddp", data_ranks=4, micro_batch=4)
    ddp = peak(case)
    assert ddp.gradients >= weights
    fsdp2, hsdp = peak(replace(case, strategy="fsdp2")), peak(replace(case, strategy="hsdp", replicas=2))
    assert fsdp2.total < hsdp.total < ddp.total
    divided = peak(replace(case, strategy="tensor_parallel", data_ranks=2, tensor_parallel=2))
    assert divided.optimizer < ddp.optimizer / 3
    again = peak(replace(case, checkpoint_activations="blocks"))
    assert again.activations < ddp.activations / 2
    offloaded = peak(replace(case, strategy="zero3_offload"))
    assert offloaded.optimizer == 0
    assert offloaded.host > 3 * weights / 4


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    case = Case(recipe_file.load("lm_tiny", ["train.global_batch_size=4096"]), "ddp", data_ranks=2)
    limit = peak(replace(case, micro_batch=37)).total + 1
    assert largest_micro_batch(case, limit) == 37
    assert largest_micro_batch(case, 1000) == 0
    assert largest_micro_batch(case, limit, most=8) == 8


def test_a_plan_is_made_before_this_process_joins_others(deep: models.Blueprint) -> None:
    with ledger.group_of(2), pytest.raises(RuntimeError, match="has joined them already"):
        passes.peaks(deep.cut_to(1), passes.How(1, shards=2))
