"""Cores from what a process is bound to, its cgroups and its job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import REPOSITORY, captured

from app.data.loader import num_workers
from app.environment.host import quota, share


@pytest.mark.parametrize(
    ("environment", "local_world_size", "bound", "limit", "cores"),
    [
        ({}, 16, 8, None, 1),
        ({}, 2, 8, 6.0, 3),
        # One task a node, which starts the ranks: they share its CPUs, wherever it may run.
        (captured("slurm/2node-1task-gres2-step-task0"), 2, 64, None, 2),
        # Each rank is a task: it has its own.
        (captured("slurm/2node-2task-gres2-step-task3"), 2, 64, None, 2),
        # A batch script has all that the job has on its node.
        (captured("slurm/2node-2task-gres2-batch"), 1, 64, None, 4),
    ],
)
def test_the_least_that_anything_grants(environment, local_world_size, bound, limit, cores) -> None:
    assert share(environment, local_world_size, bound=bound, quota=limit) == cores


@pytest.mark.parametrize(
    ("files", "memberships", "cores"),
    [
        ({"job/cpu.max": "250000 100000\n"}, "0::/job/step\n", 2.5),
        ({"cpu.max": "100000 100000\n"}, "0::/not/here\n", 1.0),
        ({"cpu,cpuacct/a/cpu.cfs_quota_us": "150000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpuset:/\n1:cpu:/\n0::/\n", None),
    ],
)
def test_both_versions_of_cgroups(tmp_path: Path, files: dict[str, str], memberships: str, cores: float | None) -> None:
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    (tmp_path / "memberships").write_text(memberships)
    assert quota(tmp_path / "memberships", tmp_path / "cgroup") == cores
    assert quota(tmp_path / "nothing", tmp_path) is None


def test_a_process_that_is_bound_to_one_core_has_one() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); from app.environment import host; print(host.usable(1))"
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert finished.stdout == "1\n"


@pytest.mark.parametrize(("cores", "device", "workers"), [(1, "cpu", 0), (4, "cpu", 3), (64, "cuda", 16)])
def test_where_the_cpu_trains_one_core_is_kept_for_that(cores: int, device: str, workers: int) -> None:
    assert num_workers(None, cores, torch.device(device)) == workers
