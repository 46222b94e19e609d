"""A training that stands still ends by itself and writes where each rank stood."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, Started, accelerate, read_lines

pytestmark = pytest.mark.multiproc

STUCK = str(REPOSITORY / "tests" / "scripts" / "stuck.py")


def arguments(run_dir: Path) -> tuple[str, ...]:
    return ("--run-dir", str(run_dir), "--trackers", "none", "--hang-timeout", "5", "--recipe", "digits", "log.every_steps=1")


def stacks(run_dir: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run_dir / "stacks").iterdir()}


def test_of_a_rank_whose_data_do_not_come_and_one_that_waits_for_it_the_stacks_are_written(tmp_path: Path) -> None:
    target = (STUCK, "1", "sleep", *arguments(tmp_path))
    finished = Started(accelerate("multi_gpu", target=target, processes=2), env={"PET_SHUTDOWN_TIMEOUT": "1"}).wait()
    assert finished.returncode != 0
    written = stacks(tmp_path)
    assert sorted(written) == ["rank-00000.txt", "rank-00001.txt"]
    step = len(read_lines(tmp_path / "metrics.jsonl"))
    assert step > 0
    for rank, place in (0, "backward"), (1, "fetch_or_hang"):
        text = written[f"rank-{rank:05d}.txt"]
        assert text.startswith(f"rank {rank} on "), text
        assert f"no sign of life for 5 s after step {step}," in text
        assert f"in {place}" in text
    assert "HangError: no sign of life for 5 s after step" in finished.output
    assert "exitcode  : 12 " in finished.output


@pytest.mark.slow
def test_a_rank_that_keeps_pythons_lock_ends_and_says_where_it_stood(tmp_path: Path) -> None:
    finished = Started([sys.executable, STUCK, "0", "lock", *arguments(tmp_path)], env={"OMP_NUM_THREADS": "1"}).wait()
    assert finished.returncode == 1, finished.output
    assert "in fetch_or_hang" in finished.output
