"""`samerun export`: what a finished run leaves, from a checkpoint, bit by bit, in less memory than the model needs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import REPOSITORY, clean_environment, train
from safetensors.torch import load_file
from saved import BUFFERS, save_split

from app import export
from app.checkpoints import step_folders as files
from app.checkpoints import stored_weights
from app.errors import CheckpointError, RunFolderError
from app.init.region import Region
from app.recipe import recipe_file
from app.recipe.schema import Recipe

MIB = 2**20
MODEL = {"recipe": {"task": "image_classification"}, "facts": {"classes": ["no", "yes"], "channels": 1, "image_size": [8, 8]}}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "recipe": recipe_file.flat(Recipe(seed=step)), "model": MODEL, "best": None}


def save_small(run_dir: Path, step: int, *, averaged: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    """Save two parameters of different types, and return them by key and name."""
    tensors = {
        key: {"a.weight": random(step, 7), "b.bias": random(5, dtype=torch.float64) + len(key)}
        for key in ("weight", "exp_avg", *(["average"] if averaged else []))
    }
    save_split(run_dir, step, tensors, state=state_of(step))
    return tensors


def assert_equal(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def samerun(*arguments: str | Path, limits: dict[int, int]) -> subprocess.CompletedProcess[str]:
    """Run `samerun export` as a process within limits (`resource.RLIMIT_...`, in bytes)."""

    def limit() -> None:
        for what, size_bytes in limits.items():
            resource.setrlimit(what, (size_bytes, size_bytes))

    command = [sys.executable, "-m", "launch.cli", "export", *map(str, arguments)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=clean_environment(), preexec_fn=limit, capture_output=True, text=True, check=False
    )


@pytest.mark.multiproc
def test_it_is_what_the_finished_run_leaves(tmp_path: Path) -> None:
    """Averaged weights, cut among two ranks, and batch statistics of both: the three files are equal, so tools take them."""
    train("multi_gpu", tmp_path / "run", "--recipe", "digits", "train.steps=3", "train.ema_decay=0.5", "model.norm=batch",
          "optim.lr=0.01", "checkpoint.every_steps=10", processes=2).check()  # fmt: skip
    assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert_equal(tmp_path / "out" / "model.safetensors", load_file(tmp_path / "run" / "model.safetensors"))
    for name in ("model.json", "recipe.yaml"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "run" / name).read_text()


def test_the_average_is_the_default_and_raw_weights_can_be_exported(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    tensors = save_small(tmp_path, 2)
    assert export.main([str(tmp_path)]) == 0
    folder, file = tmp_path / "exported" / "step-00000002", tmp_path / "raw.safetensors"
    assert_equal(folder / "model.safetensors", {**tensors["average"], **BUFFERS})
    assert json.loads((folder / "model.json").read_text()) == MODEL
    assert recipe_file.load(str(folder / "recipe.yaml")).recipe == Recipe(seed=2)
    assert export.main([str(files.path_of(tmp_path, 2)), "--weights", "raw", "--out", str(file)]) == 0
    assert_equal(file, {**tensors["weight"], **BUFFERS})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "exported", "raw.safetensors", "starts"]
    with pytest.raises(RunFolderError, match=r"raw\.safetensors exists already: choose another --out, or"):
        export.main([str(tmp_path), "--out", str(file)])
    assert export.main([str(tmp_path), "--out", str(file), "--force"]) == 0
    assert_equal(file, {**tensors["average"], **BUFFERS})
    with pytest.raises(CheckpointError, match=r"records no best checkpoint: the run had no checkpoint.keep_best=true"):
        export.main([str(tmp_path), "--best"])


def test_existing_files_are_replaced_only_with_force(tmp_path: Path) -> None:
    tensors = save_small(tmp_path, 2, averaged=False)
    (tmp_path / "model.json").write_text("mine")
    with pytest.raises(RunFolderError, match=r"model\.json exists already: choose another --out, or replace it by --force"):
        export.main([str(tmp_path), "--out", str(tmp_path)])
    assert not (tmp_path / "model.safetensors").exists()
    assert export.main([str(tmp_path), "--out", str(tmp_path), "--force"]) == 0
    assert_equal(tmp_path / "model.safetensors", {**tensors["weight"], **BUFFERS})


def test_large_weights_are_split_as_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts read as a whole; a smaller export in the same place leaves none of them."""
    tensors = save_small(tmp_path, 2, averaged=False)
    with pytest.raises(CheckpointError, match=r"has no average of the weights: its run had no train\.ema_decay"):
        export.main([str(tmp_path), "--weights", "average"])
    out, expected = tmp_path / "out", {**tensors["weight"], **BUFFERS}
    with monkeypatch.context() as small:
        small.setattr(export, "_PART_BYTES", 100)
        assert export.main([str(tmp_path), "--out", str(out)]) == 0
    parts = sorted(out.glob("*.safetensors"))
    assert [part.name for part in parts] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    stored = stored_weights.open_stored(stored_weights.in_folder(out) or out)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        values = torch.empty(tensor.numel(), dtype=tensor.dtype)
        stored[name].read_into(values, Region.flat(0, tensor.numel()))
        assert torch.equal(values, tensor.reshape(-1)), name
    assert export.main([str(tmp_path), "--out", str(out), "--force"]) == 0
    assert sorted(path.name for path in out.glob("model*")) == ["model.json", "model.safetensors"]
    assert_equal(out / "model.safetensors", expected)


def test_a_model_larger_than_the_memory_is_exported_and_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    """256 MiB: twice the same tensor, split over two ranks. All that the process maps is less than one of the two tensors."""
    weight = random(32, MIB)
    folder = save_split(tmp_path / "run", 1, {"weight": {"a": weight, "b": weight}}, state=state_of(1))
    finished = samerun(folder, "--out", tmp_path / "out", limits={resource.RLIMIT_AS: 100 * MIB})
    assert finished.returncode == 0, finished.stderr
    assert_equal(tmp_path / "out" / "model.safetensors", {"a": weight, "b": weight, **BUFFERS})
    finished = samerun(folder, "--out", tmp_path / "full" / "out.safetensors", limits={resource.RLIMIT_FSIZE: MIB})
    assert finished.returncode == CheckpointError.exit_code
    assert "out.safetensors cannot be written: File too large." in finished.stderr
    assert list((tmp_path / "full").iterdir()) == []
