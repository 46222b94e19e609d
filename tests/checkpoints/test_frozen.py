"""The file of parameters that are not trained: written once, named by its digest, read by whatever reads a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved import save_split
from torch import nn

from app.checkpoints import checkpoint, initial_weights
from app.checkpoints import step_folders as files
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import CheckpointError
from app.export import export
from app.recipe.batching import BatchPlan
from app.recipe.schema import TrainRecipe
from app.runs.claim import claim
from app.tasks.image_classification.sections import Sections
from app.tasks.image_classification.task import ImageClassification


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))


def net(*, seed: int, fixed: str = "0.") -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(fixed)
    return model


def saved(runtime: Runtime, run_dir: Path, model: nn.Module, step: int, resumed: Path | None = None) -> Path:
    """Save a checkpoint with an average that is the weights plus 1."""
    run_dir.mkdir(exist_ok=True)
    entry = checkpoint.settle_frozen(runtime, claim(run_dir), model, resumed)
    weight = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    average = {name: tensor + 1 for name, tensor in weight.items()}
    state, buffers = {"step": step, "model": {}, "recipe": {}}, dict(model.named_buffers())
    return save_split(run_dir, step, {"weight": weight, "average": average}, state=state, buffers=buffers, frozen=entry)


def test_a_run_goes_on_with_the_frozen_weights_that_it_had(runtime: Runtime, tmp_path: Path) -> None:
    model = net(seed=0)
    first = saved(runtime, tmp_path / "run", model, 1)
    (file,) = (tmp_path / "run" / "frozen").iterdir()
    written = file.stat().st_mtime_ns
    other = net(seed=1)
    second = saved(runtime, tmp_path / "run", other, 2, first)
    assert torch.equal(other[0].weight, model[0].weight)
    assert not torch.equal(other[2].weight, model[2].weight)
    assert [path.stat().st_mtime_ns for path in (tmp_path / "run" / "frozen").iterdir()] == [written]
    saved(runtime, tmp_path / "elsewhere", net(seed=2), 3, second)
    assert (tmp_path / "elsewhere" / "frozen" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(CheckpointError, match="froze 2 parameters, and this run freezes 0; only one of them"):
        saved(runtime, tmp_path / "third", net(seed=0, fixed="none"), 3, second)


def test_what_is_exported_or_begun_with_is_whole(runtime: Runtime, tmp_path: Path) -> None:
    model = net(seed=0)
    folder = saved(runtime, tmp_path / "run", model, 1)
    expected = {name: it if name.startswith("0.") or name not in dict(model.named_parameters()) else it + 1
                for name, it in model.state_dict().items()}  # fmt: skip
    export(files.Reader(folder), tmp_path / "all.safetensors", key="average")
    exported = load_file(tmp_path / "all.safetensors")
    assert exported.keys() == expected.keys()
    begun = net(seed=1)
    initial_weights.load(runtime, ImageClassification(Sections()), begun, TrainRecipe(init_from=str(folder)), resumed=None)
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
        assert torch.equal(begun.state_dict()[name], tensor), name
