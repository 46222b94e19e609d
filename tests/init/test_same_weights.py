"""Initial weights under every preset and on any number of processes: the same bits, of which each holds its share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import SCRIPTS, read, run

pytestmark = pytest.mark.multiproc

COPIES = {"hsdp": 2}
"""Each of which is divided."""
SLOW, LONG = pytest.mark.slow, pytest.mark.long
TOPOLOGIES = [
    ("deepspeed_zero3", 3),
    ("fsdp2", 2),
    *(pytest.param(*it, marks=SLOW) for it in (("multi_gpu", 3), ("deepspeed_zero3_offload", 2), ("hsdp", 4))),
    *(pytest.param(*it, marks=LONG) for it in (("deepspeed_zero1", 2), ("deepspeed_zero3", 4), ("fsdp2", 1), ("fsdp2", 3))),
]


def looked(folder: Path, preset: str, processes: int, kinds: str = "llama,gpt2", env: Any = None) -> dict[str, Any]:
    out = folder / f"{preset}-{processes}.json"
    run(preset, processes, str(SCRIPTS / "initial.py"), str(out), kinds, env=env).check()
    return read(out)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return looked(tmp_path_factory.mktemp("alone"), "cpu", 1, "llama,gpt2,plain,twelve,twelve_tied")


@pytest.mark.parametrize(("preset", "processes"), TOPOLOGIES)
def test_weights_are_the_same_bits(alone: dict[str, Any], tmp_path: Path, preset: str, processes: int) -> None:
    env = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(COPIES[preset])} if preset in COPIES else None
    there = looked(tmp_path, preset, processes, env=env)
    for kind, found in there.items():
        whole = alone[kind]
        assert found["drawn"] == whole["drawn"] * processes
        assert found["held"] == whole["held"] == whole["drawn"][0]
        assert found["prepared"] == whole["prepared"]
        assert found["buffers"] == whole["buffers"] * processes
        assert found["names"] == whole["names"]  # what is tied is one
        is_divided = preset in ("fsdp2", "hsdp", "deepspeed_zero3", "deepspeed_zero3_offload")
        copies = COPIES.get(preset, 1) if is_divided else processes
        assert sum(found["shares"]) == found["whole"] * copies
        assert max(found["shares"]) <= found["whole"] * (1.15 * copies / processes if is_divided else 1)


@pytest.mark.parametrize(("processes", "parts"), [(2, 2), pytest.param(4, 2, marks=SLOW), pytest.param(3, 3, marks=LONG)])
def test_tensor_parallelism_divides_the_same_bits(alone: dict[str, Any], tmp_path: Path, processes: int, parts: int) -> None:
    env = {"PARALLELISM_CONFIG_TP_SIZE": str(parts)}
    for kind, found in looked(tmp_path, "tensor_parallel", processes, "twelve,twelve_tied", env).items():
        whole = alone[kind]
        assert found["drawn"] == whole["drawn"] * processes
        assert found["held"] == whole["held"] == whole["drawn"][0]
        assert (found["prepared"], found["names"]) == (whole["prepared"], whole["names"])
        assert max(found["shares"]) <= found["whole"] * 1.15 / processes  # all but norms is divided
        if processes == parts:  # each process steps on norms by itself
            assert found["stepped"] == [found["stepped"][0]] * processes
            assert len({values for _, _, values in found["stepped"][0]}) == 5
            assert found["stepped"][0][0][1] == 7 * 48


def test_transformers_does_not_draw_other_weights_under_zero_3(alone: dict[str, Any], tmp_path: Path) -> None:
    """A task without `init` that builds its model by `from_config`, which would use `deepspeed.zero.Init`."""
    there = looked(tmp_path, "deepspeed_zero3", 2, "plain")
    assert there["plain"]["held"] == alone["plain"]["held"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "compiler"), [("fsdp2", "NO"), ("fsdp2", "AOT_EAGER"), ("deepspeed_zero3", "NO"), ("tensor_parallel", "NO")]
)
def test_no_process_ever_holds_the_whole(tmp_path: Path, figure: Callable[[str], None], preset: str, compiler: str) -> None:
    """A model of 334 million parameters: while it is built a process has its share and the largest unit, an embedding."""
    built = (str(SCRIPTS / "built_peak.py"), str(tmp_path / "found.json"))
    run(preset, 2, *built, env={"ACCELERATE_DYNAMO_BACKEND": compiler}).check()
    for rank, found in enumerate(read(tmp_path / "found.json")):  # type: ignore[arg-type]
        figure(f"rank {rank}, MiB: {', '.join(f'{key} {value:.0f}' for key, value in found.items())}")  # type: ignore[attr-defined]
        assert found["share"] == pytest.approx(found["whole"] / 2, rel=0.01)  # type: ignore[index]
        assert found["peak"] <= 1.1 * (found["share"] + found["largest"])  # type: ignore[index]
