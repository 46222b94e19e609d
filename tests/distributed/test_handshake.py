"""Each trap that would train something else without a word is started on purpose, with real processes, and stops."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import SCRIPTS, Started, accelerate, free_port, launch, read, read_lines, run, train

from app.errors import PresetError

pytestmark = pytest.mark.multiproc

SHORT = ("--recipe", "digits", "train.steps=3", "log.every_steps=1")


def test_multi_cpu_starts_one_process_where_two_were_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "preset.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 2\nuse_cpu: true\n")
    finished = launch(config, tmp_path / "run", *SHORT)
    assert finished.returncode != 0
    assert "TopologyError: `accelerate launch` was asked for several processes" in finished.output
    assert "multi_gpu.yaml" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="tests a machine without a GPU")
@pytest.mark.parametrize(
    ("config", "arguments", "sentence"),
    [
        ("multi_gpu", (), "the launcher started 2 processes, but Accelerate sees 1: they would train unsynchronized copies"),
        ("deepspeed_zero2", ("--cpu",), "the preset asks for deepspeed, but Accelerate set up MULTI_CPU"),
        ("fsdp2", (), "the preset asks for fsdp2, but Accelerate set up NO"),
    ],
)
def test_a_plain_accelerator_under_a_preset(config: str, arguments: tuple[str, ...], sentence: str) -> None:
    finished = run(config, 2, str(SCRIPTS / "naive.py"), *arguments)
    assert finished.returncode != 0
    assert sentence in finished.output


def test_deepspeed_does_not_clip_at_its_own_default(tmp_path: Path) -> None:
    """DeepSpeed clips at 1.0 unless it is told otherwise; without clipping the first gradient here is larger."""
    arguments = (*SHORT, "optim.name=sgd", "optim.lr=0.05", "optim.warmup_epochs=null", "data.std=0.02", "model.pooling=max")
    arguments += ("train.validation_fraction=null", "optim.clip_norm=null")
    found = []
    for name, processes in (("cpu", None), ("deepspeed_zero2", 2)):
        train(name, tmp_path / name, *arguments, processes=processes).check()
        found.append(read_lines(tmp_path / name / "metrics.jsonl"))
    assert found[0][0]["grad_norm"] > 1.2
    losses, expected = ([line["loss"] for line in lines] for lines in found)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="fp16 is accepted on a machine with a GPU")
def test_fp16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    """Accelerate would train in float32 under most presets, and the run folder would say fp16."""
    finished = train("deepspeed_zero2", tmp_path / "run", *SHORT, processes=2, env={"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert finished.returncode == PresetError.exit_code
    assert "finds no GPU here: fp16 needs a GPU" in finished.output
    assert not (tmp_path / "run").exists()


def test_a_precision_of_deepspeeds_config_file_is_none_that_nobody_wrote_down(tmp_path: Path) -> None:
    automatic = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({**automatic, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    named = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json"), "ACCELERATE_CONFIG_DS_FIELDS": ""}
    finished = train("deepspeed_zero2", tmp_path / "run", *SHORT, processes=2, env=named)
    assert finished.returncode == PresetError.exit_code
    assert "mixed_precision is no, but the prepared model computes in bf16" in finished.output


def test_python_started_by_mpirun_trains_one_run(tmp_path: Path) -> None:
    ranks, port = [], str(free_port())
    for rank in ("0", "1"):
        place = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
        environment = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()} | {"MASTER_PORT": port}
        command = [sys.executable, "-m", "app.train", "--run-dir", str(tmp_path / "run"), "--trackers", "none", *SHORT]
        ranks.append(Started(command, env=environment))
    for started in ranks:
        started.wait().check()
    assert read(tmp_path / "run" / "result.json")["world_size"] == 2


def test_a_network_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    finished = launch("multi_gpu", tmp_path / "run", *SHORT, processes=2, env={"GLOO_SOCKET_IFNAME": "nosuch"})
    assert finished.returncode != 0
    assert "TopologyError: rank 0 on" in finished.output
    assert "cannot connect to the others through gloo: " in finished.output
    assert "nosuch. GLOO_SOCKET_IFNAME names the network interface to use." in finished.output
    assert not (tmp_path / "run").exists()


def test_nodes_with_different_recipes_or_data_stop_before_the_first_step(tmp_path: Path) -> None:
    """One process on each of two nodes, which here are this machine twice."""
    recipe = ("data.source=fakedata", "data.image_size=8", "train.validation_fraction=null")
    port, nodes = str(free_port()), []
    for rank, own in enumerate((("seed=1", "data.fake_train_samples=256"), ("seed=2", "data.fake_train_samples=320"))):
        options = (
            "--num_machines",
            "2",
            "--machine_rank",
            str(rank),
            "--main_process_ip",
            "127.0.0.1",
            "--main_process_port",
            port,
        )
        target = ("-m", "app.train", "--run-dir", str(tmp_path / "run"), "--trackers", "none", *SHORT, *recipe, *own)
        nodes.append(Started(accelerate("multi_node", *options, target=target, processes=2)))
    one, other = (node.wait() for node in nodes)
    assert 0 not in (one.returncode, other.returncode)
    said = ("the ranks would not train the same run. They differ in recipe: rank 0", "initial weights: rank 0",
            "training data: rank 0", "has 256 samples", "has 320 samples")  # fmt: skip
    assert [words for words in said if words not in one.output] == [], one.output
    assert not (tmp_path / "run").exists()
