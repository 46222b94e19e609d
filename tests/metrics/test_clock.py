"""Where the time of a run goes, how long the ranks wait for each other, and what a device can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from processes import read_lines
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from app.metrics import clock
from app.metrics.clock import Clock, waits_timed
from app.recipe.recipe_file import load

CPU = torch.device("cpu")


def busy(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def test_laps_are_the_time_of_their_phases_without_waits_and_a_pause_is_in_none() -> None:
    clock = Clock(CPU)
    busy(0.02)
    clock.lap("data_wait")
    before = clock.spent()
    with clock.held():
        assert not clock.begin_wait()
        busy(0.05)
    busy(0.01)
    assert clock.begin_wait()
    busy(0.03)
    clock.end_wait()
    busy(0.01)
    clock.lap("optimizer")
    whole = clock.spent()
    spent = whole - before
    assert before.phases_s["data_wait"] >= 0.02
    assert spent.phases_s["data_wait"] == 0.0
    assert spent.phases_s["optimizer"] >= 0.02
    assert spent.phases_s["communication"] >= 0.03
    assert spent.held_s >= 0.05
    assert 0 <= whole.training_s - sum(whole.phases_s.values()) < 0.01  # what came after the last lap


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
    assert len(clock._marks) < 1000
    assert clock.spent().phases_s["data_wait"] >= 0.05


# Waiting for other ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": torch.distributed.all_reduce,
    "all_gather_into_tensor": lambda tensor: torch.distributed.all_gather_into_tensor(torch.empty_like(tensor), tensor),
    "reduce_scatter_tensor": lambda tensor: torch.distributed.reduce_scatter_tensor(torch.empty_like(tensor), tensor),
    "functional": lambda tensor: _functional_collectives.wait_tensor(
        _functional_collectives.all_reduce(tensor, "sum", torch.distributed.distributed_c10d._get_default_group())
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # these are the names that FSDP2 calls
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_goes_into_a_gpus_stream_is_found(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through gloo, on a stream that is none: this torch still has the methods by which its collectives go."""
    stream = SimpleNamespace(device=None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    clock = Clock(CPU)
    with waits_timed(torch.nn.Linear(1, 1), clock, torch.device("cuda")):
        COLLECTIVES[collective](torch.ones(4))
        clock.lap("forward_backward")
    found_s = clock.spent().phases_s["communication"]
    assert found_s > 0
    COLLECTIVES[collective](torch.ones(4))
    clock.lap("forward_backward")
    assert clock.spent().phases_s["communication"] == found_s


@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["multi_gpu", "deepspeed_zero3", "fsdp2"])
def test_every_line_says_where_the_time_went_and_a_slow_rank_is_waited_for(preset: str, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in nearly all of each step, and rank 1 for no one: half of the time of both.

    On a loaded machine the rest of a step takes longer, so what is measured at least is seconds.
    """
    script, slow_s = str(processes.SCRIPTS / "slow_rank.py"), 0.3
    run = ("--run-dir", str(tmp_path), "--recipe", "digits", "--trackers", "none", "train.steps=10", "log.every_steps=5")
    output = processes.run(preset, 2, script, "1", str(slow_s), *run).check().output
    _, line = read_lines(tmp_path / "metrics.jsonl")
    shares = [line[f"{phase}_share"] for phase in ("data_wait", "forward_backward", "optimizer", "communication")]
    assert all(share >= 0 for share in shares)
    assert sum(shares) <= 1.0
    step_s = load(str(tmp_path / "recipe.yaml")).recipe.train.global_batch_size / line["samples_per_s"]
    assert line["communication_share"] * step_s > 0.3 * slow_s
    assert line["communication_share"] < 0.6
    assert line["optimizer_share"] > 0
    assert line["slowest_rank"] == 1
    assert 1.1 < line["slowest_rank_ratio"] < 2.0
    assert f"  rank 1 is {line['slowest_rank_ratio']:.1f} x the median" in output
    assert line["samples_per_s_per_device"] == pytest.approx(line["samples_per_s"] / 2)
    assert line["flops_per_s"] > 0
    assert line["mfu"] is None  # a CPU's peak is not known
    assert line["memory_bytes"] > 50e6


@pytest.mark.gpu
@pytest.mark.usefixtures("group")
def test_on_a_gpu_ddp_is_timed_and_the_host_waits_for_nothing() -> None:
    device, side = torch.device("cuda", 0), torch.cuda.Stream()
    clock, model = Clock(device), DistributedDataParallel(torch.nn.Linear(4, 2).to(device), device_ids=[0])

    def slowly_on_another_stream(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future[torch.Tensor](devices=[device])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # cycles: some 0.03 s
            future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda _, bucket: slowly_on_another_stream(bucket))
    inputs, began, ended = torch.randn(8, 4, device=device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with waits_timed(model, clock, device):
        for step in range(30):
            if step == 11:  # DDP's own timers wait in its first ten steps
                before_s, began_s = clock.spent().phases_s, time.perf_counter()
                began.record()
            model(inputs).square().sum().backward()
            clock.lap("forward_backward")
        host_s = time.perf_counter() - began_s
        ended.record()
        spent_s = clock.spent().phases_s
    gpu_s = began.elapsed_time(ended) / 1000
    assert host_s < gpu_s / 2, "the host waited"
    assert spent_s["communication"] - before_s["communication"] > 0.8 * gpu_s


@pytest.mark.gpu
@pytest.mark.usefixtures("group")
def test_on_a_gpu_the_training_stream_waits_not_the_host() -> None:
    """What a collective does to the streams of a GPU, by streams alone: one process has nobody to wait for."""
    device = torch.device("cuda")
    clock, training, other = Clock(device), torch.cuda.current_stream(), torch.cuda.Stream()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    other.wait_stream(training)
    with torch.cuda.stream(other):
        began.record()
        torch.cuda._sleep(100_000_000)  # cycles: some 0.05 s
        ended.record()
    with waits_timed(torch.nn.Linear(1, 1), clock, device):
        training.wait_stream(other)
    clock.lap("forward_backward")
    phases_s = clock.spent().phases_s
    slept_s = began.elapsed_time(ended) / 1000
    assert phases_s["communication"] == pytest.approx(slept_s, rel=0.2)
    assert phases_s["forward_backward"] < 0.2 * slept_s


# (fp16, bf16, TF32, float32) in 1e12 FLOP/s, dense, as the makers' data sheets have them.
PEAKS: dict[str, tuple[float | None, ...]] = {
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9),
    "Tesla V100-SXM2-16GB": (125, None, 15.7, 15.7),  # no TF32, and bf16 is emulated
    "NVIDIA RTX A1000": (None, None, None, None),  # names are parts of others
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": (None, None, None, None),
}


@pytest.mark.parametrize(("name", "peaks"), PEAKS.items())
def test_the_peak_of_a_device_is_that_of_its_whole_name(name: str, peaks: tuple[float | None, ...]) -> None:
    asked = (("fp16", True), ("bf16", True), ("no", True), ("no", False))
    found = [clock.peak_of(name, mixed_precision=precision, tf32=tf32) for precision, tf32 in asked]
    assert found == [None if peak is None else pytest.approx(peak * 1e12) for peak in peaks]
