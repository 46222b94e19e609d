"""`profile.steps` and `samerun timeline`: all ranks on one time axis, also if files are missing or cut."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import processes
import pytest
import trace_format
from processes import Started

from app.errors import RunFolderError
from app.metrics import profile
from app.reports import timeline
from launch import cli

FIRST, LAST = 3, 7
STEPS = range(FIRST, LAST + 1)
RUN = ("--recipe", "digits", "--trackers", "none", "checkpoint.every_minutes=null", f"train.steps={LAST}")
WINDOW = f"profile.steps={FIRST}:{LAST}"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("profile") / "run"
    output = processes.train("multi_gpu", run_dir, *RUN, WINDOW, processes=2).check().output
    assert f"profile of steps {FIRST} to {LAST}: merge its traces with `samerun timeline {run_dir}`" in output
    return run_dir


@pytest.mark.multiproc
def test_the_timeline_has_both_ranks_on_one_axis(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(run_dir)]) == 0
    path = run_dir / "profile" / timeline.TIMELINE
    assert capsys.readouterr().out == f"{path}: open it at ui.perfetto.dev or in chrome://tracing\n"
    events = trace_format.load(path)
    assert [name.split(",")[-1] for name in trace_format.processes(events)] == [" cpu", " cpu"]
    assert trace_format.check_one_axis(events, ranks=2, error_us=0.0) == len(STEPS)
    for rank in range(2):
        names = [event["name"] for event in events if event["pid"] == rank + 1 and event["ph"] == "X"]
        assert [name for name in names if name.startswith("step ")] == [f"step {step}" for step in STEPS]
        for phase in ("data wait", "forward", "backward", "optimizer"):
            assert names.count(phase) == len(STEPS), phase
        assert names.count("gloo:all_reduce") >= len(STEPS)


@pytest.mark.multiproc
def test_ranks_whose_traces_are_cut_or_missing_are_named(run_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_dir / "profile", tmp_path / "profile")
    traces = [folder / f"rank-{rank}.json.gz" for rank in range(2)]
    traces[1].write_bytes(traces[1].read_bytes()[:-1000])
    sentence = (
        f"{traces[1]} cannot be read (Compressed file ended before the end-of-stream marker was reached): rank 1 is missing"
    )
    assert timeline.merge(folder)[0].startswith(sentence)
    assert len(trace_format.processes(trace_format.load(folder / timeline.TIMELINE))) == 1
    traces[0].unlink()
    with pytest.raises(RunFolderError, match=r"has no readable trace: .*rank-0\.json\.gz'\): rank 0 is missing"):
        timeline.merge(folder)


@pytest.mark.multiproc
def test_a_profile_that_cannot_be_written_is_a_sentence_and_changes_no_bit(tmp_path: Path) -> None:
    """No file gets longer than 300 kB, as on a full disk: torch cannot write its trace."""
    plain, profiled, full = (tmp_path / name for name in ("plain", "profiled", "full"))
    processes.train("cpu", plain, *RUN).check()
    processes.train("cpu", profiled, *RUN, WINDOW).check()
    limited = ["sh", "-c", 'ulimit -f 600 && exec "$@"', "sh", sys.executable, "-m", "launch.cli", "launch", "--preset", "cpu"]
    output = Started([*limited, *RUN, "--run-dir", str(full), WINDOW]).wait().check().output
    assert "cannot write its profile: torch cannot write its trace in " in output
    assert timeline.merge(profiled / "profile")
    assert (full / "result.json").exists()
    assert (profiled / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def event(name: str, kind: str, lane: tuple[int, int], begin_us: int, end_us: int) -> dict[str, Any]:
    pid, tid = lane
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": end_us - begin_us, "args": {}}


def test_clocks_are_set_right_and_what_overlaps_has_lanes_of_its_own(tmp_path: Path) -> None:
    """As in a trace of two GPUs, of which the second one's clock is 3 ms ahead, and 1 % slow."""
    host, stream = (77, 77), (0, 7)
    flow = {"cat": "ac2g", "name": "ac2g", "id": 9}
    trace = {
        "baseTimeNanoseconds": 10**18,
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7 "}},
            event("step 4", "user_annotation", host, 4000, 9000),
            event("cudaLaunchKernel", "cuda_runtime", host, 4100, 4200),
            {"ph": "s", "pid": 77, "tid": 77, "ts": 4100, **flow},
            event("gemm", "kernel", stream, 5000, 7000),
            {"ph": "f", "bp": "e", "pid": 0, "tid": 7, "ts": 5000, **flow},
            event("forward", "gpu_user_annotation", stream, 5000, 6000),
            event("gloo:broadcast", "user_annotation", (77, 80), 5000, 7000),
            event("gloo:all_reduce", "user_annotation", (77, 80), 6000, 8000),
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9000},
        ],
    }
    ranks: list[dict[str, Any]] = [
        {"host": "node1", "device": "cuda:0", "strategy": "ddp", "zero_ns": 10**18, "clock_error_ns": error_ns,
         "clock": [[10**18, ahead_ns], [10**18 + 10**8, ahead_ns - drift_ns]]}
        for ahead_ns, drift_ns, error_ns in ((0, 0, 0), (3_000_000, 1_000_000, 12_000))
    ]  # fmt: skip
    (tmp_path / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    for rank in range(2):
        (tmp_path / f"rank-{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    assert timeline.merge(tmp_path)[0] == "the clocks of other hosts are known to 0.01 ms"
    events = trace_format.load(tmp_path / timeline.TIMELINE)
    steps = [(event["ts"], event["dur"]) for event in events if event["name"] == "step 4"]
    assert steps == [(4000, 5000), (1040, 5050)]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2]
    assert lanes == ["training", "stream 7", "ranges of stream 7", "collectives 0", "collectives 1"]
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2


def test_a_clock_is_ahead_by_what_is_between_its_bounds() -> None:
    """Ranks with other clocks meet, each in a thread here."""
    ahead_ns, began_ns = [0, 10**8, -(10**9)], time.perf_counter_ns()
    came, meeting = [[0.0, 0.0]] * 3, threading.Barrier(3)

    def bounds(rank: int) -> tuple[float, float]:
        def greatest(values: Sequence[float]) -> list[float]:
            came[rank] = list(values)
            meeting.wait()
            found = [max(column) for column in zip(*came, strict=True)]
            meeting.wait()
            return found

        def now_ns() -> int:
            return time.perf_counter_ns() - began_ns + ahead_ns[rank]

        return profile.clock_bounds(greatest, now_ns, is_main=rank == 0)

    with ThreadPoolExecutor(3) as pool:
        for rank, (least_ns, most_ns) in enumerate(pool.map(bounds, range(3))):
            assert least_ns <= ahead_ns[rank] <= most_ns < least_ns + 1e8


@pytest.mark.gpu
@pytest.mark.multiproc
def test_the_timeline_of_a_gpu_has_its_kernels(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", "deepspeed_zero3_offload", "--processes", "1"]
    Started([*command, "--run-dir", str(tmp_path), *RUN, WINDOW]).wait().check()
    timeline.merge(tmp_path / "profile")
    events = trace_format.load(tmp_path / "profile" / timeline.TIMELINE)
    kinds = Counter(event.get("cat") for event in events)
    assert min(kinds["kernel"], kinds["gpu_memcpy"]) > 0, kinds
