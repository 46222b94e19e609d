"""The process group: how long its ranks wait for each other, and that each has a device of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from processes import SCRIPTS, TIMEOUT_S, free_port, run

from app.distributed import handshake
from app.distributed.agreement import LONGEST_WAIT
from app.distributed.handshake import RankDevice
from app.distributed.runtime import _time_out
from app.errors import TopologyError

# Longer than two ranks differ in starting on two busy cores.
BY_TORCH_S, LATE_S = 10, 15


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("deepspeed_zero3", marks=pytest.mark.slow),
        *(pytest.param(preset, marks=pytest.mark.long) for preset in ("multi_gpu", "deepspeed_zero2", "fsdp2")),
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
CPU = RankDevice(rank=0, host="node1", name="cpu")
OTHER = GPU._replace(name="cuda:1", identity="GPU-b")
ELSEWHERE = GPU._replace(host="node2", identity="GPU-c")
ONLY = GPU._replace(visible=1)
SHARED = (
    "ranks 0, 1 on node1 would share cuda:0 (of 1 visible there): start at most one process per visible device of a node "
    "(--processes, --num_processes, or the scheduler's tasks per node)."
)


def refusals(devices: list[RankDevice], *, world_size: int, timeout_s: float) -> list[str]:
    """Return what processes with these devices, in the order of their ranks, are told when they meet; empty: nothing."""
    port, timeout = free_port(), timedelta(seconds=timeout_s)
    serving = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout)

    def meet(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", serving.port, wait_for_workers=False, timeout=timeout)
        try:
            handshake.check_devices(store, devices[rank]._replace(rank=rank), world_size)
        except TopologyError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(meet, range(len(devices))))


@pytest.mark.parametrize(
    ("devices", "refusal"),
    [([ONLY, ONLY], SHARED), ([CPU, CPU], ""), ([GPU, OTHER, ELSEWHERE], ""), ([ONLY, ONLY._replace(identity="GPU-b")], "")],
)
def test_processes_that_would_share_a_device_are_refused_when_they_meet(devices: list[RankDevice], refusal: str) -> None:
    assert refusals(devices, world_size=len(devices), timeout_s=TIMEOUT_S) == [refusal] * len(devices)


def test_a_rank_that_does_not_come_is_named() -> None:
    (sentence,) = refusals([GPU], world_size=3, timeout_s=2)
    assert sentence == "rank 0 on node1 waited for ranks 1, 2 of 3, which are missing: check why they did not start, or ended."
