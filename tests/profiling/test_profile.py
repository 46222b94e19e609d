"""`profile.steps`: what ranks do on one time axis, who is late, and what is made of it when files are missing or cut."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import trace_format
from hypothesis import given
from hypothesis import strategies as st
from processes import Finished

from app.errors import RecipeError
from app.profiling import merge, rank_file, raw, spans, summary
from app.profiling.account import Process
from app.profiling.profile import check_window
from app.profiling.rank_file import Header, RankFile, path_of
from app.ranks import clocks
from app.recipe.schema import ProfileRecipe
from launch import cli

SLOW_S = 0.25
FIRST, LAST = 3, 7
STEPS = range(FIRST, LAST + 1)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run on two processes, of which rank 1 is slow in its forward passes."""
    run_dir = tmp_path_factory.mktemp("profile") / "run"
    arguments = ("--recipe", "digits", f"train.steps={LAST}", f"profile.steps={FIRST}:{LAST}", "--trackers", "none")
    script = str(processes.SCRIPTS / "slow_rank.py")
    finished = processes.run("multi_gpu", 2, script, "1", str(SLOW_S), "--run-dir", str(run_dir), *arguments)
    return run_dir, finished.check()


@pytest.fixture
def copied(slow_run: tuple[Path, Finished], tmp_path: Path) -> Path:
    """What was copied of it to another machine: the files of the ranks alone."""
    shutil.copytree(slow_run[0] / "profile", tmp_path / "copied" / "profile", ignore=shutil.ignore_patterns("[!r]*"))
    return tmp_path / "copied"


@pytest.mark.multiproc
def test_the_timeline_has_both_ranks_on_one_axis(slow_run: tuple[Path, Finished]) -> None:
    folder = slow_run[0] / "profile"
    events = trace_format.load(folder / "timeline.json.gz")
    assert [re.sub(" on .*,", "", name) for name in trace_format.processes(events)] == ["rank 0 cpu", "rank 1 cpu"]
    assert trace_format.check_one_axis(events, ranks=2, error_us=0.0) >= len(STEPS)
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank + 1 and event["ph"] == "X"]
        names = [event["name"] for event in own]
        assert [name for name in names if name.startswith("step ")] == [f"step {step}" for step in STEPS]
        for phase in ("data wait", "forward", "backward", "optimizer"):
            assert names.count(phase) == len(STEPS), phase
        parts_us = RankFile(path_of(folder, rank)).header.parts_us
        assert min(parts_us.values()) >= 0
        steps = [event for event in own if event["name"].startswith("step ")]
        end_us = steps[-1]["ts"] + steps[-1]["dur"]
        paused_us = sum(event["dur"] for event in own if event["name"] == "paused" and event["ts"] < end_us)
        assert sum(parts_us.values()) == pytest.approx(sum(step["dur"] for step in steps) - paused_us)


@pytest.mark.multiproc
def test_the_slow_rank_is_named_and_what_it_does(slow_run: tuple[Path, Finished]) -> None:
    run_dir, finished = slow_run
    text = (run_dir / "profile" / "summary.txt").read_text()
    assert all(line in finished.output for line in text.splitlines())
    sentence = r"^late: rank 1 on .*, cpu: .* wait for it ([\d.]+) ms of each step .* more than they do on forward and"
    late = re.search(sentence, text, re.MULTILINE)
    assert late, text
    assert float(late[1]) > 1000 * SLOW_S / 2
    waiting, slow = (RankFile(path_of(run_dir / "profile", rank)).header.parts_us for rank in range(2))
    assert waiting["communication"] > slow["communication"] + 1e6 * SLOW_S
    assert slow["compute"] > waiting["compute"] + 1e6 * SLOW_S


@pytest.mark.multiproc
def test_it_is_put_together_again_from_what_is_left(
    slow_run: tuple[Path, Finished], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original, folder = slow_run[0] / "profile", copied / "profile"
    assert cli.main(["timeline", str(copied)]) == 0
    assert trace_format.load(folder / "timeline.json.gz") == trace_format.load(original / "timeline.json.gz")
    assert (folder / "summary.txt").read_text() == capsys.readouterr().out
    assert (folder / "summary.txt").read_text().splitlines()[:-1] == (original / "summary.txt").read_text().splitlines()[:-1]

    (folder / "timeline.json.gz").unlink()
    assert f"merge them with `samerun timeline {copied}`" in merge.merge(folder, most_bytes=1000).text
    assert not (folder / "timeline.json.gz").exists()

    whole = path_of(folder, 1).read_bytes()
    path_of(folder, 1).write_bytes(whole[: len(whole) * 3 // 4])
    assert cli.main(["timeline", str(copied)]) == 0
    said = capsys.readouterr().out
    assert f"{path_of(folder, 1)} is truncated or damaged after" in said
    assert "late: rank 1" in said, "what the first line says is whole"
    with gzip.open(folder / "timeline.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert [sum(event["pid"] == pid for event in events) > 1000 for pid in (1, 2)] == [True, True]

    path_of(folder, 1).write_bytes(whole[:40])
    assert cli.main(["timeline", str(copied)]) == 0
    said = capsys.readouterr().out
    assert f"{path_of(folder, 1)} cannot be read" in said
    assert "1 of 2 ranks are missing in the timeline: 1." in said
    assert len(trace_format.processes(trace_format.load(folder / "timeline.json.gz"))) == 1

    path_of(folder, 0).unlink()
    assert cli.main(["timeline", str(copied)]) == 7
    assert "has no readable profile" in capsys.readouterr().err


def test_a_run_without_a_profile_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", str(tmp_path)]) == 7
    assert "train with profile.steps=10:20 to get one" in capsys.readouterr().err


def test_steps_that_the_run_does_not_have_are_refused() -> None:
    check_window(ProfileRecipe(steps="10:20"), total_steps=20)
    with pytest.raises(RecipeError, match=r"profile\.steps is 10:20, and the run has 19 steps"):
        check_window(ProfileRecipe(steps="10:20"), total_steps=19)


# Who is late ----------------------------------------------------------------------------------------------------------------


def headers(lateness_us: list[list[float]]) -> list[Header]:
    """Ranks that come so much later than they might, in steps of 10 ms with one collective that takes 1 ms."""
    coming = [[10_000 * step + late_us for step, late_us in enumerate(of_rank)] for of_rank in lateness_us]
    ends = [max(moments) + 1_000 for moments in zip(*coming, strict=True)]
    return [
        Header(
            recorded=0.0, rank=rank, world_size=len(coming), host="node1", device="cpu", strategy="ddp",
            steps=list(range(1, len(moments) + 1)),
            clock_error_us=0.0,
            parts_us={"compute": 9_000.0 * len(moments), "communication": 1_000.0 * len(moments), "optimizer": 0.0,
                      "copies": 0.0, "data_wait": 0.0, "other": 0.0},
            outstanding_us=1_000.0 * len(moments),
            collectives=[
                (step, "gloo:all_reduce", 0, moment, end, end - moment)
                for step, (moment, end) in enumerate(zip(moments, ends, strict=True), start=1)
            ],
            operations=[],
        )
        for rank, moments in enumerate(coming)
    ]  # fmt: skip


def late_line(of: list[Header]) -> str:
    return next(line for line in summary.lines(of) if line.startswith("late: "))


def test_a_rank_is_late_only_beyond_noise() -> None:
    steady = headers([[0.0] * 10, [0.0] * 10, [400.0] * 10])
    assert "late: rank 2 on node1, cpu: it is the last to enter 10 of 10 collectives" in late_line(steady)
    assert "0.40 ms of each step (4%)" in late_line(steady)
    chance = random.Random(0)
    noise = headers([[chance.uniform(0, 1000) for _ in range(10)] for _ in range(3)])
    assert late_line(noise).startswith("late: no rank")
    assert "too few steps to tell" in late_line(headers([[0.0] * 2, [400.0] * 2]))
    assert late_line([replace(one, clock_error_us=500.0) for one in steady]).startswith("late: no rank"), "or by other clocks"


# Clocks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_error_of_a_clock_is_no_larger_than_it_is_said_to_be(seed: int) -> None:
    """Ranks with any clocks come to meetings, and leave them, with any delays."""
    chance = random.Random(seed)
    number = chance.randint(2, 4)
    ahead_ns = [chance.randint(-(10**9), 10**9) for _ in range(number)]
    delays, now_ns = iter(lambda: chance.randint(1, 10**6), None), 0
    ranks = [_Meetings(ahead) for ahead in ahead_ns]
    for _ in range(clocks._MEETINGS):
        came_ns = [now_ns + next(delays) for _ in ranks]
        left_ns = [max(came_ns) + next(delays) for _ in ranks]
        for rank, one in enumerate(ranks):
            one.readings += [came_ns[rank] + one.ahead_ns, left_ns[rank] + one.ahead_ns]
            one.met.append([float(came + other.ahead_ns) for came, other in zip(came_ns, ranks, strict=True)])
        now_ns = max(left_ns)
    found: list[clocks.Bounds] = []
    for rank, one in enumerate(ranks):
        if rank > 0:
            one.met.append(ranks[0].asked[-1])  # what rank 0 gave to all
        found.append(clocks.bounds(one.meet, one.now_ns, host=f"node{rank}", rank=rank, world_size=number))
    for rank in range(1, number):
        offset = clocks.offset(rank, found)
        assert abs(offset.ahead_ns - (ahead_ns[rank] - ahead_ns[0])) <= offset.error_ns


class _Meetings:
    """The meetings that one rank comes to, as they were."""

    def __init__(self, ahead_ns: int) -> None:
        self.ahead_ns = ahead_ns
        self.readings: list[int] = []
        self.met: list[list[float]] = []
        self.asked: list[list[float]] = []

    def now_ns(self) -> int:
        return self.readings.pop(0)

    def meet(self, values: list[float]) -> list[float]:
        self.asked.append(list(values))
        return self.met.pop(0) if self.met else list(values)


# GPUs, of which there may be none: what their traces hold was read in Kineto's source ---------------------------------------


def event(name: str, kind: str, lane: int, begin: int, end: int, **arguments: int) -> raw.Event:
    return raw.Event(name, kind, (0, lane, False), begin, end, arguments)


def test_on_a_gpu_communication_is_hidden_behind_its_other_kernels() -> None:
    process = Process()
    for one in (
        event("step 4", "user_annotation", 1, 0, 300),
        event("data wait", "user_annotation", 1, 0, 100),
        event("cudaLaunchKernel", "cuda_runtime", 1, 200, 210, correlation=7),
        event("gemm", "kernel", 2, 100, 600),
        event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 3, 400, 800, correlation=7),
        event("adam", "kernel", 2, 850, 900),
        event("optimizer", "gpu_user_annotation", 2, 850, 900),
    ):
        process.add(one)
    account = process.account()  # the step lasts until the GPU is done with it
    assert account.parts_ns == {
        "compute": 500,
        "communication": 200,
        "optimizer": 50,
        "copies": 0,
        "data_wait": 100,
        "other": 50,
    }
    (collective,) = account.collectives
    assert (account.outstanding_ns, collective.step, collective.came_ns, collective.exposed_ns) == (400, 4, 400, 200)
    assert account.operations[0] == ("gemm", 500, 1)


# A step with an offloaded optimizer, as github.com/pytorch/kineto writes it (libkineto/src/output_json.cpp, CuptiActivity.cpp).
OFFLOADED = """
  {
    "schemaVersion": 1,
    "deviceProperties": [
    ],
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1795420000000000000,
  "traceEvents": [
  {
    "ph": "X", "cat": "user_annotation", "name": "step 4", "pid": 77, "tid": 77,
    "ts": 100.000, "dur": 500.000,
    "args": {
      "External id": 1,"Record function id": 0, "Ev Idx": 0
    }
  },
  {
    "ph": "X", "cat": "user_annotation", "name": "data wait", "pid": 77, "tid": 77,
    "ts": 100.000, "dur": 60.000,
    "args": {
      "External id": 2,"Record function id": 0, "Ev Idx": 1
    }
  },
  {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 17,
    "ts": 110.000, "dur": 20.500,
    "args": {
      "External id": 3,"device": 0, "context": 1,"stream": 17, "correlation": 903,
      "bytes": 401408, "memory bandwidth (GB/s)": 19.58
    }
  },
  {
    "ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7,
    "ts": 160.000, "dur": 10.000,
    "args": {
      "External id": 4,"device": 0, "context": 1,"stream": 7, "correlation": 911,
      "bytes": 512, "memory bandwidth (GB/s)": 0.0512
    }
  },
  {
    "ph": "X", "cat": "kernel", "name": "sm80_xmma_fprop_implicit_gemm", "pid": 0, "tid": 7,
    "ts": 170.000, "dur": 130.000,
    "args": {
      "External id": 5,"queued": 0, "device": 0, "context": 1,"stream": 7, "correlation": 915,"registers per thread": 128,
      "shared memory": 13056,"blocks per SM": 0.72,"warps per SM": 2.9,"grid": [8, 12, 1],"block": [128, 1, 1],
      "est. achieved occupancy %": 5
    }
  },
  {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "pid": 0, "tid": 7,
    "ts": 300.000, "dur": 20.000,
    "args": {
      "External id": 6,"device": 0, "context": 1,"stream": 7, "correlation": 921,
      "bytes": 4096, "memory bandwidth (GB/s)": 0.2048
    }
  },
  {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "pid": 0, "tid": 21,
    "ts": 280.000, "dur": 140.000,
    "args": {
      "External id": 7,"device": 0, "context": 1,"stream": 21, "correlation": 931,
      "bytes": 1609728, "memory bandwidth (GB/s)": 11.5
    }
  },
  {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "pid": 0, "tid": 17,
    "ts": 520.000, "dur": 100.000,
    "args": {
      "External id": 8,"device": 0, "context": 1,"stream": 17, "correlation": 941,
      "bytes": 1609728, "memory bandwidth (GB/s)": 16.1
    }
  },
  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": 700.000
  }
  ],
  "traceName": "trace.json"
}
"""


def test_copies_of_an_offloaded_optimizer_are_no_idling(tmp_path: Path) -> None:
    """But those that are hidden behind kernels are in no part of their own."""
    (tmp_path / "trace.json").write_text(OFFLOADED)
    here = clocks.Offset(0.0, 0.0)
    zero_ns = 1795420000000000000
    who = rank_file.Who(recorded=0.0, rank=0, world_size=1, host="node1", device="cuda:0", strategy="deepspeed")
    axis = clocks.Axis(zero_ns, begin_ns=zero_ns, begin=here, end_ns=zero_ns + 10**9, end=here)
    rank_file.write(tmp_path, tmp_path / "trace.json", axis, who)
    header = RankFile(path_of(tmp_path, 0)).header
    assert header.parts_us == {"compute": 160.0, "optimizer": 0.0, "communication": 0.0, "copies": 220.5, "data_wait": 39.5,
                               "other": 100.0}  # fmt: skip
    assert header.operations[:2] == [("Memcpy DtoH (Device -> Pinned)", 140.0, 1), ("sm80_xmma_fprop_implicit_gemm", 130.0, 1)]
    text = merge.merge(tmp_path).text
    assert re.search(r"^a step, in ms +compute +optimizer +communication +copies +data wait +other$", text, re.MULTILINE), text
    assert "0.22 (42%)" in text, text


@pytest.mark.gpu
@pytest.mark.multiproc
def test_a_gpu_tells_of_the_copies_of_its_offloaded_weights(tmp_path: Path) -> None:
    run = ("--recipe", "digits", "--trackers", "none", f"train.steps={LAST}", f"profile.steps={FIRST}:{LAST}")
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", "deepspeed_zero3_offload", "--processes", "1"]
    processes.Started([*command, "--run-dir", str(tmp_path), *run]).wait().check()
    header = RankFile(path_of(tmp_path / "profile", 0)).header
    assert min(header.parts_us.values()) >= 0
    assert header.parts_us["copies"] > 0
    assert header.parts_us["compute"] > 0


@pytest.mark.multiproc
def test_files_from_before_there_was_a_part_are_read(slow_run: tuple[Path, Finished], copied: Path) -> None:
    path = path_of(copied / "profile", 0)
    with gzip.open(path, "rt") as file:
        lines = file.read()
    with gzip.open(path, "wt") as file:
        file.write(lines.replace('"copies": 0.0, ', "", 1))
    assert path.read_bytes() != path_of(slow_run[0] / "profile", 0).read_bytes()
    assert RankFile(path).header == RankFile(path_of(slow_run[0] / "profile", 0)).header
    assert " copies" not in merge.merge(copied / "profile").text, "a CPU has none"


def test_on_a_cpu_communication_is_where_no_operator_runs() -> None:
    process, ms = Process(), 1_000_000
    for one in (
        event("step 4", "user_annotation", 1, 0, 20 * ms),
        event("backward", "user_annotation", 1, 0, 19 * ms),
        event("aten::first", "cpu_op", 1, 0, 2 * ms),
        event("c10d::allreduce_", "cpu_op", 1, 2 * ms, 2 * ms + 10),
        event("gloo:all_reduce", "user_annotation", 2, 2 * ms + 100, 4 * ms),
        event("aten::hides_it", "cpu_op", 1, 2 * ms + 20, 5 * ms),
        event("c10d::allreduce_", "cpu_op", 1, 5 * ms, 5 * ms + 10),
        event("gloo:all_reduce", "user_annotation", 2, 5 * ms + 100, 13 * ms),  # says so when the next operator runs already
        event("aten::waited", "cpu_op", 1, 11 * ms, 15 * ms),
        event("c10d::allgather_", "cpu_op", 3, 16 * ms, 17 * ms),  # by a save, beside the training
        event("gloo:all_gather", "user_annotation", 2, 16 * ms, 18 * ms),
    ):
        process.add(one)
    account = process.account()
    assert account.parts_ns["communication"] == account.collectives[1].exposed_ns == 6 * ms
    assert account.parts_ns["compute"] == 13 * ms
    assert [one.number for one in account.collectives] == [0, 1]


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))).map(spans.union)


@given(one=SPANS, other=SPANS)
def test_spans_are_sets_of_moments(one: spans.Spans, other: spans.Spans) -> None:
    def moments(of: spans.Spans) -> set[int]:
        return {moment for begin, end in of for moment in range(begin, end)}

    assert moments(spans.both(one, other)) == moments(one) & moments(other)
    assert moments(spans.without(one, other)) == moments(one) - moments(other)
    assert spans.length(one) == len(moments(one))
