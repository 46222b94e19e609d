"""What the launcher knows of the application before anything starts: its options, its models, its trackers."""

from __future__ import annotations

import itertools
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torchvision import models as zoo
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app import options, tasks
from app.errors import TrackerError
from app.recipe import recipe_file
from app.tasks.causal_lm.sections import architectures
from app.tasks.image_classification.sections import model_names
from launch import cli, preset
from launch.start import resolved


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = cli.main(["launch", "--dry-run", *arguments])
    captured = capsys.readouterr()
    return code, shlex.split(captured.out), captured.err


def test_the_models_are_those_of_the_libraries() -> None:
    assert list(model_names()) == ["convnet", *zoo.list_models(module=zoo)]
    assert set(architectures()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_trackers_are_those_of_the_library() -> None:
    assert set(options.TRACKERS) == set(LOGGER_TYPE_TO_CLASS)
    assert options.trackers("tensorboard,none, tensorboard") == ["tensorboard"]
    with pytest.raises(TrackerError, match="--trackers has comet_ml, which is not installed here: pip install comet-ml"):
        options.trackers("comet_ml")


def test_each_hint_for_a_name_of_another_program_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its options are options of the command, or of `samerun launch`; its keys are those of the task, and take the values."""
    for hint in recipe_file.other_programs():
        for key, value in re.findall(r"([a-z]+\.\w+)=([\w.]+(?:,[\d.]+)*)?(?!\.)", hint):
            task = next(it for it in ("digits", "finetune_lm") if key in recipe_file.kinds(recipe_file.load(it).recipe.task))
            assert recipe_file.load(task, [f"{key}={value}"] if value.strip(".") else []), hint
        for name in re.findall(r"--preset (\w+)", hint.replace("FILE", "cpu")):
            assert preset.load(name)
    everywhere = set(resolved.options())
    for command in ("launch", "train", "submit", "plan", "sweep", "parity", "scale", "evaluate", "export", "report"):
        with suppress(SystemExit):
            cli.main([command, "--help"])
        options = {*re.findall("--[a-z-]+", capsys.readouterr().out), *(everywhere if command in ("launch", "sweep") else ())}
        for name, task in itertools.product({*" ".join(recipe_file.other_programs().values()).split()}, tasks.SHIPPED):
            hint = recipe_file.meant(name, task, options)
            allowed = everywhere if hint.startswith("`samerun launch` has") else options
            assert set(re.findall("--[a-z-]+", hint)) <= allowed, (command, name, hint)
            assert set(re.findall(r"([a-z]+\.\w+)=", hint)) <= recipe_file.kinds(task).keys(), (name, hint)
    assert resolved.read(["--mixed-precision", "bf16", "--trackers", "wandb", "--resume", "auto"])


def test_the_words_of_accelerate_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    ours = dry_run(capsys, "--preset", "fsdp2", "--processes", "2", "--port", "29512", "--mixed-precision", "bf16")
    theirs = ["--config_file", "fsdp2", "--num_processes", "2", "--main_process_port", "29512", "--mixed_precision=bf16"]
    assert ours[0] == 0
    assert dry_run(capsys, *theirs, "--num_machines", "1") == ours
    ours = dry_run(capsys, "--preset", "hsdp", "--processes", "4", "--replicas", "2")
    assert ours[1][ours[1].index("--parallelism_config_dp_replicate_size") + 1] == "2"
    assert (
        dry_run(capsys, "--config_file", "hsdp", "--num_processes", "4", "--parallelism_config_dp_replicate_size", "2") == ours
    )


def test_their_number_of_processes_is_that_of_all_nodes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMERUN_HOSTS", "node-a,node-b")
    batch = "train.global_batch_size=12"
    by_node = dry_run(capsys, "--processes-per-node", "2", batch)
    assert dry_run(capsys, "--num_processes", "4", batch)[2] == by_node[2]
    assert by_node[0] == 0
    for arguments, sentence in {
        ("--num_processes", "3"): "--num_processes is 3, the total number of processes, on 2 nodes: it must be a multiple of 2",
        ("--num_processes", "4", "--processes-per-node", "1"): "on 2 nodes, and another option asks for 1 per node",
    }.items():
        code, _, errors = dry_run(capsys, *arguments)
        assert (code, sentence in errors) == (5, True)


def test_a_run_that_goes_on_needs_no_more_what_it_began_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--run-dir", str(tmp_path), f"train.init_from={tmp_path / 'gone.safetensors'}"]
    assert dry_run(capsys, *arguments)[0] == 11
    (tmp_path / "recipe.yaml").touch()
    assert dry_run(capsys, *arguments)[0] == 0
    code, _, said = dry_run(capsys, *arguments, "--resume", "never")
    assert (code, "which already contains a run (it has a recipe.yaml)" in said) == (7, True)
