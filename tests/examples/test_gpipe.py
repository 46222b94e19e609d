"""The lectures' pipeline: two processes learn what one does, and stand idle for as long as the formula says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image
from processes import ONE_THREAD, REPOSITORY, Started


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "micro_batches"), [("gpipe", (1, 2, 4, 8)), pytest.param("1f1b", (2, 4, 8), marks=pytest.mark.long)]
)
def test_two_stages_are_exact_and_their_bubble_is_the_formulas(
    schedule: str, micro_batches: tuple[int, ...], tmp_path: Path
) -> None:
    program, picture = REPOSITORY / "examples" / "gpipe" / "gpipe.py", tmp_path / "gpipe.png"
    words = [str(program), "--schedule", schedule, "--picture", str(picture)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = Started([*torchrun, *words], env={**ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}).wait().check().output
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == list(micro_batches)
    for row in rows:
        number, slots, formula, least, clock = int(row[0]), *(float(share.rstrip("%")) / 100 for share in row[1:5])
        assert slots == formula == pytest.approx(1 / (number + 1), abs=1e-3)
        assert 0 < least < 1
        assert 0 < clock < 1
        assert int(row[5]) == (number if schedule == "gpipe" else 2)  # GPipe keeps all activations, 1F1B those of two
        assert float(row[6]) < 1e-6
    with Image.open(picture) as image:
        assert image.width > 500
