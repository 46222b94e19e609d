"""Own models: shared blocks, and parameters without dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import read_lines, run, train

from launch import cli

pytestmark = pytest.mark.multiproc

TASK = """
import torch
from torch import nn
from torch.nn import functional as F

from app.task import Loss, Samples


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.inner(x)))


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(32, 1)
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * self.logit_scale.exp()


def points(split):
    x = torch.randn({"train": 48, "validation": 12, "test": 12}[split], 8, generator=torch.Generator().manual_seed(len(split)))
    return {"x": x, "y": x.sin().sum(1)}


class Base:
    blocks = ("Layer",)

    def samples(self, split):
        return Samples.of(points(split))

    def model(self, metadata):
        one = Layer()
        return nn.Sequential(nn.Linear(8, 32), one, one, Layer(), one, nn.Linear(32, 1), nn.Flatten(0))

    def loss(self, model, batch):
        return Loss(F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"]))

    def export_files(self, metadata, info):
        return {"steps.txt": str(info["steps"]).encode()}
"""
ENDS = {
    "shared": "task = Base",
    "drawn": """
class Drawn(Base):
    def init_module(self, model, name, module):
        for part in module.modules() if isinstance(module, Layer) else [module]:
            if isinstance(part, nn.Linear):
                part.reset_parameters()


task = Drawn
""",
    "scalar": """
class Scalar(Base):
    def model(self, metadata):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), Scaled(), nn.Flatten(0))


task = Scalar
""",
}


def recipe(folder: Path, kind: str) -> Path:
    (folder / f"{kind}.py").write_text(TASK + ENDS[kind])
    written = folder / f"{kind}.yaml"
    written.write_text(
        f"task: {kind}.py\ntrain: {{global_batch_size: 16, steps: 4, max_micro_batch: 8}}\nlog: {{every_steps: 1}}\n"
        "checkpoint: {every_steps: 2}\n"
    )
    return written


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("kind", ["shared", "drawn"])
def test_a_module_in_several_places_trains_alike_resumes_and_is_exported(tmp_path: Path, kind: str) -> None:
    arguments = ("--recipe", str(recipe(tmp_path, kind)))
    train("cpu", tmp_path / "alone", *arguments).check()
    one = losses(tmp_path / "alone")
    assert len(set(one)) == 4
    sharded = {"shared": "fsdp2", "drawn": "deepspeed_zero3"}[kind], {"shared": "deepspeed_zero3", "drawn": "fsdp2"}[kind]
    train(sharded[0], tmp_path / "sharded", *arguments, processes=2).check()
    assert losses(tmp_path / "sharded") == pytest.approx(one, rel=1e-5)
    step = tmp_path / "sharded" / "checkpoints" / "step-00000002"
    train(sharded[1], tmp_path / "resumed", *arguments, "--resume", str(step), processes=2).check()
    assert losses(tmp_path / "resumed") == pytest.approx(one[2:], rel=1e-5)
    assert cli.main(["export", str(tmp_path / "resumed"), "--to", "torch"]) == 0
    exported = tmp_path / "resumed" / "exported" / "step-00000004"
    assert (exported / "steps.txt").read_text() == "4"
    run("cpu", 1, "app.evaluate", str(exported), "--json").check()


def test_a_parameter_without_dimensions_is_refused_where_it_cannot_be_trained(tmp_path: Path) -> None:
    ended = train("fsdp2", tmp_path / "run", "--recipe", str(recipe(tmp_path, "scalar")), processes=1)
    said = "2.logit_scale of the model has no dimensions, and FSDP2 and DeepSpeed do not train such parameters: make"
    assert ended.returncode == 4
    assert said in ended.output
    assert "Traceback" not in ended.output
    assert not (tmp_path / "run").exists()
