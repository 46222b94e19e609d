"""`--init-from`: all weights of a file, a run or a checkpoint but for a last layer of other classes, or none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import read, train
from safetensors.torch import load_file, save_file

from app.checkpoints import initial_weights
from app.checkpoints import step_folders as files
from app.checkpoints.piece import Piece
from app.errors import CheckpointError
from app.place.launched import Launched
from app.ranks.runtime import Runtime
from app.recipe.batching import BatchPlan
from app.record.claim import claim
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe, Sections
from app.tasks.image_classification.task import ImageClassification

BATCH_NORM = ModelRecipe(norm="batch", hidden=16)
HEAD = {"head.weight", "head.bias"}


def build(recipe: ModelRecipe = BATCH_NORM, *, classes: int = 10, seed: int = 0) -> torch.nn.Module:
    side, channels = (8, 1) if recipe.name == "convnet" else (32, 3)
    torch.manual_seed(seed)
    return models.build(recipe, channels=channels, image_size=(side, side), num_classes=classes)


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained() -> dict[str, torch.Tensor]:
    """Weights and batch statistics of the small network that no fresh one has."""
    return {name: tensor + 1 for name, tensor in copied(build(seed=1)).items()}


def assert_holds(model: torch.nn.Module, expected: dict[str, torch.Tensor], *, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name in found.keys() - but:
        assert torch.equal(found[name], expected[name].to(found[name].dtype)), name


def save_checkpoint(run_dir: Path, step: int, tensors: dict[str, torch.Tensor]) -> Path:
    """Cut among two ranks; what was averaged is `tensors`, the weights are others."""
    buffers = {name: tensor for name, tensor in tensors.items() if "running" in name or "tracked" in name}
    ranks: list[list[Piece]] = [[], []]
    for name in tensors.keys() - buffers.keys():
        flat, shape = tensors[name].reshape(-1), tuple(tensors[name].shape)
        for key, values in (("weight", flat + 1), ("average", flat)):
            ranks[0].append(Piece(key, name, shape, 0, values[: len(flat) // 3]))
            ranks[1].append(Piece(key, name, shape, len(flat) // 3, values[len(flat) // 3 :]))
    run_dir.mkdir(exist_ok=True)
    ours = claim(run_dir)
    folder = files.begin(ours, step)
    entries = [files.write_pieces(folder, rank, pieces) for rank, pieces in enumerate(ranks)]
    return files.commit(ours, step, entries, state={"step": step}, buffers=buffers)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, world_size=1, accumulation=1))


def take_up(runtime: Runtime, model: torch.nn.Module, place: Path) -> Path:
    head = ImageClassification(Sections()).head(model)
    initial = initial_weights.take_up(runtime, model, str(place), head=head, resumed=None)
    assert initial is not None
    return initial.place


def refused(runtime: Runtime, model: torch.nn.Module, place: Path) -> str:
    """The text that weights are refused with, which leave the model as it was."""
    before = copied(model)
    with pytest.raises(CheckpointError) as caught:
        take_up(runtime, model, place)
    assert_holds(model, before)
    return str(caught.value)


def test_a_file_and_a_finished_run_give_weights_and_batch_statistics(runtime: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(trained(), file)
    for place in (file, tmp_path):
        model = build()
        assert take_up(runtime, model, place) == file
        assert_holds(model, trained())
    model = build().double()
    take_up(runtime, model, file)
    assert_holds(model, trained())


def test_a_checkpoint_gives_its_average_and_a_run_its_newest_whole_one(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = save_checkpoint(tmp_path, 1, trained())
    newest = save_checkpoint(tmp_path, 2, copied(build(seed=2)))
    model = build()
    assert take_up(runtime, model, newest) == newest
    assert_holds(model, copied(build(seed=2)))
    (newest / "buffers.safetensors").write_bytes(b"")
    assert take_up(runtime, model, tmp_path) == older
    assert_holds(model, trained())
    assert f"passed over: {newest / 'buffers.safetensors'} is truncated" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["convnet", "resnet18", "squeezenet1_1"])
def test_a_last_layer_of_other_classes_stays_new(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, recipe = copied(build(ModelRecipe(name=name), classes=10, seed=1)), ModelRecipe(name=name)
    head = {"convnet": "head", "resnet18": "fc", "squeezenet1_1": "classifier.1"}[name]
    own = {f"{head}.weight", f"{head}.bias"}
    save_file(source, tmp_path / "all.safetensors")
    save_file({key: tensor for key, tensor in source.items() if key not in own}, tmp_path / "backbone.safetensors")
    for file, why in (("all", "is (10,) there and (5,) here"), ("backbone", "is not there")):
        model, fresh = build(recipe, classes=5), build(recipe, classes=5)
        take_up(runtime, model, tmp_path / f"{file}.safetensors")
        assert_holds(model, {**source, **{key: fresh.state_dict()[key] for key in own}})
        said = capsys.readouterr().out
        assert f"but the last layer, {head}, is new, because it is of another shape" in said
        assert f"{head}.bias {why}" in said


def test_weights_of_another_model_are_refused_with_all_that_differs(runtime: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file(copied(build(ModelRecipe(norm="batch", hidden=8))), file)
    said = refused(runtime, build(), file)
    assert "hidden.weight is (8, 256) there and (16, 256) here; hidden.bias is (8,) there and (16,) here. Only" in said
    save_file(copied(build(ModelRecipe(norm="group", hidden=16))), file)
    said = refused(runtime, build(), file)
    assert "norm1.running_mean is not there" in said
    said = refused(runtime, build(ModelRecipe(norm="group", hidden=16)), save_checkpoint(tmp_path, 1, trained()))
    assert "norm2.num_batches_tracked is not in this run's" in said
    said = refused(runtime, build(ModelRecipe(name="resnet18")), file)
    assert " and 123 more. Only the last layer, fc, may differ" in said


def test_what_holds_no_weights_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK" + bytes(100))
    (tmp_path / "run").mkdir()
    assert "model.pt, a pickle of torch.save, and a safetensors file is wanted: " in refused(
        runtime, build(), tmp_path / "model.pt"
    )
    (tmp_path / "noise").write_bytes(bytes(range(200)))
    assert "is damaged, or no safetensors file" in refused(runtime, build(), tmp_path / "noise")
    for place in (tmp_path / "run", tmp_path / "nothing"):
        assert f"--init-from is {place}: give a safetensors file" in refused(runtime, build(), place)


@pytest.mark.multiproc
def test_a_sharded_run_begins_with_them_and_passes_them_over_when_it_goes_on(tmp_path: Path) -> None:
    """At a learning rate of 0 it ends with the weights that it began with."""
    place = save_checkpoint(tmp_path / "source", 3, trained())
    recipe = ("data.source=fakedata", "data.image_size=8", "data.fake_channels=1", "data.fake_classes=5", "optim.lr=0",
              "data.fake_train_samples=64", "data.fake_test_samples=8", "train.global_batch_size=32", "model.norm=batch",
              "model.hidden=16", "checkpoint.every_steps=1", "--resume", "auto")  # fmt: skip
    run_dir = tmp_path / "run"
    begun = train("fsdp2", run_dir, *recipe, "train.steps=1", "--init-from", str(place), processes=2).check()
    assert f"the weights to begin with are those of {place}, but the last layer, head, is new" in begun.output
    left = load_file(run_dir / "model.safetensors")
    statistics = {name for name in left if "running" in name or "tracked" in name}
    fresh = build(classes=5)  # the recipe's seed is 0, too
    expected = {**trained(), **{name: fresh.state_dict()[name] for name in HEAD}}
    fresh.load_state_dict(left)
    assert_holds(fresh, expected, but=statistics)
    assert not torch.equal(left["norm1.running_mean"], expected["norm1.running_mean"])  # one step was taken
    assert read(run_dir / "run.json")["init_from"] == str(place)

    went_on = train("cpu", run_dir, *recipe, "train.steps=2", "--init-from", str(tmp_path / "gone")).check()
    assert f"--init-from {tmp_path / 'gone'} is passed over: the run goes on from {run_dir}" in went_on.output
    assert read(run_dir / "run.json")["init_from"] == str(place)
