"""The norm of a large gradient, by which a step is clipped, is the same under every preset, and right.

With SGD, because Adam divides the factor out again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import losses, train

pytestmark = pytest.mark.multiproc
LONG = pytest.mark.long
RECIPE = ("--recipe", str(Path(__file__).with_name("wide.yaml")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "cpu"
    train("cpu", folder, *RECIPE).check()
    return folder


def test_the_logged_norm_is_that_of_float64(alone: Path, tmp_path: Path) -> None:
    train("cpu", tmp_path, *RECIPE, "train.dtype=float64", "train.steps=3").check()
    assert losses(alone, "grad_norm")[:3] == pytest.approx(losses(tmp_path, "grad_norm"), rel=2e-6)


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
    alone: Path, tmp_path: Path, preset: str, processes: int, sizes: dict[str, str]
) -> None:
    train(preset, tmp_path, *RECIPE, processes=processes, env=sizes).check()
    norms, others = losses(alone, "grad_norm"), losses(tmp_path, "grad_norm")
    assert len(norms) == 20
    assert min(norms) > 0.1, "not all were clipped"
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-5)
    assert others[0] == pytest.approx(norms[0], rel=1e-6)
