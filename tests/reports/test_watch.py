"""A run is followed from outside: one that does not exist yet, one that continues, and one drawn on a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from another_task import language
from processes import REPOSITORY, TIMEOUT_S, clean_environment, read_lines, start

from app.errors import STOPPED
from app.reports import past_run
from app.reports.past_run import state_of
from app.runs import ledger
from launch.cli import main as samerun


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", "watch", *arguments]


def watched(log: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    """`samerun watch` of a folder that does not exist yet, with its output in a file."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command(str(run_dir)), cwd=REPOSITORY, env=clean_environment(), stdout=file, stderr=subprocess.STDOUT
        )
    wait_for(lambda: f"waiting for the run: {run_dir} is not a folder" in log.read_text())
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.multiproc
def test_a_run_that_does_not_exist_yet_is_followed_until_it_stops(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "later", tmp_path / "log"
    process = watched(log, run_dir)
    arguments = ("--recipe", "digits", "train.epochs=5000", "train.global_batch_size=64", "log.every_steps=5")
    running = start("cpu", None, "app.train", "--run-dir", str(run_dir), "--trackers", "none", *arguments)
    wait_for(lambda: running.is_over() or (run_dir / "evaluations.jsonl").exists())
    assert process.poll() is None
    (run_dir / "STOP").touch()
    assert running.wait().returncode == STOPPED
    assert process.wait(TIMEOUT_S) == 0
    last, shown = read_lines(run_dir / "metrics.jsonl")[-1], log.read_text()
    assert re.search(r"state +stopped: after saving, because the file STOP was found", shown)
    assert re.search(r"steps .* \d+ of 100,000 ", shown)
    assert re.search(rf"loss .* {last['loss']:.4f} ", shown)
    assert re.search("processes +1, preset .*, attempt 1, after step 0", shown)


def test_a_run_that_will_be_restarted_is_not_over(digits_run: Path) -> None:
    """The start that resumes it removes the outcome, and then imports and checks before it writes a line."""
    run = past_run.read(digits_run)
    assert isinstance(run.events[-1], ledger.End)
    stopped = replace(run, result={}, events=[*run.events[:-1], replace(run.events[-1], outcome="stopped")])
    outcome = {**run.outcome, "outcome": "stopped", "reason": "SIGTERM was received"}
    for found, is_over in (({**outcome, "go_on": False}, True), ({**outcome, "go_on": True}, False), ({}, False)):
        state = state_of(replace(stopped, outcome=found), time.time())
        assert (state.word, state.is_over) == ("stopped", is_over)


def test_a_run_without_a_step_is_starting(digits_run: Path) -> None:
    """run.json is written before the first line of the ledger, and that long before the first step."""
    run, now = past_run.read(digits_run), float(int(time.time()))
    began = replace(run.starts[0], time=now - 40)
    about = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now - 40))}
    for events in ([], [began]):
        state = state_of(replace(run, about=about, metrics=[], evaluations=[], events=events, result={}, outcome={}), now)
        assert (state.word, state.sentence) == ("starting", "for 40 s, no step is logged yet")


def test_on_a_terminal_it_is_drawn(digits_run: Path) -> None:
    ours, theirs = os.openpty()
    environment = clean_environment() | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command(str(digits_run)), cwd=REPOSITORY, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    drawn = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(1 << 16):
                drawn += part
        except OSError:  # Linux, when the last writer has gone
            pass
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
    words = ("finished: all steps are done", "40 of 40 (100%)", "loss", "samples/s", "validation accuracy", "waiting for data")
    assert [word for word in words if word not in text] == []


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    process = watched(tmp_path / "log", tmp_path / "never")
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_once_shows_the_scores_of_another_task(digits_run: Path, tmp_path: Path, capsys) -> None:
    assert samerun(["watch", "--once", str(language(digits_run, tmp_path / "language"))]) == 0
    assert re.search(r"validation bits per byte .* \d", capsys.readouterr().out)
