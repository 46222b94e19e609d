"""A run is followed from outside: one that is not there yet, one that goes on, and one drawn on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from another_task import rainfall
from processes import REPOSITORY, TIMEOUT_S, clean_environment, read_lines, start

from app.errors import STOPPED, RunFolderError
from app.reports import past_run
from app.reports.past_run import state_of
from app.reports.watch import sparkline
from launch.cli import main as samerun


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "watch", *arguments]


class Watch:
    """`samerun watch` with its output in a file, so that nobody waits for a line that never comes."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command(*arguments), cwd=REPOSITORY, env=clean_environment(), stdout=file, stderr=subprocess.STDOUT
            )

    def await_text(self, text: str, is_alive: Callable[[], bool] = lambda: True) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert is_alive(), self.log.read_text()
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.02)


@pytest.mark.multiproc
def test_a_run_that_is_not_there_yet_is_followed_until_it_stops(tmp_path: Path) -> None:
    run_dir = tmp_path / "later"
    watching = Watch(tmp_path / "log", str(run_dir), "--every", "0.1")
    watching.await_text(f"waiting for the run: {run_dir} is not a folder")
    arguments = ("--recipe", "digits", "train.epochs=5000", "train.global_batch_size=64", "log.every_steps=5")
    running = start("cpu", None, "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments)
    watching.await_text("evaluated after step", lambda: not running.is_over())
    assert not running.is_over()
    (run_dir / "STOP").touch()
    assert running.wait().returncode == STOPPED
    assert watching.process.wait(TIMEOUT_S) == 0
    told = [line[9:] for line in watching.log.read_text().splitlines()]
    assert told[1] == "started on 1 process, from the beginning"
    metrics = read_lines(run_dir / "metrics.jsonl")
    steps = [line.split("  ")[0] for line in told if re.match(r"step \d+/", line)]
    assert steps == [f"step {line['step']}/100000" for line in metrics]
    assert f"loss {metrics[-1]['loss']:.4f}" in "".join(told)
    assert told[-1] == "stopped: after saving, because the file STOP was there"


def test_a_run_that_is_taken_up_again_is_not_over(digits_run: Path, tmp_path: Path) -> None:
    """The start that resumes it removes the outcome, and then imports and checks before it writes a line."""
    folder = tmp_path / "run"
    shutil.copytree(digits_run, folder)
    (folder / "result.json").unlink()
    *before, last = (folder / "ledger.jsonl").read_text().splitlines()
    stopped = json.dumps(json.loads(last) | {"outcome": "stopped"})
    (folder / "ledger.jsonl").write_text("\n".join([*before, stopped]) + "\n")
    outcome = json.loads((folder / "outcome.json").read_text()) | {"outcome": "stopped", "reason": "SIGTERM came"}
    for found, is_over in (({**outcome, "go_on": False}, True), ({**outcome, "go_on": True}, False), (None, False)):
        (folder / "outcome.json").unlink()
        if found is not None:
            (folder / "outcome.json").write_text(json.dumps(found))
        state = state_of(past_run.read(folder), time.time())
        assert (state.word, state.is_over) == ("stopped", is_over)


def test_on_a_terminal_it_is_drawn(digits_run: Path) -> None:
    ours, theirs = os.openpty()
    environment = clean_environment() | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command(str(digits_run)), cwd=REPOSITORY, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not part:
            break
        drawn += part
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
    for told in (
        "finished: all steps are done",
        "40 of 40 (100%)",
        "loss",
        "samples/s",
        "validation accuracy",
        "test accuracy",
        "waiting for data",
    ):
        assert told in text, told


def test_ctrl_c_ends_the_watching_and_not_with_a_traceback(tmp_path: Path) -> None:
    watching = Watch(tmp_path / "log", str(tmp_path / "never"))
    watching.await_text("waiting for the run")
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(TIMEOUT_S) == 0
    assert len(watching.log.read_text().splitlines()) == 1


def test_once_shows_what_is_there_and_says_what_is_not(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert samerun(["watch", "--once", str(digits_run)]) == 0
    assert "40 of 40 (100%)" in capsys.readouterr().out
    assert samerun(["watch", "--once", str(tmp_path / "never")]) == RunFolderError.exit_code
    assert "is not a folder" in capsys.readouterr().err
    lines = (digits_run / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines[: lines.index("\n") + 40])
    assert samerun(["watch", "--once", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"steps +5, epoch 1", shown.out)
    assert "a line is damaged or truncated" in shown.err


def test_a_run_of_another_task_has_its_own_scores(digits_run: Path, tmp_path: Path, capsys) -> None:
    assert samerun(["watch", str(rainfall(digits_run, tmp_path / "rain"))]) == 0
    scores = r"validation rmse 1\.2500, test rmse 1\.2500, validation loss [\d.]+, test loss [\d.]+\n"
    assert re.search(f"evaluated after step 40: {scores}", capsys.readouterr().out)


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "".join(map(chr, range(0x2581, 0x2589)))
    assert sparkline([3.0, 3.0]) == "\u2584\u2584"
    assert sparkline([float(value) for value in range(1000)], width=8) == sparkline([0, 1, 2, 3, 4, 5, 6, 7])
