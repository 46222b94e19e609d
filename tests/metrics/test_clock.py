"""Where the time of a run goes, and what the ranks read off themselves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from processes import read_lines, train

from app.metrics import clock
from app.metrics.clock import Clock

SHARES = ("data_wait_share", "forward_backward_share", "optimizer_share", "communication_share")
RUN = ("--recipe", "digits", "train.steps=40", "log.every_steps=10")


def busy(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def test_laps_are_the_time_of_their_phases_and_a_pause_is_in_none() -> None:
    clock = Clock(torch.device("cpu"))
    busy(0.02)
    clock.lap("data_wait")
    before = clock.spent()
    with clock.held():
        busy(0.05)
    busy(0.01)
    clock.lap("optimizer")
    spent = clock.spent() - before
    assert before.phases_s["data_wait"] >= 0.02
    assert spent.phases_s["data_wait"] == 0.0
    assert spent.phases_s["optimizer"] >= 0.01
    assert spent.held_s >= 0.05
    whole = clock.spent()
    assert sum(whole.phases_s.values()) <= whole.training_s
    assert whole.training_s - sum(whole.phases_s.values()) < 0.01  # what came after the last lap


@pytest.mark.gpu
def test_on_a_gpu_a_lap_is_the_gpus_time_not_the_hosts() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    clock = Clock(device)
    for _ in range(50):
        matrix @ matrix
    clock.lap("forward_backward")
    began_s = time.perf_counter()
    phases_s = clock.spent().phases_s
    assert phases_s["forward_backward"] >= 0.5 * (time.perf_counter() - began_s)
    busy(0.05)  # nothing for the GPU to do: it waits
    torch.ones(1, device=device)
    for _ in range(2000):  # more than are kept
        clock.lap("data_wait")
    assert clock.spent().phases_s["data_wait"] >= 0.05
    assert len(clock._laps._pending) == 1


@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["multi_gpu", "fsdp2"])
def test_every_line_says_where_the_time_went(preset: str, tmp_path: Path) -> None:
    train(preset, tmp_path, *RUN, processes=2).check()
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert len(lines) == 4
    for line in lines:
        shares = [line[name] for name in SHARES]
        assert all(share >= 0 for share in shares)
        assert 0.2 < sum(shares) <= 1.0
        assert line["optimizer_share"] > 0
        assert line["samples_per_s_per_device"] == pytest.approx(line["samples_per_s"] / 2)
        assert line["flops_per_s"] > 0
        assert line["mfu"] is None  # a CPU's peak is not known
        assert line["memory_bytes"] > 50e6


# (fp16, bf16, TF32, float32) in 1e12 FLOP/s, dense, as the makers' data sheets have them.
KNOWN = {
    "NVIDIA A100-SXM4-80GB": (312, 312, 156, 19.5),
    "A100-SXM4-80GB": (312, 312, 156, 19.5),  # drivers of before 2021
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9),
    "Tesla V100-SXM2-16GB": (125, None, 15.7, 15.7),  # no TF32, and bf16 is emulated
    "AMD Instinct MI300X": (1307.4, 1307.4, 163.4, 163.4),
}
UNKNOWN = [
    "NVIDIA RTX A1000",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "GRID A100-40C",
    "",
    "nvidia a100",
]


@pytest.mark.parametrize(("name", "peaks"), KNOWN.items())
def test_the_peak_of_a_device_is_that_of_its_whole_name(name: str, peaks: tuple[float | None, ...]) -> None:
    asked = (("fp16", True), ("bf16", True), ("no", True), ("no", False))
    found = [clock.peak_of(name, mixed_precision=precision, tf32=tf32) for precision, tf32 in asked]
    assert found == [None if peak is None else pytest.approx(peak * 1e12) for peak in peaks]


def test_a_device_with_a_similar_name_is_not_known() -> None:
    assert {clock.peak_of(name, mixed_precision="no", tf32=True) for name in UNKNOWN} == {None}
