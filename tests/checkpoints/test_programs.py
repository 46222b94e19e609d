"""`samerun export --to torch|onnx`: a file that computes what the model does without our code, and the model card beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from processes import train
from torch import nn

from app import export
from app.checkpoints import programs
from app.errors import RunFolderError
from app.task import Loss


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    words = ("train.steps=3", "checkpoint.every_steps=3", "data.mean=0.25", "data.std=0.5")
    train("cpu", run_dir, "--recipe", "digits", *words, processes=1).check()
    return run_dir


def executed(text: str, number: int, **given: Any) -> dict[str, Any]:
    """The names that a code block of a model card leaves."""
    found = dict(given)
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number], found)
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("to", ["torch", "onnx"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:onnxscript")
def test_a_program_computes_what_the_model_does(run: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the card says: its code is run as it stands there, on another number of samples than were tried."""
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="needs onnxruntime (extra onnx)")
    out = tmp_path / "out"
    assert export.main([str(run), "--out", str(out), "--to", to]) == 0
    file = {"torch": "model.pt2", "onnx": "model.onnx"}[to]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["README.md", "config.json", "model.json", file, "model.safetensors", "preprocessor_config.json", "recipe.yaml"]
    )
    assert "its inputs are inputs. For 1 and 5 samples its outputs differ from the model's" in capsys.readouterr().out
    text = (out / "README.md").read_text().replace("THIS_FOLDER", str(out))
    model = executed(text, 0)["model"]
    inputs = torch.randn(7, 1, 8, 8)
    with torch.no_grad():
        expected = model(inputs)
        outputs = executed(text, 1, inputs=inputs if to == "torch" else inputs.numpy())["outputs"]
    found = outputs if to == "torch" else torch.from_numpy(outputs[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 if to == "onnx" else 1e-6)
    with pytest.raises(RunFolderError, match=rf"{file}, \S*model.safetensors exists already: choose another --out, or"):
        export.main([str(run), "--out", str(out), "--to", to])


@pytest.mark.multiproc
def test_the_card_is_one_of_the_hub_and_names_no_place(run: Path, tmp_path: Path) -> None:
    assert export.main([str(run), "--out", str(tmp_path)]) == 0
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("samerun", "image-classification")
    told = json.loads((run / "result.json").read_text())
    assert f"| test accuracy | {told['test_accuracy']:.4f} |" in card.text
    assert "mean 0.25; standard deviation 0.5" in card.text
    assert str(run.parent) not in card.content


class Branches(nn.Module):
    """Cannot be exported: its output depends on a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.sum() > 0 else x


class Random(nn.Module):
    """Returns another value each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Branches(), r"^the model cannot be exported to torch: \w+: "),
        (Random(), r"^exported to torch, the model computes other values: for 1 or 5 samples its outputs differ by"),
    ],
)
def test_a_program_that_is_not_the_model_leaves_no_file(model: nn.Module, why: str, tmp_path: Path) -> None:
    model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    task = SimpleNamespace(
        example=lambda facts, form: {"x": torch.empty(2, 2, device="meta"), "samples": torch.arange(2, device="meta")},
        loss=lambda called, batch: Loss(called(batch["x"]).sum(), 2),
    )
    with pytest.raises(RunFolderError, match=why):
        programs.write(task, model.eval(), {}, tmp_path / "model.pt2", to="torch")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
