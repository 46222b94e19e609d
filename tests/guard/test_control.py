"""What a run is asked from outside: all ranks do it after the same step, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import REPOSITORY, Started, accelerate, last_of_each, read, read_lines

from app.checkpoints import step_folders
from app.errors import STOPPED

pytestmark = pytest.mark.multiproc


CASES = {
    "SIGTERM twice": ("SIGTERM came", True, True),
    "SIGUSR1": ("SIGUSR1 came", True, True),
    "SIGUSR2": ("SIGUSR2 came", True, True),
    "SIGHUP": ("SIGHUP was received: the terminal is gone", True, True),
    "SIGINT": ("SIGINT came", True, False),
    "SIGTERM and SIGINT": ("SIGINT came", True, False),
    "SAVE": ("the file SAVE was there", False, False),
    "STOP and SAVE": ("the file STOP was there", True, False),
    "minutes": ("checkpoint.every_minutes have passed", False, False),
    "end": ("the allocation ends in 3", True, True),
    "end at once": ("the allocation ends in 10 s", True, True),
}


def test_all_ranks_do_the_same_at_the_same_step(tmp_path: Path) -> None:
    target = (str(REPOSITORY / "tests" / "scripts" / "asked.py"), str(tmp_path))
    finished = Started(accelerate("multi_gpu", target=target, processes=2)).wait()
    cases = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    found = {case["case"]: case["ranks"] for case in cases}
    assert found.keys() == {*CASES, "taken over"}, finished.output
    for case, (why, stop, go_on) in CASES.items():
        first, second = found[case]
        assert {**first, "files": None} == {**second, "files": None}
        assert first["why"].startswith(why)
        assert (first["stop"], first["go_on"]) == (stop, go_on)
        assert first["step"] == 0 if case == "end at once" else first["step"] > 0
    # A file goes when it was obeyed, and counts once.
    assert [answer["while_saving"] for answer in found["SAVE"]] == [[], []]
    assert found["SAVE"][0]["files"] == [["SAVE", "outcome.json"], ["outcome.json"]]
    assert found["STOP and SAVE"][0]["files"] == [["SAVE", "STOP", "outcome.json"], ["outcome.json"]]
    # An older start ends on all ranks when its folder was taken over.
    first, second = found["taken over"]
    assert first == second
    assert first["error"] == "RunFolderError"
    assert "another start of this run" in first["text"]


# ---- whole runs ------------------------------------------------------------------------------------------------------

STEPS = 80
# Random crops make worker processes load the data. float64 leaves no doubt: see docs/same-run.md.
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "log.every_steps=1", "log.samples=true", "train.evaluate_every_epochs=0",
    "augment.resized_crop_min_area=0.5", "data.image_size=8", "train.dtype=float64", "model.activation=gelu",
    "model.pooling=average",
)  # fmt: skip


def arguments(run_dir: Path, *more: str) -> tuple[str, ...]:
    options = ("--run-dir", str(run_dir), "--trackers", "none", "--resume", "auto")
    return ("-m", "app.train", *options, *last_of_each((*RECIPE, *more)))


def alone(run_dir: Path, *more: str) -> Started:
    return Started([sys.executable, *arguments(run_dir, *more)], env={"OMP_NUM_THREADS": "1"})


def together(run_dir: Path) -> Started:
    return Started(accelerate("multi_gpu", target=arguments(run_dir), processes=2))


def wait_until(is_so: Callable[[], bool], started: Started) -> None:
    deadline_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline_s, started.kill().output
        assert not started.is_over(), started.wait().output
        time.sleep(0.01)


def lines(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def process_of_rank(rank: int, started: Started) -> psutil.Process:
    (found,) = [process for process in started.processes() if process.environ().get("RANK") == str(rank)]
    return found


@pytest.mark.slow
def test_a_run_that_is_stopped_twice_goes_on_and_is_the_undisturbed_one(tmp_path: Path) -> None:
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    alone(undisturbed).wait().check()
    run_dir.mkdir()
    (run_dir / "SAVE").touch()

    started = together(run_dir)
    wait_until(lambda: lines(run_dir) > 2, started)
    process_of_rank(1, started).send_signal(signal.SIGTERM)
    finished = started.wait()
    assert finished.returncode == 1  # Accelerate's own, of several processes
    assert re.search(rf"exitcode +: {STOPPED} ", finished.output)
    outcome = read(run_dir / "outcome.json")
    assert (outcome["outcome"], outcome["reason"], outcome["go_on"]) == ("stopped", "SIGTERM came", True)
    assert outcome["total_steps"] == STEPS
    assert 2 < outcome["step"] < STEPS
    assert lines(run_dir) == outcome["step"]
    first = step_folders.path_of(run_dir, outcome["step"])
    assert step_folders.committed(run_dir) == [first, step_folders.path_of(run_dir, 1)]
    assert not (run_dir / "SAVE").exists()
    assert not (run_dir / "result.json").exists()
    assert f"saved as {first}; resume it with the same command, --resume auto" in finished.output

    started = alone(run_dir)
    wait_until(lambda: lines(run_dir) > outcome["step"] + 2, started)
    processes = started.processes()
    workers = [process for process in processes[1:] if process.cmdline() == processes[0].cmdline()]
    assert workers, "nothing is said of signals to data loading workers, which need a second core"
    for process in reversed(processes):
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
    assert started.wait().returncode == STOPPED
    again = read(run_dir / "outcome.json")
    assert (again["reason"], again["go_on"]) == ("SIGTERM came", True)
    assert outcome["step"] + 2 < again["step"] < STEPS

    together(run_dir).wait().check()
    assert read(run_dir / "outcome.json")["outcome"] == "finished"
    assert read(run_dir / "result.json")["steps"] == STEPS
    found, expected = (read_lines(folder / "metrics.jsonl") for folder in (run_dir, undisturbed))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-9)
    assert read_lines(run_dir / "samples.jsonl") == read_lines(undisturbed / "samples.jsonl")


def test_a_second_start_ends_the_first_and_a_file_stops_it(tmp_path: Path) -> None:
    endless = "train.steps=1000000"
    first = alone(tmp_path, endless)
    wait_until(lambda: lines(tmp_path) > 0, first)
    second = alone(tmp_path, endless)
    ended = first.wait()
    assert ended.returncode == 7, ended.output
    assert "RunFolderError: another start of this run" in ended.output
    assert not (tmp_path / "outcome.json").exists()
    (tmp_path / "STOP").touch()
    assert second.wait().returncode == STOPPED
    outcome = read(tmp_path / "outcome.json")
    assert (outcome["outcome"], outcome["reason"], outcome["go_on"]) == ("stopped", "the file STOP was there", False)
    assert not (tmp_path / "STOP").exists()
