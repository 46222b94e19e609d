"""A run that is killed at random moments, in every part of it, and taken over while it runs: its folder is that of one run.

make test-long                                          sixty of them; the slow tests have a dozen
python -m pytest -m long --seed N tests/runs/test_kills.py   the same moments again
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from moments import await_moment, await_step, await_that, last_step
from processes import Running, Started, Warm, free_port, launched_environments, read, read_lines

from app.checkpoints import step_folders
from app.errors import STOPPED, RunFolderError
from app.tools.verify import verify

pytestmark = pytest.mark.multiproc

# Hundreds of epochs over so few pictures would diverge at the recipe's rate.
RECIPE = ("--recipe", "digits", "train.steps=1000000", "train.global_batch_size=64", "train.evaluate_every_epochs=0",
          "optim.lr=1e-6", "log.every_steps=1", "checkpoint.every_steps=4", "--resume", "auto",
          "--trackers", "none")  # fmt: skip
TOPOLOGIES = (("cpu", 1), ("multi_gpu", 2), ("deepspeed_zero2", 2), ("fsdp2", 2))
GONE_WITHIN_S = 60.0
"""In which a start has to end whose folder was taken over, and a launcher whose processes were: measured are 1 to 12 s."""


class Starts:
    """Starts of the run, one after the other, in two warm processes by turns, or by `samerun launch`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._warm = [Warm(), Warm()]
        self._launched: list[Started] = []
        self._arguments = ("--run-dir", str(run_dir), *RECIPE)

    def warm(self, preset: str, processes: int) -> Running:
        self._warm.reverse()
        meeting = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"} if processes > 1 else {}
        environments = [{**variables, **meeting} for variables in launched_environments(preset, processes)]
        return self._warm[0].start(("app.train", *self._arguments), environments)

    def launched(self) -> Started:
        samerun = Path(sys.executable).with_name("samerun")
        self._launched.append(Started([str(samerun), "launch", "--preset", "multi_gpu", "--processes", "2", *self._arguments]))
        return self._launched[-1]

    def newest(self) -> int:
        """The number of the newest start that has claimed the folder; 0: none has."""
        claims = (path.parent.name for path in (self.run_dir / "starts").glob("*/start.json"))
        return max((int(name) for name in claims if name.isdecimal()), default=0)

    def left(self) -> list[psutil.Process]:
        """Processes of `samerun launch` and all below it that are there still."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self.run_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end_what_is_left(self) -> None:
        while left := self.left():
            for process in left:
                with suppress(psutil.Error):
                    process.kill()

    def close(self) -> None:
        self.end_what_is_left()
        for started in self._launched:
            started.wait()  # its output ends with the last process that had it
        for warm in self._warm:
            warm.close()


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    found = Starts(tmp_path / "run")
    yield found
    found.close()


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "RANK" in process.environ()
    return False


# The ways to end a start, or to have the next one begin beside it. Those of `samerun launch`:


def launcher(started: Started, _chance: random.Random) -> None:
    """`samerun` itself."""
    started.processes()[0].kill()


def torchrun(started: Started, _chance: random.Random) -> None:
    """What is between `samerun` and the ranks, if it is there already."""
    ([*filter(lambda process: not is_rank(process), started.processes()[1:])] or started.processes())[0].kill()


def one_rank(started: Started, chance: random.Random) -> None:
    """One of the ranks, if they are there already."""
    chance.choice([*filter(is_rank, started.processes()[1:])] or started.processes()).kill()


# And of ranks without a launcher:


def all_of_it(running: Running, _chance: random.Random) -> None:
    """All ranks at once."""
    running.kill()


def nothing(_running: Running, _chance: random.Random) -> None:
    """It is running when the next start begins."""


def main_rank_stopped(running: Running, _chance: random.Random) -> None:
    """The rank that writes stands still, wherever it is, until the next start has taken the folder over; then it goes on."""
    os.kill(running.ranks[0], signal.SIGSTOP)


LAUNCHED: dict[str, Callable[[Started, random.Random], None]] = {way.__name__: way for way in (launcher, torchrun, one_rank)}
WARM: dict[str, Callable[[Running, random.Random], None]] = {
    way.__name__: way for way in (all_of_it, nothing, main_rank_stopped)
}


Older = Running | None


def takes_over(running: Started | Running, older: Older, starts: Starts, chance: random.Random) -> None:
    """Wait until a start has taken the folder over from one that is running, or stopped, which then has to end by itself."""
    if older is None:
        return
    claims = starts.newest()
    await_that(running, lambda: starts.newest() > claims)
    time.sleep(chance.uniform(0.0, 1.0))
    with suppress(ProcessLookupError):  # it may have ended already
        os.kill(older.ranks[0], signal.SIGCONT)
    finished = older.wait()
    assert finished.returncode == RunFolderError.exit_code, finished.output
    assert re.search("^RunFolderError: .*another start of this run, on ", finished.output, re.MULTILINE), finished.output


def by_launch(starts: Starts, way: str, older: Older, chance: random.Random) -> tuple[str, Older]:
    """Start the run by `samerun launch` and end a part of it at some moment; return which."""
    claims, started = starts.newest(), starts.launched()
    takes_over(started, older, starts, chance)
    moment = await_moment(chance, started, starts.run_dir, start_s=8.0)
    LAUNCHED[way](started, chance)
    # What is left of it has to end when the next start takes the folder over. What has not claimed it yet would take it over.
    if starts.newest() == claims or chance.random() < 0.5:
        starts.end_what_is_left()
    return moment, None


def by_forks(starts: Starts, way: str, older: Older, chance: random.Random) -> tuple[str, Older]:
    """Start the ranks of the run, end them or do not, and return the moment, and the start that is still there."""
    claims, running = starts.newest(), starts.warm(*chance.choice(TOPOLOGIES))
    takes_over(running, older, starts, chance)
    if way != all_of_it.__name__:  # one that has not claimed the folder yet would take it over from the next
        await_that(running, lambda: starts.newest() > claims)
    moment = await_moment(chance, running, starts.run_dir, start_s=1.0)
    WARM[way](running, chance)
    return moment, None if way == all_of_it.__name__ else running


@pytest.mark.parametrize("kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.long)])
def test_a_run_that_is_killed_and_taken_over_in_every_way_is_one_run(starts: Starts, kills: int, chance: random.Random) -> None:
    ways = [*LAUNCHED, *WARM] * (kills // (len(LAUNCHED) + len(WARM)))
    chance.shuffle(ways)
    older: Older = None
    for number, way in enumerate(ways, start=1):
        begin_s = time.monotonic()
        moment, older = (by_launch if way in LAUNCHED else by_forks)(starts, way, older, chance)
        took_s = time.monotonic() - begin_s
        print(f"{number}: {way} at a {moment}, after step {last_step(starts.run_dir)}; {took_s:.0f} s", flush=True)
    claims, last = starts.newest(), starts.warm("cpu", 1)
    takes_over(last, older, starts, chance)
    await_that(last, lambda: starts.newest() > claims)  # what is left of the start before would obey the file, too
    await_step(last, starts.run_dir, last_step(starts.run_dir) + 8)
    (starts.run_dir / "STOP").touch()
    assert last.wait().returncode == STOPPED
    assert_is_one_run(starts.run_dir)
    end_s = time.monotonic() + GONE_WITHIN_S
    while starts.left():
        assert time.monotonic() < end_s, starts.left()
        time.sleep(0.1)


def assert_is_one_run(run_dir: Path) -> None:
    """Every step was applied once, in every file it stands once and in order, and nothing half-written is left."""
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
