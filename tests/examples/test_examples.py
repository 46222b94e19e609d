"""Each example is the same run under every strategy, and short enough to be read aloud."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_data
import pytest
from processes import REPOSITORY, read, read_lines, train

from app.checkpoints import step_folders
from app.tools.verify import verify

EXAMPLES = REPOSITORY / "examples"
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py"))
STEPS, FIFTH, BATCH, MOST_LINES = 20, 4, 24, 60
SHORT = (f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", "log.every_steps=1", "log.samples=true",
         "optim.warmup_epochs=null", f"checkpoint.every_steps={FIFTH}", "checkpoint.keep_last=5")  # fmt: skip
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


def assert_same(found: Path, reference: Path, *, after: int = 0) -> None:
    """Samples and rates exactly; losses, gradient norms and scores within rounding."""
    lines, expected = (read_lines(it / "metrics.jsonl")[-(STEPS - after) :] for it in (found, reference))
    samples = [read_lines(it / "samples.jsonl")[-(STEPS - after) :] for it in (found, reference)]
    assert samples[0] == samples[1]
    for name in ("step", "learning_rate"):
        assert [line[name] for line in lines] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in expected], rel=1e-5), name
    scores = [_scores(it) for it in (found, reference)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert len(scores[0]) >= 2
    assert verify(found)[0].is_good


def _scores(run_dir: Path) -> dict[str, float]:
    counted = ("test_", "validation_")
    return {name: value for name, value in read(run_dir / "result.json").items() if name.startswith(counted)}


def test_there_are_seven_and_each_is_a_file_to_read_aloud() -> None:
    assert len(NAMES) == 7
    told = (EXAMPLES / "README.md").read_text()
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MOST_LINES, name
        assert f"{name}.yaml" in told, name


def cases() -> list[Any]:
    """FSDP2 at once, and what else is sharded or not when there is time."""
    others = [("multi_gpu", pytest.mark.long), ("deepspeed_zero3", pytest.mark.slow), ("fsdp2", ())]
    return [pytest.param(name, preset, id=f"{name}-{preset}", marks=marks) for name in NAMES for preset, marks in others]


@pytest.mark.multiproc
@pytest.mark.parametrize(("name", "preset"), cases())
def test_two_processes_train_as_one_does(runs: Runs, name: str, preset: str) -> None:
    assert_same(runs.go(name, preset, 2, HALVES), runs.alone(name))


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_larger_model_of_transformers_is_divided_by_its_layers(runs: Runs) -> None:
    """By size, a list of layers would be one part, which torch refuses; and BERT's embeddings would be divided twice."""
    larger = ("model.width=512", "model.layers=2", "train.steps=4", HALVES)
    assert_same(runs.go("text", "fsdp2", 2, *larger), runs.go("text", "cpu", 1, *larger))


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("name", ["segmentation", "distillation", pytest.param("foreign_dataset", marks=pytest.mark.long)])
def test_a_run_goes_from_preset_to_preset(runs: Runs, name: str) -> None:
    """Pixels that are counted over the ranks; a part that is frozen; samples that workers make, changed at random."""
    before = runs.go(name, "multi_gpu", 3)
    assert_same(before, runs.alone(name))
    others = [("deepspeed_zero3", 2), ("fsdp2", 3), ("multi_gpu", 2), ("cpu", 1)]
    for after, (preset, processes) in zip(range(FIFTH, STEPS, FIFTH), others, strict=True):
        saved = step_folders.path_of(before, after)
        before = runs.go(name, preset, processes, "--resume", str(saved))
        assert_same(before, runs.alone(name), after=after)


def test_the_table_has_the_features_that_were_promised(runs: Runs) -> None:
    assert read(runs.alone("table") / "model.json")["facts"]["features"] == 113
