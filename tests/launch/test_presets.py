"""Presets: what is shipped is right by Accelerate's own reading of it, and what cannot be right is refused."""

from __future__ import annotations

import builtins
import re
import sys
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.commands.menu import BulletMenu
from accelerate.utils import FullyShardedDataParallelPlugin, prepare_multi_gpu_env
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_simple_launcher_cmd_env

from app.environment.topology import KEY, Topology
from app.errors import PresetError
from launch import cli, preset, run_module
from launch.node_command import accelerate_argv

FOLDER = Path(preset.__file__).parent.parent / "accelerate_configs"
NAMES = sorted(path.stem for path in FOLDER.rglob("*.yaml"))
SINGLE = ("cpu", "single_gpu")
SEVERAL = [name for name in NAMES if name not in SINGLE]
SHARDED = ("fsdp2", "hsdp", "tensor_parallel", "context_parallel")
STAGES = {"deepspeed_zero1": "1", "deepspeed_zero2": "2", "deepspeed_zero3": "3", "deepspeed_zero3_offload": "3"}


def accelerates_environment(name, topology=None, **options):
    """The options and the environment that `accelerate launch` would give the processes, without starting any."""
    argv = accelerate_argv(topology or Topology(), preset.load(name), ["--recipe", "r", "a=b"], **options)
    args = launch_command_parser().parse_args(argv[argv.index("accelerate.commands.launch") + 1 :])
    args = _validate_launch_command(args)[0]
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        command, environment = prepare_deepspeed_cmd_env(args)
        assert command is None, f"{name} would call the deepspeed program, which logs in to other machines: {command}"
        return args, environment
    if args.multi_gpu or args.use_fsdp:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_preset_is_valid_and_leaves_precision_and_processes_to_the_launch(name):
    settings = preset.load(name).settings
    assert name in {*SINGLE, "multi_gpu", "multi_node", *STAGES, *SHARDED}
    assert settings["mixed_precision"] == "no"
    assert settings.get("num_processes") == (1 if name in SINGLE else None)


@pytest.mark.parametrize("name", SEVERAL)
def test_accelerate_starts_the_processes_of_a_preset_for_several(name):
    topology = Topology(num_nodes=2, processes_per_node=4, node_rank=1, head_address="head", port=4321)
    args, environment = accelerates_environment(name, topology)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert args.rdzv_endpoint == "head:4321"
    assert not args.module
    assert (args.training_script, args.training_script_args) == (run_module.__file__, ["app.train", "--recipe", "r", "a=b"])
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment
    assert "ACCELERATE_GRADIENT_CLIPPING" not in environment
    assert environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == STAGES.get(name)
    assert environment.get("ACCELERATE_USE_FSDP") == ("true" if name in SHARDED else None)
    for kind in ("OPTIMIZER", "PARAM"):
        device = environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_DEVICE", "none")
        assert device == ("cpu" if name.endswith("offload") else "none")
    other = accelerates_environment(name, Topology(processes_per_node=2), mixed_precision="bf16")[1]
    assert other["ACCELERATE_MIXED_PRECISION"] == "bf16"


SECTIONS = {
    "MULTI_GPU": "",
    "DEEPSPEED": "deepspeed_config:\n  zero_stage: 1\n  deepspeed_multinode_launcher: standard\n",
    "FSDP": "fsdp_config:\n  fsdp_version: 2\n",
}


@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("text", ["dynamo_config:\n  backend: inductor\n  mode: default\n", ""])
def test_compiling_is_asked_for_under_every_type(tmp_path, kind, text):
    path = tmp_path / "mine.yaml"
    path.write_text(f"distributed_type: {kind}\nmixed_precision: 'no'\n{SECTIONS[kind]}{text}")
    argv = accelerate_argv(Topology(processes_per_node=2), preset.load(str(path)), [])
    inherited = dict(word.split("=", 1) for word in argv[: argv.index(sys.executable)] if word.startswith("ACCELERATE_DYNAMO"))
    environment = {**inherited, **accelerates_environment(str(path), Topology(processes_per_node=2))[1]}
    assert environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == ("inductor" if text else "no")
    if "mode" in text:
        assert environment["ACCELERATE_DYNAMO_MODE"] == "default"


def test_fsdp2_is_what_accelerate_makes_of_its_preset(monkeypatch):
    for key, value in accelerates_environment("fsdp2")[1].items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.cpu_ram_efficient_loading) == (2, True, False)
    assert plugin.auto_wrap_policy.__name__ == "size_based_auto_wrap_policy"
    assert plugin.min_num_params == 4_000_000


MESHES = {"hsdp": "dp_replicate_size", "tensor_parallel": "tp_size", "context_parallel": "cp_size"}


@pytest.mark.parametrize(("name", "size"), MESHES.items())
def test_presets_with_a_mesh_are_fsdp2_but_for_its_size(name, size):
    plain, other = (yaml.safe_load((FOLDER / f"{preset}.yaml").read_text()) for preset in ("fsdp2", name))
    assert other.pop("parallelism_config") == {f"parallelism_config_{size}": -1}
    assert other == plain


@pytest.mark.parametrize(
    ("name", "size", "given"),
    [("hsdp", "dp_replicate_size", -1), ("tensor_parallel", "tp_size", 2), ("context_parallel", "cp_size", 2)],
)
def test_accelerate_hands_on_the_size_of_a_mesh(name, size, given):
    sizes = {} if given == -1 else {size: given}
    environment = accelerates_environment(name, Topology(processes_per_node=4), sizes=sizes)[1]
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    handed_on = {key: environment[f"PARALLELISM_CONFIG_{key.upper()}"] for key in MESHES.values()}
    assert handed_on == {key: str(given) if key == size else "1" for key in MESHES.values()}


ATTENTION = ("MultiheadAttention", "ShiftedWindowAttention", "ShiftedWindowAttentionV2")


@pytest.mark.parametrize("name", ["vit_h_14", "swin_v2_b"])
def test_fsdp2_does_not_cut_attention_where_it_breaks(name):
    """Attention hands its projections' weights to a function: one sharded on its own is never gathered."""

    def weights(part):
        return sum(parameter.numel() for parameter in part.parameters())

    limit = yaml.safe_load((FOLDER / "fsdp2.yaml").read_text())["fsdp_config"]["fsdp_min_num_params"]
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    attention = [part for part in model.modules() if type(part).__name__ in ATTENTION]
    # Swin V2's small network for relative positions is called as a module, so it may be a unit.
    named = [each for block in attention for each in block.named_modules() if "cpb" not in each[0]]
    projections = [weights(part) for _, part in named if isinstance(part, torch.nn.Linear)]
    assert len(projections) >= 24
    assert max(projections) <= limit
    assert max(map(weights, model.modules())) > limit, "nothing would be a unit"


# Our lists of keys against Accelerate's own ----------------------------------------------------------------------------------


def test_every_key_of_our_lists_is_accelerates():
    """Of those it is said to ignore in a file, which are those whose option has a default, and one that it copies anyway."""
    fields = set(ClusterConfig.__dataclass_fields__) | {"dynamo_backend"}  # which it takes for dynamo_config
    defaults = {action.dest: action.default for action in launch_command_parser()._actions}
    options = defaults.keys() | {"fsdp_ignored_modules"}  # read with getattr
    assert set(preset._KEYS) <= fields
    assert {KEY + name for name in (*preset._SIZES, *preset._WITHOUT_EFFECT)} <= options
    assert set().union(*preset._SECTION_KEYS.values()) <= options
    assert set(preset._REFUSED) <= fields | options
    assert set(preset._REFUSED).isdisjoint(preset._KEYS.union(*preset._SECTION_KEYS.values()))
    ignored = {name for name in ClusterConfig.__dataclass_fields__ if defaults.get(name) is not None}
    reported = {key for key, text in preset._REFUSED.items() if "ignores" in text}
    assert reported == {name for name in ignored if not name.startswith("tpu_")}


# Files as `accelerate config` writes them ---------------------------------------------------------------------------------

GPUS = {"type of machine": "multi-GPU", "How many GPU": "4"}
ZERO = {**GPUS, "use DeepSpeed": "yes"}
# Answers to the questions of `accelerate config`, and problems of the file that it writes.
CONFIGS = {
    "cpu": ({"CPU only": "yes"}, []),
    "zero3": ({**ZERO, "ZeRO optimization": "3"}, []),
    "compiled": ({**GPUS, "torch dynamo": "yes"}, []),
    "two_nodes": (
        {**GPUS, "How many different": "2", "rank of this": "1", "IP address": "10.0.0.1", "What is the port": "29500"},
        ["machine_rank is 1: it belongs to the machine: remove it", "main_process_ip is ", "main_process_port is "],
    ),
    "accumulating": (
        {**ZERO, "gradient accumulation": "4"},
        ["gradient_accumulation_steps is 4: it is derived from the recipe"],
    ),
    "fsdp2": ({**GPUS, "FullyShardedDataParallel": "yes", "version": "2"}, ["fsdp_transformer_layer_cls_to_wrap is empty"]),
}


@pytest.mark.parametrize(("answers", "problems"), CONFIGS.values(), ids=CONFIGS)
def test_a_file_of_accelerate_config_is_used_unless_it_contradicts_the_launch(answers, problems, tmp_path, monkeypatch, capsys):
    left = iter(range(100))  # an answer that it refuses is asked for again

    def answer(question):
        assert next(left, None) is not None, question
        return next((given for words, given in answers.items() if re.search(words, question)), None)

    def choose(menu, default_choice=0):
        given = answer(menu.prompt)
        return default_choice if given is None else [str(choice) for choice in menu.choices].index(given)

    monkeypatch.setattr(BulletMenu, "run", choose)  # it wants a terminal
    monkeypatch.setattr(builtins, "input", lambda question="": answer(question) or "")
    get_cluster_input().to_yaml_file(tmp_path / "mine.yaml")
    capsys.readouterr()
    code = cli.main(["launch", "--dry-run", "--preset", str(tmp_path / "mine.yaml")])
    out, err = capsys.readouterr()
    if problems:
        assert all(problem in line for problem, line in zip(problems, err.splitlines(), strict=True)), err
    else:
        assert code == 0, err
        assert f" --num_processes {answers.get('How many GPU', 1)} " in out


def test_a_deepspeed_file_for_one_node_is_refused_on_two(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n")
    topology = Topology(num_nodes=2, processes_per_node=2, head_address="a", port=29500)
    with pytest.raises(PresetError, match="deepspeed_multinode_launcher is missing, which means pdsh: it must be standard"):
        accelerate_argv(topology, preset.load(str(tmp_path / "zero.yaml")), [])
