"""Each example is the same run under every strategy."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import made_data
import pytest
from processes import REPOSITORY, read, read_lines, train

from app.checks.verify import verify

EXAMPLES = REPOSITORY / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))
assert len(NAMES) == 7
STEPS, BATCH = 20, 24
SHORT = (f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", "log.every_steps=1", "log.samples=true",
         "optim.warmup_epochs=null")  # fmt: skip
HALVES = f"train.max_micro_batch={BATCH // 4}"
"""Two passes a step on two processes."""


@dataclass(frozen=True)
class Runs:
    """Each started when first asked for."""

    folder: Path

    @functools.cache  # noqa: B019 - the one instance lives as long as its tests
    def data(self, name: str) -> tuple[str, ...]:
        """What an example needs to be told here."""
        if name == "table":
            return (f"data.path={made_data.nsl_kdd(self.folder / 'table')}",)
        if name == "foreign_dataset":
            return (f"data.path={made_data.pictures(self.folder / 'pictures')}",)
        if name == "distillation":
            teacher = self.folder / "teacher"
            train("cpu", teacher, "--recipe", str(EXAMPLES / "distillation.yaml"), "model.width=256", "train.epochs=2").check()
            return (f"model.teacher={teacher / 'model.safetensors'}",)
        return ()

    def go(self, name: str, preset: str, processes: int, *arguments: str) -> Path:
        run_dir = self.folder / f"{name}-{preset}-{processes}-{len(list(self.folder.iterdir()))}"
        recipe = ("--recipe", str(EXAMPLES / f"{name}.yaml"))
        train(preset, run_dir, *recipe, *SHORT, *self.data(name), *arguments, processes=processes).check()
        assert read(run_dir / "run.json")["world_size"] == processes
        return run_dir

    @functools.cache  # noqa: B019
    def alone(self, name: str) -> Path:
        return self.go(name, "cpu", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def assert_same(found: Path, reference: Path) -> None:
    """Samples and rates exactly; losses, gradient norms and scores within rounding."""
    lines, expected = (read_lines(it / "metrics.jsonl") for it in (found, reference))
    assert read_lines(found / "samples.jsonl") == read_lines(reference / "samples.jsonl")
    assert len(lines) == STEPS
    for name in ("step", "learning_rate"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-5), name
    results = [read(it / "result.json").items() for it in (found, reference)]
    scores = [{name: it for name, it in result if name.startswith(("test_", "validation_"))} for result in results]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert len(scores[0]) >= 2
    assert verify(found)[0].is_good


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "text")) for name in NAMES])
@pytest.mark.parametrize("preset", ["fsdp2", pytest.param("deepspeed_zero3", marks=pytest.mark.long)])
def test_two_processes_train_as_one_does(runs: Runs, name: str, preset: str) -> None:
    assert_same(runs.go(name, preset, 2, HALVES), runs.alone(name))
