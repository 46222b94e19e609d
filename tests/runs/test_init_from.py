"""`train.init_from`: all weights of a file, a run or a checkpoint but for a last layer of other classes, or none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import read, train
from safetensors.torch import load_file, save_file
from saved import save_split

from app.checkpoints import initial_weights
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import CheckpointError, RecipeError
from app.recipe.schema import BatchPlan, TrainRecipe
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
    """Save `tensors` as the average, and other weights."""
    buffers = {name: tensor for name, tensor in tensors.items() if "running" in name or "tracked" in name}
    average = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    weight = {name: tensor + 1 for name, tensor in average.items()}
    return save_split(run_dir, step, {"weight": weight, "average": average}, buffers=buffers)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))


def load(runtime: Runtime, model: torch.nn.Module, place: Path | str, **more: Any) -> str | None:
    recipe = TrainRecipe(init_from=str(place), **more)
    return initial_weights.load(runtime, ImageClassification(Sections()), model, recipe, resumed=None)


def refused(runtime: Runtime, model: torch.nn.Module, place: Path | str, **more: Any) -> str:
    """The text that weights are refused with, which leave the model as it was."""
    before = copied(model)
    with pytest.raises((CheckpointError, RecipeError)) as caught:
        load(runtime, model, place, **more)
    assert_holds(model, before)
    return str(caught.value)


@pytest.mark.parametrize("name", ["convnet", "resnet18", "squeezenet1_1"])
def test_a_last_layer_of_other_classes_stays_new(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, recipe = copied(build(ModelRecipe(name=name), classes=10, seed=1)), ModelRecipe(name=name)
    head = {"convnet": "head", "resnet18": "fc", "squeezenet1_1": "classifier.1"}[name]
    own = {f"{head}.weight", f"{head}.bias"}
    save_file(source, tmp_path / "all.safetensors")
    save_file({key: tensor for key, tensor in source.items() if key not in own}, tmp_path / "backbone.safetensors")
    for file, why in (("all", "is (10,) in the file and (5,) in the model"), ("backbone", "is not in the file")):
        model, fresh = build(recipe, classes=5), build(recipe, classes=5)
        load(runtime, model, tmp_path / f"{file}.safetensors")
        assert_holds(model, {**source, **{key: fresh.state_dict()[key] for key in own}})
        said = capsys.readouterr().out
        assert f"{len(source) - 2} tensors taken; 2 initialized from the seed: {head}.weight" in said
        assert f"{head}.bias {why}" in said


def test_weights_of_another_model_are_refused_with_all_that_differs(runtime: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    save_file(copied(build(ModelRecipe(norm="batch", hidden=8))), file)
    said = refused(runtime, build(), file)
    assert "hidden.weight is (8, 256) in the file and (16, 256) in the model, hidden.bias is (8,) in the file and" in said
    assert_holds(free := build(), copied(build()))
    load(runtime, free, file, init_allow=("hidden.*", "head.*"))  # whose input is another
    assert_holds(free, copied(build(ModelRecipe(norm="batch", hidden=8))), but={"hidden.weight", "hidden.bias", *HEAD})
    assert "train.init_allow has 'hiden.*', which matches no weight in the model or the file: did you mean hidden.*" in refused(
        runtime, build(), file, init_allow=("hiden.*",)
    )
    save_file(copied(build(ModelRecipe(norm="group", hidden=16))), file)
    said = refused(runtime, build(), file)
    assert "norm1.running_mean is not in the file" in said
    said = refused(runtime, build(ModelRecipe(norm="group", hidden=16)), save_checkpoint(tmp_path, 1, trained()))
    assert "norm2.num_batches_tracked is not in the model" in said
    save_file({name: tensor.to(torch.int8) for name, tensor in trained().items()}, tmp_path / "integers.safetensors")
    assert "is int8 in the file and float32 in the model" in refused(runtime, build(), tmp_path / "integers.safetensors")
    said = refused(runtime, build(ModelRecipe(name="resnet18")), file)
    assert " and 123 more. Only the last layer, fc, and the names in train.init_allow may differ" in said


def test_files_without_weights_are_refused(runtime: Runtime, tmp_path: Path) -> None:
    torch.save(network := build(), tmp_path / "code.pth")  # which names a class to be called
    named = f"{type(network).__module__}.{type(network).__qualname__}"
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "other.pth")
    (tmp_path / "noise").write_bytes(bytes(range(200)))
    for place, words in (
        (tmp_path / "code.pth", f"code.pth is an object of {named}, not a state dict: save"),
        (tmp_path / "other.pth", "has no tensors by name, at the top or in state_dict"),
        (tmp_path / "noise", "is damaged, or not a safetensors file"),
        (tmp_path / "no", f"train.init_from is {tmp_path}/no, which is not a source of weights: give a safetensors or .pth"),
        ("$NOWHERE/model.pth", "variable NOWHERE is not set: set it"),
    ):
        assert words in refused(runtime, build(), place)


def test_what_other_programs_save_is_read(runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone or beside other things, in both formats of torch, of a wrapped model, in half precision, divided among files."""
    expected = {name: it.half() if it.is_floating_point() else it for name, it in trained().items()}
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in expected.items()}
    torch.save(
        {"epoch": 3, "mean": torch.zeros(3), "state_dict": {**wrapped, "module._orig_mod.said": "so"}}, tmp_path / "zip.pth"
    )
    torch.save(expected, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    parted = tmp_path / "parted"
    parted.mkdir()
    names = sorted(expected)
    for file, some in (("a.safetensors", names[:5]), ("b.safetensors", names[5:])):
        save_file({name: expected[name] for name in some}, parted / file)
    weight_map = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (parted / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for place in (tmp_path / "zip.pth", tmp_path / "old.bin", parted):
        model = build()
        load(runtime, model, place)
        assert_holds(model, expected)
        said = capsys.readouterr().out
        assert f"{len(expected)} tensors taken; {len(expected) - 2} of them converted from float16 to float32\n" in said


def test_published_weights_are_read_from_the_cache_or_downloaded(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    recipe, name = ModelRecipe(name="squeezenet1_1"), "torchvision:SqueezeNet1_1_Weights.IMAGENET1K_V1"
    cache = tmp_path / "hub" / "checkpoints"
    file = cache / "squeezenet1_1-b8a52dc0.pth"
    assert f"{file}, the published weights of train.init_from, does not exist" in refused(runtime, build(recipe), name)
    assert f"did you mean {name.partition(':')[2]}" in refused(runtime, build(recipe), name.replace("IMAGENET1K", "IMAGENET"))
    source = copied(build(recipe, classes=1000, seed=1))
    cache.mkdir(parents=True)
    torch.save(source, file)
    model = build(recipe, classes=5)
    assert load(runtime, model, name) == name
    assert_holds(model, source, but={"classifier.1.weight", "classifier.1.bias"})
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        initial_weights.cached((tmp_path / "none.pth").as_uri(), download=True)
    old = "features.denseblock1.denselayer2.norm.1.running_mean"
    assert initial_weights.name_here(old) == "features.denseblock1.denselayer2.norm1.running_mean"


@pytest.mark.multiproc
def test_a_sharded_run_begins_with_them_and_passes_them_over_when_it_goes_on(tmp_path: Path) -> None:
    """At a learning rate of 0 it ends with the weights that it began with."""
    place = save_checkpoint(tmp_path / "source", 3, trained())
    recipe = ("data.source=fakedata", "data.image_size=8", "data.fake_channels=1", "data.fake_classes=5", "optim.lr=0",
              "data.fake_train_samples=64", "data.fake_test_samples=8", "train.global_batch_size=32", "model.norm=batch",
              "model.hidden=16", "checkpoint.every_steps=1", "--resume", "auto")  # fmt: skip
    run_dir = tmp_path / "run"
    begun = train("fsdp2", run_dir, *recipe, "train.steps=1", f"train.init_from={place}", processes=2).check()
    assert f"initial weights from {place}: 16 tensors taken; 2 initialized from the seed: head.weight" in begun.output
    left = load_file(run_dir / "model.safetensors")
    statistics = {name for name in left if "running" in name or "tracked" in name}
    fresh = build(classes=5)  # the recipe's seed is 0, too
    expected = {**trained(), **{name: fresh.state_dict()[name] for name in HEAD}}
    fresh.load_state_dict(left)
    assert_holds(fresh, expected, but=statistics)
    assert not torch.equal(left["norm1.running_mean"], expected["norm1.running_mean"])  # one step was taken
    assert read(run_dir / "run.json")["init_from"] == str(place)

    went_on = train("cpu", run_dir, *recipe, "train.steps=2", f"train.init_from={tmp_path / 'gone'}").check()
    assert f"train.init_from is ignored, because the run resumes from {run_dir}" in went_on.output
    assert read(run_dir / "run.json")["init_from"] == str(place)
