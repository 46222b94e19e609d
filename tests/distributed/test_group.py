"""The process group: how long its ranks wait for each other, and that each has a device of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from processes import SCRIPTS, TIMEOUT_S, free_port, run

from app.distributed import process_store
from app.distributed.agreement import LONGEST_WAIT
from app.distributed.process_store import RankDevice
from app.distributed.runtime import _time_out
from app.errors import TopologyError

# Longer than two ranks differ in starting on two busy cores.
BY_TORCH_S, LATE_S = 10, 15


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "preset",
    [
        "deepspeed_zero3",
        *(pytest.param(preset, marks=pytest.mark.slow) for preset in ("multi_gpu", "fsdp2")),
        pytest.param("deepspeed_zero2", marks=pytest.mark.long),
    ],
)
def test_ranks_wait_for_a_late_one_for_longer_than_torch_would_let_them(preset: str) -> None:
    finished = run(preset, 2, str(SCRIPTS / "late.py"), str(BY_TORCH_S), str(LATE_S)).check()
    for rank in range(2):
        assert f"rank {rank} came together" in finished.output
        assert f"rank {rank} took a step" in finished.output


@pytest.mark.parametrize(
    ("hang_timeout_s", "time_out_s"), [(None, 1800), (540, 1800), (901, 1802), (7200, 14400), (0, LONGEST_WAIT.total_seconds())]
)
def test_the_watchdog_speaks_before_a_collective_is_over(hang_timeout_s: int | None, time_out_s: float) -> None:
    assert _time_out(hang_timeout_s) == timedelta(seconds=time_out_s)


GPU = RankDevice(rank=0, host="node1", name="cuda:0", identity="GPU-a", visible=2)


def node(*ranks: RankDevice) -> list[RankDevice]:
    return [device._replace(rank=rank) for rank, device in enumerate(ranks)]


def meet(port: int, device: RankDevice, world_size: int, timeout_s: float) -> tuple[str, dist.TCPStore]:
    """Return the refusal, if any, and the store, which rank 0 has to keep until the others have read it."""
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=device.rank == 0, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    try:
        process_store.check(process_store.exchange(store, device, world_size))
    except TopologyError as error:
        return str(error), store
    return "", store


def sentences(*starting: RankDevice, world_size: int, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Return the refusals of processes with these devices when they meet, in the order of their ranks."""
    port = free_port()
    with ThreadPoolExecutor(len(starting)) as pool:
        met = list(pool.map(lambda device: meet(port, device, world_size, timeout_s), starting))
    return [refusal for refusal, _ in met]


def test_processes_that_would_share_a_device_are_told_so_when_they_meet() -> None:
    """The devices are made up; whose they are the processes do tell each other."""
    shared = GPU._replace(visible=1)
    expected = (
        "ranks 0, 1 on node1 would share cuda:0 (of 1 visible there): start at most one process per visible device of a node "
        "(--processes, --num_processes, or the scheduler's tasks per node)."
    )
    assert sentences(*node(shared, shared), world_size=2) == [expected] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    (sentence,) = sentences(GPU, world_size=3, timeout_s=2)
    assert sentence == "rank 0 on node1 waited for ranks 1, 2 of 3, which never came: check why they did not start, or ended."


CPU = RankDevice(rank=0, host="node1", name="cpu")
OTHER = GPU._replace(name="cuda:1", identity="GPU-b")
ELSEWHERE = GPU._replace(host="node2", identity="GPU-c")
ONLY = GPU._replace(visible=1)


@pytest.mark.parametrize("there", [node(CPU, CPU), node(GPU, OTHER, ELSEWHERE), node(ONLY, ONLY._replace(identity="GPU-b"))])
def test_devices_of_their_own_are_no_error(there: list[RankDevice]) -> None:
    process_store.check(there)
