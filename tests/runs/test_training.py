"""Whole runs: what a user starts and what is left in the run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from PIL import Image
from processes import REPOSITORY, Finished, Started, accelerate, read, read_lines, train
from safetensors.torch import load_file

from app.errors import DataError
from app.recipe.schema import Recipe
from app.tasks.image_classification.data.open import open_data

pytestmark = pytest.mark.multiproc

SHORT = ("--recipe", "digits", "train.epochs=2", "optim.warmup_epochs=0.5")


def alone(run_dir: Path, *arguments: str) -> Finished:
    """One process, whose exit code is the run's own."""
    return train("cpu", run_dir, *SHORT, *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs on two processes, with every file a run can leave."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    target = ("-m", "app.train", "--run-dir", str(folder), *SHORT, "log.samples=true", "log.every_steps=5")
    Started(accelerate("multi_gpu", target=target, processes=2)).wait().check()
    return folder


def test_the_run_folder_holds_all_that_is_promised(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"recipe.yaml", "preset.yaml", "run.json", "metrics.jsonl", "evaluations.jsonl", "result.json"}
    assert names >= {"samples.jsonl", "model.safetensors", "model.json"}
    assert not [name for name in names if name.startswith(".")]
    assert (run / "preset.yaml").read_text() == (REPOSITORY / "accelerate_configs" / "multi_gpu.yaml").read_text()
    facts = read(run / "run.json")
    assert facts["preset"] == "multi_gpu"
    assert (facts["world_size"], facts["micro_batch"], facts["accumulation"]) == (2, 32, 1)
    assert len(facts["ranks"]) == 2
    assert facts["versions"]["torch"] == torch.__version__
    assert (facts["commit"] is not None) == (REPOSITORY / ".git").exists()
    assert any(run.rglob("events.out.tfevents.*")), "TensorBoard is on by default"
    lines, steps = read_lines(run / "metrics.jsonl"), 2 * (1294 // 64)
    assert [line["step"] for line in lines] == [*range(5, steps, 5), steps]
    assert {"samples_seen", "epoch", "loss", "learning_rate", "samples_per_s", "data_wait_share"} <= lines[0].keys()
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    weights = load_file(run / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert not [name for name in weights if name.startswith(("module.", "_orig_mod."))]


def test_the_result_counts_every_test_sample(run: Path) -> None:
    result = read(run / "result.json")
    assert result["test_samples"] == 359
    assert (result["steps"], result["samples_seen"], result["world_size"], result["preset"]) == (40, 40 * 64, 2, "multi_gpu")
    assert result["test_accuracy"] > 0.8
    *looked_at, tested = read_lines(run / "evaluations.jsonl")
    assert result["test_accuracy"] == tested["test_accuracy"]
    assert [line["step"] for line in looked_at] == [20, 40]
    assert result["validation_accuracy"] == looked_at[-1]["validation_accuracy"]
    assert result["validation_samples"] == 144
    assert not [name for line in looked_at for name in line if name.startswith("test_")]


def test_other_data_needs_the_classes_of_the_model(run: Path, tmp_path: Path) -> None:
    def evaluate(*keys: str) -> Finished:
        return processes.run("cpu", 1, "app.evaluate", str(run), "--json", *keys)

    images, labels = (tensor.numpy() for tensor in open_data(Recipe().sections)["test"].fetch(np.arange(359), None).values())
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        (tmp_path / "test" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(tmp_path / "test" / str(label) / f"{index}.png")
    there = ("data.source=imagefolder", "data.image_size=8", f"data.path={tmp_path}")
    own, other = (
        json.loads(evaluate(*keys).check().output.splitlines()[-1])
        for keys in ((), (*there, "data.color=gray", "--split", "test"))
    )
    assert other["class_accuracy"] == own["class_accuracy"]
    result = read(run / "result.json")
    assert (own["split"], own["samples"], own["accuracy"]) == ("test", result["test_samples"], result["test_accuracy"])
    assert own["loss"] == pytest.approx(result["test_loss"], rel=1e-6)
    (tmp_path / "test" / "9").rename(tmp_path / "test" / "nine")
    refused = evaluate(*there, "data.color=gray")
    assert refused.returncode == DataError.exit_code
    assert "are not those that the run was trained on, in their order (9, nine differ): give the data" in refused.output


def test_predicting_a_picture(run: Path, tmp_path: Path) -> None:
    with np.load(REPOSITORY / "app/tasks/image_classification/data/digits.npz") as digits:
        images, labels = digits["images"], digits["labels"]
    files = []
    for index in range(50):
        pixels = images[index] if images.max() > 16 else (images[index] * 255.0 / 16).round().astype("uint8")
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        files.append(str(tmp_path / f"{index}.png"))
    finished = Started([sys.executable, "-m", "app.predict", str(run), *files, "--json", "--top", "1"]).wait().check()
    predictions = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    right = sum(prediction["classes"][0] == str(labels[index]) for index, prediction in enumerate(predictions))
    assert len(predictions) == 50
    assert right >= 40


def test_a_run_folder_that_holds_a_run_is_not_overwritten(run: Path) -> None:
    before = (run / "result.json").read_bytes()
    finished = alone(run)
    assert finished.returncode == 7
    assert "RunFolderError" in finished.output
    assert "holds a run already" in finished.output
    assert (run / "result.json").read_bytes() == before


def test_printing_the_recipe_needs_no_torch() -> None:
    check = (
        "import sys; from app.train import main; main(['--recipe', 'digits', '--print-recipe', 'optim.lr=0.5']);"
        "assert 'torch' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "command line" in finished.stdout
    assert "digits.yaml:" in finished.stdout


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_is_trained_as_it_is(tmp_path: Path) -> None:
    arguments = ("--recipe", "digits", "train.steps=2", "log.every_steps=1")
    plain, uncompiled = tmp_path / "plain", tmp_path / "uncompiled"
    processes.train("cpu", plain, *arguments).check()
    target = ("-m", "app.train", "--run-dir", str(uncompiled), "--trackers", "none", *arguments)
    command = accelerate("cpu", "--dynamo_backend", "inductor", target=target)
    nothing_compiled_before = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    output = Started(command, env={"CXX": "/bin/false", **nothing_compiled_before}).wait().check().output
    assert output.count("torch.compile failed (InductorError: InvalidCxxCompiler") == 1
    assert "Traceback" not in output
    assert [line["loss"] for line in read_lines(uncompiled / "metrics.jsonl")] == [
        line["loss"] for line in read_lines(plain / "metrics.jsonl")
    ]
