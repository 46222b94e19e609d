"""What a run is asked from outside: all ranks do it after the same step, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import REPOSITORY, Started, accelerate, read, read_lines

from app.checkpoints import step_folders
from app.errors import STOPPED

pytestmark = pytest.mark.multiproc


CASES = {
    "SIGTERM twice": ("SIGTERM was received", True, True),
    "SIGUSR1 after nohup": ("SIGUSR1 was received", True, True),
    "SIGTERM and SIGINT": ("SIGINT was received", True, False),
    "SAVE": ("the file SAVE was found", False, False),
    "STOP and SAVE": ("the file STOP was found", True, False),
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
    assert "another attempt of this run" in first["text"]


# ---- whole runs ------------------------------------------------------------------------------------------------------

STEPS = 80
# Random crops make worker processes load the data. float64 leaves no doubt: see docs/same-run.md.
RECIPE = (
    "--recipe", "digits", f"train.steps={STEPS}", "log.every_steps=1", "log.samples=true", "train.evaluate_every_epochs=0",
    "augment.resized_crop_min_area=0.5", "data.image_size=8", "train.dtype=float64", "model.activation=gelu",
    "model.pooling=average",
)  # fmt: skip


def begin(run_dir: Path, processes: int = 1) -> Started:
    target = ("-m", "app.train", "--run-dir", str(run_dir), "--trackers", "none", "--resume", "auto", *RECIPE)
    if processes > 1:
        return Started(accelerate("multi_gpu", target=target, processes=processes))
    return Started([sys.executable, *target], env={"OMP_NUM_THREADS": "1"})


def lines(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_lines(count: int, run_dir: Path, started: Started) -> None:
    deadline_s = time.monotonic() + 120
    while lines(run_dir) <= count:
        assert time.monotonic() < deadline_s, started.kill().output
        assert not started.is_over(), started.wait().output
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_that_is_stopped_twice_goes_on_and_is_the_undisturbed_one(tmp_path: Path) -> None:
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    begin(undisturbed).wait().check()

    started = begin(run_dir, 2)
    wait_for_lines(2, run_dir, started)
    (second,) = [process for process in started.processes() if process.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGTERM)
    finished = started.wait()
    assert re.search(rf"exitcode +: {STOPPED} ", finished.output)
    outcome = read(run_dir / "outcome.json")
    assert (outcome["outcome"], outcome["reason"], outcome["go_on"]) == ("stopped", "SIGTERM was received", True)
    assert lines(run_dir) == outcome["step"] < STEPS
    first = step_folders.path_of(run_dir, outcome["step"])
    assert f"saved as {first}; resume it with the same command, --resume auto" in finished.output

    started = begin(run_dir)
    wait_for_lines(outcome["step"] + 2, run_dir, started)
    processes = started.processes()
    assert [it for it in processes[1:] if it.cmdline() == processes[0].cmdline()], "no data loading workers: no second core?"
    for process in reversed(processes):
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
    assert started.wait().returncode == STOPPED
    assert outcome["step"] + 2 < read(run_dir / "outcome.json")["step"] < STEPS

    begin(run_dir, 2).wait().check()
    assert read(run_dir / "result.json")["steps"] == STEPS
    found, expected = (read_lines(folder / "metrics.jsonl") for folder in (run_dir, undisturbed))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-9)
    assert read_lines(run_dir / "samples.jsonl") == read_lines(undisturbed / "samples.jsonl")
