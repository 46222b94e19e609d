"""`train.freeze`: what is not trained stays as it was, through kills and under every preset, and is written once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from moments import await_that
from processes import losses, start, train
from safetensors.torch import load_file

from app.checkpoints import step_folders, stored_weights
from app.errors import CheckpointError
from app.export import main as export
from app.init.region import Region
from app.tasks.image_classification import models
from app.tasks.image_classification.sections import ModelRecipe

pytestmark = pytest.mark.multiproc

STEPS = 24
# A batch normalization whose statistics would tell the micro-batches apart, were it not frozen; and no kinks.
MODEL = ModelRecipe(norm="batch", activation="gelu", pooling="average", channels=(16, 32))
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=240", "train.ema_decay=0.9", "log.every_steps=1",
    "model.norm=batch", "model.activation=gelu", "model.pooling=average", "model.channels=16,32",
    "optim.lr=0.003", "optim.weight_decay=0.1", "optim.clip_norm=1.0", "checkpoint.every_steps=4", "checkpoint.keep_last=9",
    "train.freeze=[conv1.*,norm?.*]",
)  # fmt: skip
FROZEN = {"conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
KEPT = FROZEN | {f"norm{layer}.{name}" for layer in (1, 2) for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs begin with: weights and statistics that no seed gives."""
    torch.manual_seed(1)
    state = models.build(MODEL, channels=1, image_size=(8, 8), num_classes=10).state_dict()
    path = tmp_path_factory.mktemp("weights") / "begin.pth"
    torch.save(
        {
            "state_dict": {
                f"module.{name}": tensor + tensor.std() / 3 if tensor.ndim > 1 else tensor + 1 for name, tensor in state.items()
            }
        },
        path,
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("frozen") / "run"
    train("cpu", run_dir, *RECIPE, f"train.init_from={weights}").check()
    return run_dir


def begun_with(weights: Path) -> dict[str, torch.Tensor]:
    saved: Mapping[str, torch.Tensor] = torch.load(weights)["state_dict"]
    return {name.removeprefix("module."): tensor for name, tensor in saved.items()}


def assert_kept(file: Path, weights: Path) -> None:
    """What is frozen has the bits that it began with, and all else has not."""
    left, begun = load_file(file), begun_with(weights)
    assert left.keys() == begun.keys()
    assert {name for name, tensor in left.items() if torch.equal(tensor, begun[name].to(tensor.dtype))} == KEPT


def test_it_stays_as_it_was_through_kills_and_under_every_preset(undisturbed: Path, weights: Path, tmp_path: Path) -> None:
    assert_kept(undisturbed / "model.safetensors", weights)
    begin, run_dir = tmp_path / "begin.pth", tmp_path / "run"
    shutil.copy(weights, begin)
    whole = (*RECIPE, f"train.init_from={begin}", "--resume", "auto")
    command = ("app.train", "--run-dir", str(run_dir), "--trackers", "none")
    for upto, preset, processes in ((4, "multi_gpu", 2), (8, "deepspeed_zero3", 3), (12, "fsdp2", 2)):
        running = start(preset, processes, *command, *whole)
        await_that(running, lambda upto=upto: step_folders.path_of(run_dir, upto).exists())  # type: ignore[misc]
        running.kill()
        begin.unlink(missing_ok=True)  # a run that goes on needs it no more
    train("multi_gpu", run_dir, *whole, processes=3).check()
    assert losses(run_dir) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert_kept(run_dir / "model.safetensors", weights)
    (file,) = (run_dir / "frozen").iterdir()
    assert set(load_file(file)) == {f"frozen/{name}@0" for name in FROZEN}
    assert [path.name for path in (undisturbed / "frozen").iterdir()] == [file.name]  # its name is its digest


@pytest.mark.parametrize("place", ["checkpoint", "run"])
def test_a_checkpoint_names_the_file_that_it_needs(undisturbed: Path, weights: Path, tmp_path: Path, place: str) -> None:
    """Without it, or with another, nothing is resumed, exported or begun with."""
    (frozen,) = (undisturbed / "frozen").iterdir()
    newest = step_folders.committed(undisturbed)[0]
    out = tmp_path / "exported.safetensors"
    assert export([str(undisturbed), "--out", str(out)]) == 0
    left, exported = load_file(undisturbed / "model.safetensors"), load_file(out)
    assert left.keys() == exported.keys()
    assert all(torch.equal(left[name], exported[name]) for name in FROZEN)
    stored = stored_weights.open_stored(newest)  # as `train.init_from` reads
    assert stored.keys() == exported.keys()
    for name, expected in exported.items():
        stored[name].read_into(values := torch.empty(expected.numel(), dtype=expected.dtype), Region.flat(0, expected.numel()))
        assert torch.equal(values, expected.flatten()), name
    if place == "checkpoint":  # alone, elsewhere
        copy = tmp_path / "alone" / "checkpoints" / newest.name
        shutil.copytree(newest, copy)
        what, said = copy, f"{tmp_path}/alone/frozen/{frozen.name} cannot be read: No such file"
    else:
        what = tmp_path / "run"
        shutil.copytree(undisturbed, what, ignore=shutil.ignore_patterns("starts"))
        changed = bytearray((what / "frozen" / frozen.name).read_bytes())
        changed[-3] ^= 1
        (what / "frozen" / frozen.name).write_bytes(changed)
        said = f"{what}/frozen/{frozen.name} has changed since it was written"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        export([str(what), "--out", str(tmp_path / "other.safetensors")])
    refused = train("multi_gpu", tmp_path / "another", *RECIPE, f"train.steps={STEPS + 1}", "--resume", str(what), processes=2)
    assert refused.returncode == 11
    assert said in refused.output


def test_in_another_folder_it_is_written_again_and_nothing_else_may_be_frozen(
    undisturbed: Path, weights: Path, tmp_path: Path
) -> None:
    (frozen,) = (undisturbed / "frozen").iterdir()
    further = (f"train.steps={STEPS + 1}", f"train.init_from={weights}", "--resume", str(undisturbed))
    train("cpu", tmp_path / "on", *RECIPE, *further).check()
    assert (tmp_path / "on" / "frozen" / frozen.name).read_bytes() == frozen.read_bytes()
    assert_kept(tmp_path / "on" / "model.safetensors", weights)
    other = train("cpu", tmp_path / "other", *RECIPE, *further, "train.freeze=[conv1.*]")
    assert other.returncode == 11
    assert "train.freeze was ['conv1.*', 'norm?.*'] and is ['conv1.*']" in other.output
