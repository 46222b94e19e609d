"""`samerun plan`: what is sent, what is kept for the launcher, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import LackOfMemoryError, RecipeError, UsageError
from app.planning import devices, kept, traffic, verdict
from app.planning.kept import Kept
from app.recipe import recipe_file
from app.tools import plan_command

GIB = 2**30
WAY = Kept(
    strategy="ddp", data_ranks=8, replicas=1, tensor_parallel=1, precision="bf16", checkpoint_activations="none",
    preset="multi_gpu", always=10 * GIB, totals=((1, 20 * GIB), (4, 50 * GIB)),
)  # fmt: skip
SHARDED = replace(WAY, strategy="fsdp2", preset="fsdp2", always=GIB, totals=((1, 11 * GIB), (4, 41 * GIB)))


def test_what_is_sent_is_that_of_the_zero_paper() -> None:
    def sent(strategy: str, **more: int) -> float:
        return traffic.of_step(strategy, parameters=1000, data_ranks=4, **more).total  # type: ignore[arg-type]

    assert sent("ddp") == sent("zero1") == sent("zero2") == 2 * 3 / 4 * 4000
    assert sent("zero3") == sent("fsdp2") == 1.5 * sent("ddp")
    assert sent("zero2", accumulation=3) == 4 * 3 / 4 * 4000
    assert sent("hsdp", replicas=2) == 3 * 1 / 2 * 4000 + 2 * 1 / 2 * 4000 / 2
    assert sent("single") == 0


def test_a_plan_is_found_again_wherever_the_data_lies_and_only_for_the_same_memory(tmp_path: Path) -> None:
    environment = {"SAMERUN_CACHE": str(tmp_path)}
    recipe = recipe_file.load("gpt3_125m").recipe
    kept.write(recipe, environment, 125, [WAY])
    kept.write(recipe, environment, 125, [SHARDED])
    found = kept.read(recipe_file.load("gpt3_125m", [f"data.path={tmp_path}", "optim.lr=1"]).recipe, environment)
    assert found is not None
    assert found.ways == (WAY, SHARDED)
    assert found.find(WAY) == WAY
    assert found.find(replace(WAY, precision="no")) is None
    assert kept.read(recipe_file.load("gpt3_125m", ["model.layers=6"]).recipe, environment) is None
    assert [WAY.total(size) // GIB for size in (1, 2, 4, 5)] == [20, 30, 50, 60]


def test_what_will_not_fit_is_said_with_the_least_that_has_to_change() -> None:
    plan = kept.KeptPlan(125, (WAY, SHARDED))
    assert verdict.too_large(plan, WAY, 4, memory=60 * GIB, device="x") is None
    said = verdict.too_large(plan, WAY, 4, memory=30 * GIB, device="x")
    assert said is not None
    assert "takes 50.0 GiB of x's 30.0" in said
    assert said.endswith("this fits: train.max_micro_batch=1")
    said = verdict.too_large(plan, WAY, 4, memory=15 * GIB, device="x")
    assert said is not None
    assert said.endswith("this fits: --preset fsdp2 train.max_micro_batch=1")
    assert "train.checkpoint_activations=blocks" in verdict.ended(None, WAY, 4)


def test_what_is_offloaded_is_held_against_the_memory_of_a_nodes_host() -> None:
    offloaded = replace(WAY, strategy="zero3_offload", host=10 * GIB)
    assert verdict.too_large_for_host(offloaded, 8, memory=80 * GIB, where="all that this machine has") is None
    said = verdict.too_large_for_host(offloaded, 8, memory=64 * GIB, where="all that this machine has")
    assert said is not None
    assert "8 processes of a node offload 80.0 GiB, and its host has 64.0 GiB (all that this machine has)" in said


def _planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert plan_command.main(["--recipe", "digits", "--device", "24GiB", *words]) == 0
    return capsys.readouterr().out


def test_what_a_host_has_no_memory_for_is_marked_and_never_the_cheapest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path))
    words = ["--devices", "2,8", "--nodes-of", "4", "--presets", "multi_gpu,deepspeed_zero3_offload"]
    said = _planned(capsys, *words)
    assert "host per node" in said
    assert "whether it fits is not checked: give --host-memory, such as 512GiB" in said
    told = json.loads(_planned(capsys, *words, "--host-memory", "1MiB", "--json"))
    few, many = (next(row for row in of_number["rows"] if row["preset"].endswith("offload")) for of_number in told["devices"])
    assert few["host_of_a_node"] == pytest.approx(many["host_of_a_node"] * 2, rel=1e-3), "half of the model on each node"
    assert few["host_of_a_node"] > told["host_memory"]["usable"] > many["host_of_a_node"] > 0
    assert (few["fits"], many["fits"]) == (False, True)
    with pytest.raises(LackOfMemoryError, match="GiB of a node's host memory; take more nodes"):
        plan_command.main(
            ["--device", "24GiB", "--devices", "2", "--host-memory", "1MiB", "--presets", "deepspeed_zero3_offload"]
        )
    assert "host > 0.0" in capsys.readouterr().out, "the plan is printed all the same"


def test_devices_that_cannot_divide_the_batch_are_a_line_and_the_others_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAMERUN_CACHE", str(tmp_path))
    said = _planned(capsys, "--devices", "3,2", "--presets", "multi_gpu")
    assert "3 devices  not possible: train.global_batch_size is 64, which 3 processes cannot divide" in said
    assert "use 1, 2, 4, 8, 16, 32 processes" in said
    assert "nothing fits" not in said
    assert "samerun launch --processes 2 --preset multi_gpu" in said
    with pytest.raises(RecipeError, match="which 3 processes cannot divide"):
        plan_command.main(["--recipe", "digits", "--devices", "3", "--presets", "multi_gpu"])


def test_devices_have_names_or_sizes() -> None:
    assert devices.named("24GiB").memory == 24 * GIB
    assert devices.named("h100").torch_name == "NVIDIA H100 80GB HBM3"
    assert devices.of_scheduler("a100") == devices.named("a100-40")
    with pytest.raises(UsageError, match="a100-80 or a100-40"):
        devices.named("a100")


def test_a_real_plan_names_the_cheapest_and_the_launcher_knows_it(tmp_path: Path) -> None:
    environment = {**os.environ, "SAMERUN_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "launch.cli"]
    words = ["--recipe", "digits", "--devices", "2", "--device", "24GiB", "--presets", "multi_gpu,tensor_parallel", "--json"]
    asked = [*command, "plan", *words, "--plot", str(tmp_path / "plan.png")]
    finished = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    told = json.loads(finished.stdout)
    (of_two,) = told["devices"]
    assert told["calibrated"] is False
    assert of_two["cheapest"]["command"].startswith("samerun launch --processes 2 --preset multi_gpu --recipe digits")
    held = of_two["rows"][0]["memory"]
    assert held["total"] == sum(size for kind, size in held.items() if kind != "total") > 0
    assert "no plan for tensor parallelism" in of_two["rows"][1]["problem"], "and the others are planned all the same"
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'a tiny one, 1'\n")
    tool.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    launch = [*command, "launch", "--dry-run", "--preset", "multi_gpu", "--processes", "2", "--recipe", "digits"]
    finished = subprocess.run(launch, env=environment, capture_output=True, text=True, check=False)
    assert "it will not fit, by the plan" in finished.stderr, finished.stderr
