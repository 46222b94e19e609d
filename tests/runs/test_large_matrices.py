"""The norm of a large gradient, by which a step is clipped, is the same under every preset, and right.

With SGD, because Adam divides the factor out again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import read_lines, train

pytestmark = pytest.mark.multiproc
LONG = pytest.mark.long
RECIPE = ("--recipe", str(Path(__file__).with_name("wide.yaml")))


def lines(folder: Path, preset: str, processes: int, *arguments: str, sizes: dict[str, str] | None = None) -> Any:
    train(preset, folder, *RECIPE, *arguments, processes=processes, env=sizes).check()
    return read_lines(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lines(tmp_path_factory.mktemp("alone") / "cpu", "cpu", 1)


def test_the_logged_norm_is_that_of_float64(alone: Any, tmp_path: Path) -> None:
    exact = lines(tmp_path / "exact", "cpu", 1, "train.dtype=float64", "train.steps=3")
    for one, other in zip(alone, exact, strict=False):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-6)


@pytest.mark.parametrize(
    ("preset", "processes", "sizes"),
    [
        ("fsdp2", 2, {}),
        ("deepspeed_zero2", 2, {}),
        pytest.param("hsdp", 4, {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, marks=LONG),
        pytest.param("deepspeed_zero3", 2, {}, marks=LONG),
        pytest.param("tensor_parallel", 4, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, marks=LONG),
    ],
)
def test_clipped_steps_are_those_of_one_process(
    alone: Any, tmp_path: Path, preset: str, processes: int, sizes: dict[str, str]
) -> None:
    other = lines(tmp_path / preset, preset, processes, sizes=sizes)
    norms = [line["grad_norm"] for line in alone]
    assert len(norms) == 20
    assert min(norms) > 0.1, "not all were clipped"
    off = {key: max(abs(a[key] / b[key] - 1) for a, b in zip(other, alone, strict=True)) for key in ("loss", "grad_norm")}
    print(f"{preset}-{processes}: largest relative difference of a loss {off['loss']:.1e}, of a norm {off['grad_norm']:.1e}")
    assert off["loss"] <= 1e-5
    assert other[0]["grad_norm"] == pytest.approx(norms[0], rel=1e-6)
