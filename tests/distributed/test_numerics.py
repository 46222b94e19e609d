"""What torch is told of float32 and of determinism is what the recipe says: set once, said, and kept with the run."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import SCRIPTS, Started, accelerate, read, run, train

from app.distributed import numerics
from app.distributed.numerics import Numerics
from app.errors import RecipeError
from app.recipe.schema import TrainRecipe

SCRIPT = SCRIPTS / "numerics.py"
Script: Any = runpy.run_path(str(SCRIPT))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)  # what torch is told of a GPU can be read where there is none
OFTEN = ("cuda.matmul", "cudnn")
IEEE = {
    **dict.fromkeys((*OFTEN, "mkldnn.matmul"), "ieee"),
    **dict.fromkeys(("cuda.matmul.allow_tf32", "cudnn.allow_tf32", "cudnn.benchmark"), False),
    "float32_matmul": "highest",
}
TF32 = {
    **IEEE,
    **dict.fromkeys(OFTEN, "tf32"),
    "cuda.matmul.allow_tf32": True,
    "cudnn.allow_tf32": True,
    "float32_matmul": "high",
}
SHORT = ("--recipe", "digits", "train.steps=4", "log.every_steps=1", "optim.warmup_epochs=0.1", "checkpoint.every_steps=2")


def all_of(settings: dict[str, Any], *, deterministic: bool) -> dict[str, Any]:
    return {**settings, "cudnn.deterministic": deterministic, "deterministic algorithms": deterministic}


@pytest.fixture
def _spoilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another library has had its say; afterwards torch is as the rest of the tests find it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    Script["spoil"]()
    yield
    numerics.set_up(CPU, tf32=False, deterministic=False)


@pytest.mark.usefixtures("_spoilt")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("device", "tf32", "expected"), [(GPU, False, IEEE), (GPU, True, TF32), (CPU, True, IEEE)])
def test_torch_is_told_by_every_name_what_was_asked_for(
    device: torch.device, tf32: bool, deterministic: bool, expected: dict[str, Any]
) -> None:
    found = numerics.set_up(device, tf32=tf32, deterministic=deterministic)
    assert Script["settings"]() == all_of(expected, deterministic=deterministic)
    assert found == Numerics(tf32=expected is TF32, deterministic=deterministic)
    assert numerics.rounds_to_tf32(device) is (expected is TF32)
    assert str(found).startswith("float32 products in TF32" if found.tf32 else "float32 products in IEEE float32")


@pytest.mark.usefixtures("_spoilt")
def test_cublas_has_a_fixed_workspace_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics.set_up(GPU, tf32=False, deterministic=False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    numerics.set_up(GPU, tf32=False, deterministic=True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(RecipeError, match=r"train\.deterministic is true, and CUBLAS_WORKSPACE_CONFIG is ':0:0' .* unset it"):
        numerics.set_up(GPU, tf32=False, deterministic=True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    numerics.set_up(GPU, tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("_spoilt")
def test_an_operation_without_a_deterministic_kernel_is_refused_in_a_sentence() -> None:
    numerics.set_up(CPU, tf32=False, deterministic=True)
    with pytest.raises(RecipeError, match=r"train\.deterministic is true, and torch .* has no deterministic kernel for put_:"):  # noqa: SIM117
        with numerics.refusals_named():
            torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), numerics.refusals_named():
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.usefixtures("_spoilt")
def test_images_are_in_the_order_of_tensor_cores_where_these_compute() -> None:
    def ordered(
        device: torch.device, mixed_precision: str, *, tf32: bool = False, name: str = "resnet50", **train: Any
    ) -> bool:
        numerics.set_up(device, tf32=tf32, deterministic=False)
        tensor_cores = numerics.on_tensor_cores(device, mixed_precision=mixed_precision)
        return TrainRecipe(**train).takes_channels_last(tensor_cores=tensor_cores, preferred=name == "convnet")

    assert [ordered(GPU, precision) for precision in ("no", "bf16", "fp16")] == [False, True, True]
    assert ordered(GPU, "no", tf32=True)
    assert not any(ordered(CPU, precision, tf32=True) for precision in ("no", "bf16"))
    assert not ordered(GPU, "bf16", channels_last=False)
    assert ordered(CPU, "no", channels_last=True)
    assert ordered(CPU, "no", name="convnet")


@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["deepspeed_zero3", "fsdp2"])
def test_presets_compute_as_the_recipe_says_whatever_was_set_before(preset: str, tmp_path: Path) -> None:
    run(preset, 2, str(SCRIPT), str(tmp_path / "found"), "1", "1").check()
    assert read(tmp_path / "found") == all_of(IEEE, deterministic=True)


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("switch", ["--dynamo_backend=no", "--dynamo_backend=inductor"])
def test_a_gpu_rounds_to_tf32_only_if_it_was_asked_to(switch: str, tf32: bool, tmp_path: Path) -> None:
    """Accelerate turns it on for compiled models without mixed precision, on GPUs alone."""
    command = accelerate("single_gpu", switch, target=(str(SCRIPT), str(tmp_path / "found"), str(int(tf32)), "0"))
    Started(command).wait().check()
    assert read(tmp_path / "found") == all_of(TF32 if tf32 else IEEE, deterministic=False)


@pytest.mark.multiproc
def test_a_run_says_how_it_computes(tmp_path: Path) -> None:
    usual, other = tmp_path / "usual", tmp_path / "other"
    said = train("cpu", usual, *SHORT).check().output
    assert "mixed_precision no, float32 products in IEEE float32\n" in said
    said = train("cpu", other, *SHORT, "train.tf32=true", "train.deterministic=true").check().output
    assert "float32 products in IEEE float32, deterministic kernels only" in said  # a CPU has no TF32
    assert [read(folder / "run.json")["deterministic"] for folder in (usual, other)] == [False, True]
    assert [read(folder / "run.json")["tf32"] for folder in (usual, other)] == [False, False]
    # A CPU's kernels give the same bits each time anyway, and no other ones when asked to.
    assert (usual / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
