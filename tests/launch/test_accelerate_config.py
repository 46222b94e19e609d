"""Files as `accelerate config` writes them: what agrees with the launch or says nothing is taken, in one note."""

from __future__ import annotations

import builtins
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.menu import BulletMenu

from app.environment.topology import Topology
from app.errors import PresetError
from launch import cli, preset
from launch.node_command import accelerate_argv

GPUS = {"type of machine": "multi-GPU", "How many GPU": "4"}
ZERO = {**GPUS, "use DeepSpeed": "yes"}
FSDP = {**GPUS, "FullyShardedDataParallel": "yes"}
NODES = {**GPUS, "How many different": "2", "rank of this": "1", "IP address": "10.0.0.1", "What is the port": "29500"}
ANSWERS = {
    "cpu": {"CPU only": "yes"},
    "multi_gpu": {**GPUS, "mixed precision": "bf16"},
    "zero3": {**ZERO, "ZeRO optimization": "3"},
    "compiled": {**GPUS, "torch dynamo": "yes"},
    "two_nodes": NODES,
    "accumulating": {**ZERO, "gradient accumulation": "4"},
    "fsdp2": {**FSDP, "version": "2"},
}


def answered(path: Path, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of what `accelerate config` writes when it is answered so, and with nothing where it has a default."""
    left = iter(range(100))  # an answer that it refuses is asked for again

    def answer(question: str) -> str | None:
        assert next(left, None) is not None, question
        return next((given for words, given in answers.items() if re.search(words, question)), None)

    def choose(menu: BulletMenu, default_choice: int = 0) -> int:
        given = answer(menu.prompt)
        return default_choice if given is None else [str(choice) for choice in menu.choices].index(given)

    monkeypatch.setattr(BulletMenu, "run", choose)  # it wants a terminal
    monkeypatch.setattr(builtins, "input", lambda question="": answer(question) or "")
    get_cluster_input().to_yaml_file(path)
    return str(path)


def dry_run(path: str, *arguments: str) -> int:
    return cli.main(["launch", "--dry-run", "--preset", path, *arguments])


@pytest.mark.parametrize(("name", "processes"), [("cpu", 1), ("multi_gpu", 4), ("zero3", 4), ("compiled", 4)])
def test_what_says_nothing_of_the_machine_is_used_as_it_is(
    name: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = answered(tmp_path / f"{name}.yaml", ANSWERS[name], monkeypatch)
    capsys.readouterr()
    assert dry_run(path) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[command.index("--num_processes") + 1] == str(processes)
    assert dry_run(path, "--processes", str(processes)) == 0


CONTRADICTIONS = {
    "two_nodes": ["machine_rank is 1: it belongs to the machine: remove it", "main_process_ip is ", "main_process_port is "],
    "accumulating": ["gradient_accumulation_steps is 4: it is derived from the recipe"],
    "fsdp2": ["fsdp_transformer_layer_cls_to_wrap is empty"],
}


@pytest.mark.parametrize(("name", "sentences"), CONTRADICTIONS.items())
def test_only_what_contradicts_is_refused(
    name: str, sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = answered(tmp_path / f"{name}.yaml", ANSWERS[name], monkeypatch)
    with pytest.raises(PresetError) as caught:
        preset.load(path)
    problems = str(caught.value).splitlines()
    assert len(problems) == len(sentences)
    assert [sentence for sentence, problem in zip(sentences, problems, strict=True) if sentence not in problem] == []


def test_the_default_file_is_used_as_it_is(tmp_path: Path) -> None:
    write_basic_config(mixed_precision="bf16", save_location=str(tmp_path / "default_config.yaml"))
    assert dry_run(str(tmp_path / "default_config.yaml")) == 0


TWO_NODES = Topology(num_nodes=2, processes_per_node=2, head_address="a", port=29500)


def test_another_number_than_that_of_the_launch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = preset.load(answered(tmp_path / "multi_gpu.yaml", ANSWERS["multi_gpu"], monkeypatch))
    with pytest.raises(PresetError, match="num_processes is 4, and this launch has 2: remove it"):
        accelerate_argv(Topology(processes_per_node=2), loaded, [])
    with pytest.raises(PresetError, match="num_machines is 1, and this launch has 2"):
        accelerate_argv(TWO_NODES, loaded, [])


def test_a_deepspeed_file_for_one_node_is_refused_on_two(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    loaded = preset.load(str(tmp_path / "zero.yaml"))
    assert accelerate_argv(Topology(), loaded, [])
    with pytest.raises(PresetError, match="deepspeed_multinode_launcher is missing, which means pdsh: it must be standard"):
        accelerate_argv(TWO_NODES, loaded, [])
