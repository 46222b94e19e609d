"""Launching on this machine: topology, the command line, and `samerun` itself.

The golden file holds the exact command for every preset; after an intended change:
    PYTHONPATH=. python tests/launch/test_launch.py > tests/golden/accelerate_argv.txt
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from processes import Started, clean_environment, placed, unwritable

from app.environment.topology import Topology
from app.recipe import recipe_file
from app.runs import run_folder
from launch import cli, preset
from launch.node_command import accelerate_argv
from launch.run_module import program
from launch.schedulers import detect, hosts

ROOT = Path(cli.__file__).parent.parent
GOLDEN = Path(__file__).parents[1] / "golden" / "accelerate_argv.txt"
TWO_NODES = Topology(
    num_nodes=2, processes_per_node=4, node_rank=1, head_address="node-a", port=29501, hosts=("node-a", "node-b")
)


def golden_lines():
    app_args = ["--recipe", "digits", "--run-dir", "runs/with space", "optim.lr=0.1", "augment.crop_padding=2"]
    yield "# command of each preset on one node with 1 and 2 processes, and on node 1 of two with 4 processes each"
    for name in preset.names():
        for topology in (Topology(), Topology(processes_per_node=2), TWO_NODES):
            file = preset.load(name)
            if topology.world_size == 1 or not file.is_single_process:
                yield placed(shlex.join(accelerate_argv(topology, file, app_args)))
    yield placed(shlex.join(accelerate_argv(Topology(), preset.load("fsdp2"), [], mixed_precision="bf16")))


def test_the_commands_are_those_of_the_golden_file():
    assert list(golden_lines()) == GOLDEN.read_text().splitlines()


# Topology ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "visible",
    ["", "3,1,2", "-1", "0,-1,1", " 0 , 1", "0,1,0", "GPU-5e,GPU-89", "MIG-a/1/0", "GPU-a,GPU-a"],
)
def test_devices_are_counted_as_torch_counts_them(visible, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    expected = len(torch.cuda._parse_visible_devices())
    count, origin = hosts.count_accelerators({"CUDA_VISIBLE_DEVICES": visible}, device_folder=tmp_path)
    assert (count, origin) == (expected, f"CUDA_VISIBLE_DEVICES={visible}")


def test_without_a_list_the_device_files_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0x", "null"):
        (tmp_path / name).touch()
    assert hosts.count_accelerators({}, device_folder=tmp_path)[0] == 3
    assert detect.this_machine({}, device_folder=tmp_path).processes_per_node == 3
    assert detect.this_machine({}, processes=5, device_folder=tmp_path).processes_per_node == 5


# samerun -------------------------------------------------------------------------------------------------------------------


def dry_run(capsys, *arguments):
    code = cli.main(["launch", "--dry-run", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_finished_run_is_not_started_again(capsys, tmp_path):
    digest = recipe_file.digest(recipe_file.load("digits", []).recipe)
    files = {"outcome": {"outcome": "finished", "reason": "all", "step": 9}, "run": {"recipe_digest": digest}, "result": {}}
    for name, values in files.items():
        run_folder.write_json(tmp_path / f"{name}.json", values)
    assert cli.main(["launch", "--preset", "cpu", "--run-dir", str(tmp_path)]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"samerun: {tmp_path} is finished after step 9 (all), and nothing was changed. To continue it, ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outcome.json", "result.json", "run.json"]


def test_a_dry_run_prints_the_command_and_passes_the_rest_on(capsys):
    code, out, err = dry_run(
        capsys, "--preset", "fsdp2", "--processes", "2", "--run-dir", "a b", "optim.lr=0.1", "--trackers", "none"
    )
    app_args = ["--recipe", "digits", "--run-dir", "a b", "--resume", "auto", "optim.lr=0.1", "--trackers", "none"]
    assert code == 0
    assert shlex.split(out) == accelerate_argv(Topology(processes_per_node=2), preset.load("fsdp2"), app_args)
    assert "global batch 64 = micro-batch 32 x accumulation 1 x 2 processes" in err
    assert "samerun: processes_per_node is 2 (--processes)\n" in err
    assert "samerun: run_dir is a b (--run-dir)\n" in err


@pytest.mark.parametrize(
    ("devices", "arguments", "chosen", "processes"),
    [
        ("", [], "cpu", "1"),
        ("0", [], "single_gpu", "1"),
        ("", ["--processes", "2"], "multi_gpu", "2"),
        ("0,1", ["--preset", "deepspeed_zero3"], "deepspeed_zero3", "2"),
    ],
)
def test_what_is_not_said_is_chosen_and_said(capsys, monkeypatch, devices, arguments, chosen, processes):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    code, out, err = dry_run(capsys, *arguments)
    command = shlex.split(out)
    assert code == 0
    assert Path(command[command.index("--config_file") + 1]).stem == chosen
    assert command[command.index("--num_processes") + 1] == processes
    assert f"preset {chosen} (" in err


def test_a_run_folder_of_no_name_is_no_other_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = {run_folder.choose(None, "digits", may_exist=True) for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.is_dir() and folder.name.startswith("digits-") for folder in folders)


def test_a_named_start_gets_no_run_folder(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = shlex.split(dry_run(capsys, "--resume", "launch", "seed=1")[1])
    assert command[command.index("--recipe") :] == ["--recipe", "digits", "--resume", "launch", "seed=1"]


def test_launching_needs_none_of_the_heavy_libraries():
    """With them made impossible to import, as on a login node."""
    heavy = ("torch", "accelerate", "numpy", "rich", "datasets", "deepspeed", "transformers", "psutil")
    code = f"import sys; sys.modules.update(dict.fromkeys({heavy})); from launch.cli import main; sys.exit(main(sys.argv[1:]))"
    finished = Started([sys.executable, "-c", code, "launch", "--dry-run", "--processes", "2"]).wait().check()
    assert "multi_gpu.yaml" in finished.output


# The shipped files ---------------------------------------------------------------------------------------------------------

LAUNCH = ROOT / "launch"


@pytest.mark.parametrize(
    ("command", "names", "folder", "ending"),
    [
        ("recipes", recipe_file.names(), recipe_file.SHIPPED, ".yaml"),
        ("presets", preset.names(), preset.SHIPPED, ".yaml"),
        ("scripts", sorted(path.name for pattern in ("*.sh", "*.pbs") for path in LAUNCH.glob(pattern)), LAUNCH, ""),
    ],
)
def test_each_file_is_listed_and_printed(command: str, names: list[str], folder: Path, ending: str, capsys) -> None:
    assert cli.main([command]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    for name in names:
        assert cli.main([command, name]) == 0
        assert capsys.readouterr().out.replace(f"{folder.as_uri()}/", "") == (folder / f"{name}{ending}").read_text()
    assert cli.main([command, "nothing"]) == 2
    assert f"`samerun {command}` lists all" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_that_of_the_package(word: str, capsys) -> None:
    assert cli.main([word]) == 0
    assert capsys.readouterr().out == f"samerun {version('samerun')}\n"


@pytest.mark.parametrize(("arguments", "words"), [
    ([], ("samerun COMMAND", "resume ")),
    (["launch"], ("samerun launch", "--preset NAME|PATH", "--hang-timeout SECONDS", "passed on to its processes")),
    (["train"], ("samerun train", "--resume [auto|never|PATH]")),
])  # fmt: skip
def test_the_help_of_a_command_fits_the_terminal(arguments, words, capsys, monkeypatch) -> None:
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            cli.main(["help", *arguments])
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
        assert max(map(len, shown.splitlines())) <= min(columns, 96)


def test_recipe_keys_are_those_of_all_tasks_or_of_one(capsys) -> None:
    cli.main(["recipes", "--keys"])
    every = capsys.readouterr().out
    assert every.count("\n  optim.lr=") == 1  # of both tasks, with the same meaning
    assert every.count("\n  data.path=") == 2
    cli.main(["recipes", "lm_tiny", "--keys", "LoRA"])
    some = capsys.readouterr().out
    assert set(re.findall(r"^  (\S+)=", some, re.MULTILINE)) >= {"model.lora_rank", "model.lora_alpha"}
    assert "optim.lr=" not in some
    assert "null: all linear layers" in " ".join(some.split())


@pytest.mark.parametrize(("output", "code", "said"), [
    ("pipe", 141, ""),
    ("/dev/full", 1, "samerun: stdout cannot be written: No space left on device\n"),
])  # fmt: skip
def test_a_stdout_that_cannot_be_written_ends_a_command(output: str, code: int, said: str) -> None:
    done = subprocess.run([*program("launch.cli"), "recipes"], stdout=unwritable(output), stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.decode()) == (code, said)


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    environment = {**clean_environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*program("launch.cli"), "new", "größe"], env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"gr\\xf6\\xdfe: task.py")


def test_a_run_is_stopped_and_resumed_by_its_folder(capsys, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    about = {"recipe": "digits", "preset": "fsdp2", "world_size": 2, "ranks": ["here 0", "here 1"], "mixed_precision": "bf16"}
    run_folder.write_json(run / "run.json", about)
    (run / "recipe.yaml").write_text(recipe_file.to_yaml(recipe_file.load("digits", ["seed=7"]).recipe))
    assert recipe_file.load(str(run / "recipe.yaml")).name == "digits"
    for more, processes in ([], "2"), (["--processes", "4"], "4"):
        assert cli.main(["resume", str(run), *more, "train.epochs=3", "--dry-run"]) == 0
        command = shlex.split(capsys.readouterr().out)
        options = dict(itertools.pairwise(command))
        assert (options["--num_processes"], options["--mixed_precision"], options["--resume"]) == (processes, "bf16", "auto")
        assert (options["--recipe"], options["--run-dir"]) == (str(run / "recipe.yaml"), str(run))
        assert command[-3:] == ["--trackers", "none", "train.epochs=3"]
    run_folder.write_json(run / "run.json", about | {"ranks": ["here 0", "there 0"]})
    assert cli.main(["resume", str(run)]) == 2
    assert "ran on 2 nodes, and this is not within a job: submit it again" in capsys.readouterr().err
    assert cli.main(["stop", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"To continue it: samerun resume {shlex.quote(str(run))}\n")
    assert (run / "STOP").exists()
    run_folder.write_json(run / "outcome.json", {"outcome": "finished"})
    assert cli.main(["stop", str(run)]) == 0
    assert capsys.readouterr().out == f"{run} is not running: it finished\n"


HELPS = """import sys
from launch import cli
for command in cli._COMMANDS:
    try:
        cli.main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
    assert not {"torch", "matplotlib", "transformers"} & sys.modules.keys(), command
"""


def test_a_help_imports_neither_torch_nor_matplotlib() -> None:
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") >= len(cli._COMMANDS)


if __name__ == "__main__":
    print("\n".join(golden_lines()))
