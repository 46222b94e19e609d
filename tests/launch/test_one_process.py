"""The one process of a run, without a launcher before it: its environment is what Accelerate's own launcher gives."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from processes import SCRIPTS, Started, accelerate, clean_environment

from app.environment.topology import Topology
from launch import node_command, preset
from launch.node_command import accelerate_argv, one_process_argv, one_process_variables

MULTI = {"distributed_type": "MULTI_GPU"}
ONE = {"distributed_type": "NO"}
CPU = {**ONE, "use_cpu": True}
NOT_COMPILED = {"dynamo_config": {"dynamo_backend": "NO"}}
PRESETS = [
    "cpu", "single_gpu", "multi_node", {**CPU, "mixed_precision": "bf16"}, {**ONE, **NOT_COMPILED},
    {**MULTI, **NOT_COMPILED, "dynamo_backend": "NO"},
]  # fmt: skip
INHERITED = [
    {}, {"OMP_NUM_THREADS": "3", "KMP_BLOCKTIME": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
    {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_USE_CPU": "true"},
]  # fmt: skip
# Of torchrun: where the process finds the others, of whom there are none, and where it leaves an error; and
# what torchrun keeps there for itself.
OF_THE_MEETING = {"MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "PET_SIGNALS_TO_HANDLE",
                  "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # fmt: skip


def loaded(named: str | dict[str, object], folder: Path) -> preset.Preset:
    if isinstance(named, str):
        return preset.load(named)
    (folder / "mine.yaml").write_text(yaml.safe_dump(named))
    return preset.load(str(folder / "mine.yaml"))


def accelerates(used: preset.Preset, topology: Topology, precision: str | None) -> dict[str, str]:
    """What `accelerate launch` sets in this process's environment, by its own code."""
    command = accelerate_argv(topology, used, [], mixed_precision=precision)
    told = dict(word.split("=") for word in command[1 : command.index(sys.executable)])
    os.environ.update(told)
    args = _validate_launch_command(
        launch_command_parser().parse_args(command[command.index("accelerate.commands.launch") + 1 :])
    )[0]
    return prepare_multi_gpu_env(args) if args.multi_gpu else prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("inherited", INHERITED, ids=str)
@pytest.mark.parametrize("named", PRESETS, ids=str)
def test_its_environment_is_what_accelerate_gives(
    named: str | dict[str, object], inherited: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    used, before = loaded(named, tmp_path), dict(os.environ)
    for topology in (Topology(), Topology(threads_per_process=5)):
        for precision in (None, "no", "bf16"):
            with monkeypatch.context():
                ours = one_process_variables(topology, used, before, mixed_precision=precision)
                theirs = accelerates(used, topology, precision)
                os.environ.clear()
                os.environ.update(before)
            assert ours is not None
            of_torchrun = node_command._GROUP_OF_ONE.keys() | {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
            both = [{name: value for name, value in each.items() if name not in of_torchrun | OF_THE_MEETING}
                    for each in ({**before, **ours}, theirs)]  # fmt: skip
            assert both[0] == both[1]


@pytest.mark.multiproc
@pytest.mark.parametrize("name", ["multi_gpu", pytest.param("cpu", marks=pytest.mark.long)])
def test_a_process_finds_what_it_would_under_a_real_launcher(name: str, tmp_path: Path) -> None:
    script = (str(SCRIPTS / "environment.py"), str(tmp_path))
    found = []
    used = preset.load(name)
    told = one_process_variables(Topology(), used, clean_environment())
    assert told is not None
    one_alone = ["env", *(f"{key}={value}" for key, value in told.items()), sys.executable, *script]
    for command in (accelerate(name, target=script, processes=1), one_alone):
        Started(command).wait().check()
        found.append(json.loads((tmp_path / "0.json").read_text()))
    both = [{key: value for key, value in each.items() if key not in OF_THE_MEETING} for each in found]
    assert both[0] == both[1]
    started = one_process_argv(Topology(), used, [], clean_environment())
    assert started is not None
    assert f"SAMERUN_PRESET_FILE={used.path}" in started, "no command line above it names the preset"


@pytest.mark.parametrize(
    "named",
    ["deepspeed_zero2", "fsdp2", {**ONE, "debug": True}, {**ONE, "dynamo_backend": "INDUCTOR"},
     {**ONE, "dynamo_config": {"dynamo_debug": True}}],
    ids=str,
)  # fmt: skip
def test_what_is_not_known_is_left_to_accelerate(named: str | dict[str, object], tmp_path: Path) -> None:
    assert one_process_argv(Topology(), loaded(named, tmp_path), [], {}) is None


@pytest.mark.parametrize("topology", [Topology(processes_per_node=2), Topology(hosts=("node1",))])
def test_more_than_one_process_are_left_to_accelerate(topology: Topology) -> None:
    assert one_process_argv(topology, preset.load("multi_gpu"), [], {}) is None
