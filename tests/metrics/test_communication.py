"""How long the ranks wait for each other, in metrics.jsonl."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import processes
import pytest
import torch
from processes import Started, accelerate, read_lines
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from app.metrics.clock import Clock
from app.metrics.communication import Communication, _replaced, _time_waits
from app.recipe.recipe_file import load

STEPS, FIRST = 10, 6
SLOW_S = 0.1
RUN = ("--recipe", "digits", "--trackers", "none", f"train.steps={STEPS}", f"log.every_steps={STEPS + 1 - FIRST}")


def busy(seconds: float) -> None:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def test_a_wait_is_in_no_other_phase_and_in_none_in_a_pause() -> None:
    began_s, clock = time.perf_counter(), Clock(torch.device("cpu"))
    busy(0.01)
    assert clock.begin_wait()
    busy(0.03)
    clock.end_wait()
    clock.lap("optimizer")
    elapsed_s = time.perf_counter() - began_s
    with clock.paused():
        assert not clock.begin_wait()
        busy(0.02)
        paused_until_s = time.perf_counter()
    clock.lap("optimizer")
    elapsed_s += time.perf_counter() - paused_until_s
    phases_s = clock.spent().phases_s
    assert phases_s["optimizer"] >= 0.01
    assert phases_s["communication"] >= 0.03
    assert phases_s["optimizer"] + phases_s["communication"] <= elapsed_s, "the pause is in one of them"


class Waiting:
    def wait(self, seconds: float) -> str:
        """Take so long."""
        busy(seconds)
        return "done"


class Patient(Waiting):
    """Has its method from elsewhere."""


@pytest.mark.parametrize("owner", [Waiting, Patient])
def test_waits_are_timed_within_the_block_alone(owner: type[Waiting]) -> None:
    """The method is its owner's own again afterwards, and so it is after an error."""
    clock, before = Clock(torch.device("cpu")), dict(vars(owner))

    def train() -> None:
        with _replaced(owner, "wait", clock):
            assert vars(owner) != before
            assert owner().wait(0.02) == "done"
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        train()
    assert dict(vars(owner)) == before
    assert owner().wait(0.02) == "done"
    clock.lap("other")
    assert 0.02 <= clock.spent().phases_s["communication"] < 0.04


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


CPU = torch.device("cpu")


@pytest.mark.usefixtures("group")
def test_torch_has_its_own_methods_before_and_after() -> None:
    owners = (torch.distributed.Work, torch.distributed.ProcessGroup, _functional_collectives)
    before = [dict(vars(owner)) for owner in owners]
    clock = Clock(CPU)
    communication = Communication(torch.nn.Linear(1, 1), clock, CPU)
    assert [dict(vars(owner)) for owner in owners] == before
    with communication.timed():
        assert vars(torch.distributed.Work)["wait"] is not before[0]["wait"]
        torch.distributed.all_reduce(torch.ones(1), async_op=True, group=torch.distributed.new_group(backend="gloo")).wait()
    assert [dict(vars(owner)) for owner in owners] == before
    clock.lap("other")
    assert clock.spent().phases_s["communication"] > 0


def test_nobody_waits_without_a_group() -> None:
    communication = Communication(torch.nn.Linear(1, 1), Clock(CPU), CPU)
    assert not communication.is_timed
    with communication.timed():
        assert "wait" in vars(torch.distributed.Work)


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": torch.distributed.all_reduce,
    "broadcast": lambda tensor: torch.distributed.broadcast(tensor, 0),
    "all_gather": lambda tensor: torch.distributed.all_gather([torch.empty_like(tensor)], tensor),
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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "the stream that trains")
    clock = Clock(CPU)
    with ExitStack() as replaced:
        _time_waits(clock, torch.device("cuda"), replaced)
        COLLECTIVES[collective](torch.ones(4))
        clock.lap("forward_backward")
    found_s = clock.spent().phases_s["communication"]
    assert found_s > 0
    COLLECTIVES[collective](torch.ones(4))
    clock.lap("forward_backward")
    assert clock.spent().phases_s["communication"] == found_s


# DDP ------------------------------------------------------------------------------------------------------------------------


def slowly(bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A reduction that is done after some time."""
    future = torch.futures.Future[torch.Tensor]()
    threading.Timer(SLOW_S / 2, future.set_result, [bucket.buffer()]).start()
    return future


@pytest.mark.usefixtures("group")
def test_ddp_is_timed_from_its_last_gradient_to_the_end_of_the_pass() -> None:
    """And its gradients are the same, and what it was given to be timed is taken away again."""
    clock, model = Clock(CPU), DistributedDataParallel(torch.nn.Linear(4, 2), gradient_as_bucket_view=True)
    model.register_comm_hook(None, lambda _, bucket: slowly(bucket))
    inputs = torch.randn(8, 4)

    def pass_took_s() -> tuple[float, list[torch.Tensor]]:
        before_s = clock.spent().phases_s["communication"]
        model(inputs).square().sum().backward()
        clock.lap("forward_backward")
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
        return clock.spent().phases_s["communication"] - before_s, gradients

    communication = Communication(model, clock, CPU)
    untimed_s, gradients = pass_took_s()
    with communication.timed():
        timed = [pass_took_s() for _ in range(3)]
        with model.no_sync():
            kept_s, _ = pass_took_s()
        with clock.paused():
            paused_s, _ = pass_took_s()
    assert (untimed_s, kept_s, paused_s, pass_took_s()[0]) == (0.0, 0.0, 0.0, 0.0)
    for took_s, timed_gradients in timed:
        assert SLOW_S / 4 < took_s < SLOW_S
        assert all(torch.equal(*pair) for pair in zip(timed_gradients, gradients, strict=True))


@pytest.mark.usefixtures("group")
def test_ddps_own_timers_measure_its_first_steps_alone() -> None:
    """On a GPU each step that they measure waits for the backward pass before it."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    with Communication(model, Clock(CPU), CPU).timed():
        for _ in range(250):
            model(torch.ones(1, 1)).sum().backward()
    assert model._get_ddp_logging_data()["iteration"] == 10


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
    with Communication(model, clock, device).timed():
        for step in range(30):
            if step == 11:
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


# All presets ----------------------------------------------------------------------------------------------------------------


def shares_of(run_dir: Path) -> list[float]:
    """The shares in the last line."""
    line = read_lines(run_dir / "metrics.jsonl")[-1]
    shares = [line[name] for name in ("data_wait_share", "forward_backward_share", "optimizer_share", "communication_share")]
    assert sum(shares) <= 1.0
    return shares


@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["deepspeed_zero3", "fsdp2"])
def test_a_group_of_one_process_is_timed_like_any_other(preset: str, tmp_path: Path) -> None:
    processes.train(preset, tmp_path, *RUN, processes=1).check()
    assert 0 <= shares_of(tmp_path)[-1] < 0.5


@pytest.mark.gpu
@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["multi_gpu", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_a_group_of_one_gpu_is_timed_by_its_stream(preset: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "launch", "--preset", preset, "--processes", "1"]
    Started([*command, "--run-dir", str(tmp_path), *RUN]).wait().check()
    assert 0 <= shares_of(tmp_path)[-1] < 1


@pytest.mark.multiproc
@pytest.mark.parametrize("preset", ["multi_gpu", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_a_slow_rank_is_waited_for(preset: str, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in nearly all of each step, and rank 1 for no one: half of the time of both.

    On a loaded machine the rest of a step takes longer, so what is measured at least is seconds.
    """
    script, slow_s = str(processes.SCRIPTS / "slow_rank.py"), 3 * SLOW_S
    processes.run(preset, 2, script, "1", str(slow_s), "--run-dir", str(tmp_path), *RUN).check()
    share, line = shares_of(tmp_path)[-1], read_lines(tmp_path / "metrics.jsonl")[-1]
    step_s = load(str(tmp_path / "recipe.yaml")).recipe.train.global_batch_size / line["samples_per_s"]
    assert share * step_s > 0.3 * slow_s
    assert share < 0.6


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_compiled_model_tells_it_too_and_learns_the_same(tmp_path: Path) -> None:
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    processes.train("multi_gpu", plain, *RUN, processes=2).check()
    target = ("-m", "app.train", "--run-dir", str(compiled), *RUN)
    output = Started(accelerate("multi_gpu", "--dynamo_backend", "inductor", target=target, processes=2)).wait().check().output
    assert "uncompiled" not in output
    lines, plain_lines = (read_lines(run_dir / "metrics.jsonl") for run_dir in (compiled, plain))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in plain_lines], rel=1e-5)
    assert lines[-1]["communication_share"] is not None


@pytest.mark.gpu
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
    with _replaced(torch.cuda.Stream, "wait_event", clock, lambda stream, *_: bool(stream == training)):
        training.wait_stream(other)
    clock.lap("forward_backward")
    phases_s = clock.spent().phases_s
    slept_s = began.elapsed_time(ended) / 1000
    assert phases_s["communication"] == pytest.approx(slept_s, rel=0.2)
    assert phases_s["forward_backward"] < 0.2 * slept_s
