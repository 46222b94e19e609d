"""`samerun plan`: which presets fit, which is the cheapest, and what is said where nothing does."""

from __future__ import annotations

import json

import pytest

from app.errors import LackOfMemoryError, RecipeError
from app.planning import plan


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert plan.main(["--recipe", "digits", "--device", "24GiB", *words]) == 0
    return capsys.readouterr().out


def test_offloaded_state_is_shown_by_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "2,8", "--nodes-of", "4", "--presets", "multi_gpu,deepspeed_zero3_offload"]
    found = json.loads(planned(capsys, *words, "--json"))
    few, many = (next(row for row in each["rows"] if row["sharding"]["offload"]) for each in found["devices"])
    assert few["host_of_a_node"] == pytest.approx(many["host_of_a_node"] * 2, rel=1e-3), "half of the model on each node"
    with pytest.raises(LackOfMemoryError, match="take more devices, or devices with more memory"):
        plan.main(["--device", "1MiB", "--devices", "2", "--presets", "deepspeed_zero3_offload"])
    assert "nothing fits" in capsys.readouterr().out, "the plan is printed all the same"


def test_devices_that_cannot_divide_the_batch_are_a_line_and_the_others_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--devices", "3,2", "--presets", "multi_gpu")
    assert "not possible: train.global_batch_size is 64, which 3 processes cannot split" in text
    assert "nothing fits" not in text
    assert "2 devices, MiB on each" in text
    assert "samerun launch --processes 2 --preset multi_gpu" in text
    with pytest.raises(RecipeError, match="which 3 processes cannot split"):
        plan.main(["--recipe", "digits", "--devices", "3", "--presets", "multi_gpu"])


def test_a_plan_without_data_has_the_vocabulary_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("data.sequence_length=64", "train.global_batch_size=2", "model.intermediate_size=64", "model.layers=1")
    words = ("--recipe", "llama3_8b", "--devices", "2", "--presets", "fsdp2,tensor_parallel", "--json", *small)
    assert plan.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["parameters"] - 2 * 128_256 * 4096 < 5 * 4096 * 4096
    assert all(row["fits"] for row in found["devices"][0]["rows"])


def test_a_plan_names_the_cheapest_and_hsdp_on_one_node_is_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(planned(capsys, "--devices", "2", "--presets", "hsdp,fsdp2,multi_gpu,tensor_parallel", "--json"))
    (of_two,) = found["devices"]
    assert of_two["cheapest"]["command"].startswith("samerun launch --processes 2 --preset multi_gpu --recipe digits")
    rows = {row["preset"]: row for row in of_two["rows"]}
    assert next(iter(rows)) == "multi_gpu"
    held = rows["multi_gpu"]["memory"]
    assert held["total"] == sum(size for kind, size in held.items() if kind not in ("total", "host")) > 0
    assert {**rows["hsdp"], "preset": "fsdp2"} == rows["fsdp2"]
    assert "a model with a tensor parallel plan" in rows["tensor_parallel"]["problem"], "the others are planned all the same"
