"""Samples that weigh differently: a step's gradient is that of the mean over its global batch, whoever had how much of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import SCRIPTS, read, run

WHOLE, HALVES = 16, 4
"""Most samples of a micro-batch: a step in one pass of each process, and in several."""
CASES = [
    ("cpu", 1, HALVES),
    ("multi_gpu", 2, HALVES),
    ("deepspeed_zero2", 2, HALVES),
    ("deepspeed_zero3", 2, HALVES),
    ("fsdp2", 2, WHOLE),
]


def found(folder: Path, preset: str, processes: int, *words: object) -> dict[str, Any]:
    out = folder / "-".join(map(str, (preset, processes, *words)))
    run(preset, processes, str(SCRIPTS / "ragged.py"), str(out), *map(str, words)).check()
    return dict(read(out))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("sgd", "counted"),
        pytest.param("adamw", "known", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_pass_over_the_global_batch(kind: str, mode: str, tmp_path: Path) -> None:
    """With SGD as well: AdamW's steps hide a wrong factor. A rank has nothing to learn from in step 1."""
    alone = found(tmp_path, "cpu", 1, kind, mode, WHOLE)
    for case in CASES:
        preset, processes, most = case
        other = found(tmp_path, preset, processes, kind, mode, most)
        assert other["norms"] == pytest.approx(alone["norms"], rel=1e-5), case
        assert other["means"] == pytest.approx(alone["means"], rel=1e-5), case
        assert [tuple(pair) for pair in other["totals"]] == [(total, total) for total, _ in alone["totals"]], case
