"""A run that is killed at random moments, in every part of it, and taken over while it runs: its folder is that of one run.

make test-long                                          sixty of them; the slow tests have six
python -m pytest -m long --seed N tests/runs/test_kills.py   the same moments again
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from moments import await_moment, await_step, await_that, last_step
from processes import Running, Warm, free_port, launched_environments, read, read_lines

from app.checkpoints import step_folders
from app.checks.verify import verify
from app.errors import STOPPED, RunFolderError

pytestmark = pytest.mark.multiproc

# Hundreds of epochs over so few images would diverge at the recipe's rate.
RECIPE = ("--recipe", "digits", "train.steps=1000000", "train.global_batch_size=64", "train.evaluate_every_epochs=0",
          "optim.lr=1e-6", "log.every_steps=1", "checkpoint.every_steps=4", "--resume", "auto",
          "--trackers", "none")  # fmt: skip
TOPOLOGIES = (("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero2", 2), ("fsdp2", 2))
WAYS = ("all ranks killed", "left running", "main rank stopped")
"""Ways to end a start, or to have the next one begin next to it."""


def newest_start(run_dir: Path) -> int:
    """Return the number of the newest start that has claimed the folder, 0 without any."""
    claims = (path.parent.name for path in (run_dir / "starts").glob("*/start.json"))
    return max((int(name) for name in claims if name.isdecimal()), default=0)


def take_over(running: Running, older: Running | None, run_dir: Path, chance: random.Random) -> None:
    """Wait until a start has taken the folder over; an older one, which is running or stopped, then has to end by itself."""
    number = newest_start(run_dir)
    await_that(running, lambda: newest_start(run_dir) > number)
    if older is None:
        return
    time.sleep(chance.uniform(0.0, 1.0))
    with suppress(ProcessLookupError):  # it may have ended already
        os.kill(older.ranks[0], signal.SIGCONT)
    finished = older.wait()
    assert finished.returncode == RunFolderError.exit_code, finished.output
    expected = "^samerun: RunFolderError: .*another attempt of this run, on "
    assert re.search(expected, finished.output, re.MULTILINE), finished.output


@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.long)])
def test_a_run_that_is_killed_and_taken_over_is_one_run(tmp_path: Path, kills: int, chance: random.Random) -> None:
    run_dir = tmp_path / "run"
    ways = [*WAYS] * (kills // len(WAYS))
    chance.shuffle(ways)
    older: Running | None = None
    with closing(Warm()) as one, closing(Warm()) as other:  # by turns

        def start(preset: str, processes: int) -> Running:
            meeting = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"} if processes > 1 else {}
            environments = [{**variables, **meeting} for variables in launched_environments(preset, processes)]
            return warm[number % 2].start(("app.train", "--run-dir", str(run_dir), *RECIPE), environments)

        warm = (one, other)
        for number, way in enumerate(ways):
            running = start(*chance.choice(TOPOLOGIES))
            if older is not None or way != "all ranks killed":  # a start that has not claimed the folder could take it later
                take_over(running, older, run_dir, chance)
            moment = await_moment(chance, running, run_dir, start_s=1.0)
            if way == "all ranks killed":
                running.kill()
            elif way == "main rank stopped":  # wherever it is, until the next start has taken the folder over
                os.kill(running.ranks[0], signal.SIGSTOP)
            older = None if way == "all ranks killed" else running
            print(f"{number}: {way} at a {moment}, after step {last_step(run_dir)}", flush=True)
        number = len(ways)
        last = start("cpu", 1)
        take_over(last, older, run_dir, chance)
        await_step(last, run_dir, last_step(run_dir) + 8)
        (run_dir / "STOP").touch()
        assert last.wait().returncode == STOPPED
    step = read(run_dir / "outcome.json")["step"]
    verdict, _ = verify(run_dir)
    print(verdict)
    assert verdict.is_good
    assert verdict.left_out is None
    assert (verdict.first_step, verdict.last_step) == (1, step)
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == [*range(1, step + 1)]
    assert [path.name for path in (run_dir / "starts").glob("*/*")] == ["start.json"]
    for folder in step_folders.committed(run_dir):
        step_folders.verify(folder)
