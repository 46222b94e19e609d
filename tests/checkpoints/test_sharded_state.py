"""The tensors of a run under every strategy: together complete, the same as in plain torch, and enough to go on elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import REPOSITORY, SCRIPTS, run
from scripts import shards as script

from app.checkpoints import step_folders
from app.checkpoints.sharded_state import Shards
from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import CheckpointError
from app.optim import parameter_groups
from app.recipe.schema import BatchPlan


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, script.Record]]:
    """What plain torch makes of every case, in a file and as it is."""
    records = {name: script.reference(case) for name, case in script.CASES.items()}
    file = tmp_path_factory.mktemp("reference") / "left.pt"
    script.write_records(records, file)
    return file, records


ON_PARTS = "nadam,rmsprop,adam,radam,adamax,adadelta"


def whole(ranks: list[list[Any]]) -> script.Tensors:
    """All ranks' pieces put together: raises an assertion if an element is missing or there twice."""
    assert all(ranks), "a rank writes nothing"
    parts: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, torch.Tensor]]] = {}
    for key, name, shape, start, values in (piece for pieces in ranks for piece in pieces):
        parts.setdefault((key, name, shape), []).append((start, values))
    tensors: script.Tensors = {}
    for (key, name, shape), ranges in parts.items():
        ranges.sort(key=lambda part: part[0])
        ends = [start + len(values) for start, values in ranges]
        assert [start for start, _ in ranges] == [0, *ends[:-1]], f"{key} of {name}: {ranges}"
        tensors.setdefault(key, {})[name] = torch.cat([values for _, values in ranges]).view(shape)
    return tensors


def assert_same(found: script.Record, expected: script.Record, *, tolerance: float) -> None:
    assert found.scalars == expected.scalars
    assert found.seen == expected.seen
    assert found.losses == pytest.approx(expected.losses, rel=10 * tolerance)
    assert found.averaged_losses == pytest.approx(expected.averaged_losses, rel=10 * tolerance)
    assert len(found.tensors) == len(expected.tensors) == 2
    for ranks, tensors in zip(found.tensors, expected.tensors, strict=True):
        together = whole(ranks)
        assert {key: set(of) for key, of in together.items()} == {key: set(of) for key, of in tensors.items()}
        for key, of in tensors.items():
            for name, values in of.items():
                torch.testing.assert_close(
                    together[key][name], values, rtol=10 * tolerance, atol=tolerance, msg=f"{key} {name}"
                )


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("preset", "cases"),
    [
        pytest.param("multi_gpu", "adamw,sgd,float64,nadam,adagrad,adafactor", marks=pytest.mark.slow),
        ("deepspeed_zero1", f"adamw,sgd,{ON_PARTS}"),
        ("deepspeed_zero2", "adamw,sgd,nadam"),
        ("deepspeed_zero3", f"adamw,sgd,{ON_PARTS}"),
        ("deepspeed_zero3_offload", "adamw,nadam"),
        ("fsdp2", f"adamw,sgd,float64,gathered,{ON_PARTS}"),
    ],
)
def test_two_processes_hold_what_one_does_and_go_on_from_it(
    left: tuple[Path, dict[str, script.Record]], tmp_path: Path, preset: str, cases: str
) -> None:
    run(preset, 2, str(SCRIPTS / "shards.py"), cases, str(left[0]), str(tmp_path / "found.pt")).check()
    found = script.read_records(tmp_path / "found.pt")
    assert list(found) == cases.split(",")
    for name, record in found.items():
        assert_same(record, left[1][name], tolerance=1e-12 if name == "float64" else 1e-6)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=script.BATCH, data_ranks=1, accumulation=1))


@pytest.mark.parametrize("name", sorted(script.CASES.keys() - {"gathered"}))
def test_one_process_does_so_too(runtime: Runtime, left: tuple[Path, dict[str, script.Record]], name: str) -> None:
    record = script.run(runtime, script.CASES[name], left[1][name])
    assert_same(record, left[1][name], tolerance=1e-12 if name == "float64" else 1e-6)


def test_the_state_of_another_optimizer_is_refused(runtime: Runtime) -> None:
    model = script.build(script.CASES["adamw"], seed=0)
    shards = Shards(runtime.accelerator, *runtime.prepare(model, parameter_groups.build_optimizer(script.SGD, model)))
    with pytest.raises(CheckpointError, match=r"exp_avg and exp_avg_sq.*SGD, uses momentum_buffer"):
        shards.allocate_state({"weight", "exp_avg", "exp_avg_sq"}, {"step": 3.0})


LAYOUTS = ["ddp", "fsdp2", "hsdp", "tp2_fsdp2", "tp4", "tp1_fsdp2"]


@pytest.mark.multiproc
@pytest.mark.slow
def test_what_is_saved_under_one_layout_is_read_under_every_other(tmp_path: Path) -> None:
    """Rows, columns, rows of columns and copies of them, also where nothing comes out even."""
    command = [sys.executable, str(SCRIPTS / "layouts.py"), str(tmp_path)]
    finished = subprocess.run(
        command, cwd=REPOSITORY, env={"PATH": "", "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.split("\n")[:-1] == [f"{layout}: {len(LAYOUTS)}" for layout in LAYOUTS]
    weights = {layout: step_folders.Reader(step_folders.path_of(tmp_path / layout, 1)).tensors("weight") for layout in LAYOUTS}
    columns = {layout: any(at.runs > 1 for it in of.values() for at, _ in it.ranges) for layout, of in weights.items()}
    assert [layout for layout, has in columns.items() if has] == ["tp2_fsdp2", "tp4"]
