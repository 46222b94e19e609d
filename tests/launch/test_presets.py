"""Presets: what is shipped is right by Accelerate's own reading of it, and what cannot be right is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, prepare_multi_gpu_env
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_simple_launcher_cmd_env

from app.environment.topology import Topology
from app.errors import PresetError
from launch import parallelism, preset, run_module
from launch.node_command import accelerate_argv

FOLDER = Path(preset.__file__).parent.parent / "accelerate_configs"
NAMES = sorted(path.stem for path in FOLDER.rglob("*.yaml"))
SINGLE = ("cpu", "single_gpu")
SEVERAL = [name for name in NAMES if name not in SINGLE]
SHARDED = ("fsdp2", "hsdp", "tensor_parallel")
STAGES = {"deepspeed_zero1": "1", "deepspeed_zero2": "2", "deepspeed_zero3": "3", "deepspeed_zero3_offload": "3"}


def accelerates_reading(name, topology=None, **options):
    """What `accelerate launch` makes of our command line: its options after its own checks."""
    argv = accelerate_argv(topology or Topology(), preset.load(name), ["--recipe", "r", "a=b"], **options)
    args = launch_command_parser().parse_args(argv[argv.index("accelerate.commands.launch") + 1 :])
    return _validate_launch_command(args)[0]


def accelerates_environment(name, topology=None, **options):
    """The options and the environment that `accelerate launch` would give the processes, without starting any."""
    args = accelerates_reading(name, topology, **options)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        command, environment = prepare_deepspeed_cmd_env(args)
        assert command is None, f"{name} would call the deepspeed program, which logs in to other machines: {command}"
        return args, environment
    if args.multi_gpu or args.use_fsdp:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


def test_all_presets_are_shipped():
    assert preset.names() == NAMES
    assert set(NAMES) == {*SINGLE, "multi_gpu", "multi_node", *STAGES, *SHARDED}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_preset_is_short_and_knows_nothing_of_machines(name):
    assert preset.load(name).name == name
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    settings = yaml.safe_load("\n".join(lines))
    assert 3 <= len(lines) <= 13
    assert lines[0].startswith("# ")
    assert settings["mixed_precision"] == "no"
    assert settings.get("num_processes") == (1 if name in SINGLE else None)
    machine = ("address", "_ip", "port", "path", "num_machines", "machine_rank", "gpu_ids", "hostfile")
    keys = [*settings, *(key for value in settings.values() if isinstance(value, dict) for key in value)]
    assert [key for key in keys if any(word in key for word in machine) and not key.endswith("_import")] == []


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_starts_the_processes_of_a_preset_for_several(name, processes):
    args, environment = accelerates_environment(name, Topology(processes_per_node=processes))
    assert args.nproc_per_node == str(processes)
    assert not args.module
    assert (args.training_script, args.training_script_args) == (run_module.__file__, ["app.train", "--recipe", "r", "a=b"])
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment
    assert "ACCELERATE_GRADIENT_CLIPPING" not in environment
    assert environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == STAGES.get(name)
    assert environment.get("ACCELERATE_USE_FSDP") == ("true" if name in SHARDED else None)


@pytest.mark.parametrize("name", SEVERAL)
def test_accelerate_joins_two_nodes(name):
    topology = Topology(num_nodes=2, processes_per_node=4, node_rank=1, head_address="head", port=4321)
    args, _ = accelerates_environment(name, topology)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert args.rdzv_endpoint == "head:4321"


@pytest.mark.parametrize("name", SINGLE)
def test_accelerate_starts_one_process_without_a_group(name):
    args, environment = accelerates_environment(name)
    assert (args.multi_gpu, args.use_fsdp, args.use_deepspeed) == (False, False, False)
    assert args.num_processes == 1
    assert environment["ACCELERATE_USE_CPU"] == str(name == "cpu")
    assert "MASTER_PORT" not in environment


@pytest.mark.parametrize("name", SEVERAL)
def test_accelerate_asks_for_the_number_that_a_preset_does_not_hold(name):
    args = launch_command_parser().parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), "script.py"])
    with pytest.raises(ValueError, match="num_processes"):
        _validate_launch_command(args)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_changes_the_precision(name):
    assert accelerates_environment(name, mixed_precision="bf16")[1]["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED", "FSDP"])
@pytest.mark.parametrize(
    "text", ["dynamo_config:\n  {prefix}backend: inductor\n  {prefix}mode: default\n", "dynamo_backend: inductor\n", ""]
)
@pytest.mark.parametrize("prefix", ["dynamo_", ""])
def test_compiling_is_asked_for_under_every_type(tmp_path, kind, text, prefix):
    sections = {
        "DEEPSPEED": "deepspeed_config:\n  zero_stage: 1\n  deepspeed_multinode_launcher: standard\n",
        "FSDP": "fsdp_config:\n  fsdp_version: 2\n",
    }
    path = tmp_path / "mine.yaml"
    path.write_text(f"distributed_type: {kind}\nmixed_precision: 'no'\n{sections.get(kind, '')}{text.format(prefix=prefix)}")
    argv = accelerate_argv(Topology(processes_per_node=2), preset.load(str(path)), [])
    before = dict(word.split("=", 1) for word in argv[: argv.index(sys.executable)] if "=" in word)
    inherited = {name: value for name, value in before.items() if name.startswith("ACCELERATE_DYNAMO")}
    environment = {**inherited, **accelerates_environment(str(path), Topology(processes_per_node=2))[1]}
    assert environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == ("inductor" if text else "no")
    if "mode" in text:
        assert environment["ACCELERATE_DYNAMO_MODE"] == "default"


def test_offload_reaches_deepspeed():
    environment = accelerates_environment("deepspeed_zero3_offload")[1]
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "cpu"
    assert accelerates_environment("deepspeed_zero3")[1]["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"


def test_fsdp2_is_what_accelerate_makes_of_its_preset(monkeypatch):
    for key, value in accelerates_environment("fsdp2")[1].items():
        if key.startswith("FSDP_"):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is False
    assert plugin.auto_wrap_policy.__name__ == "size_based_auto_wrap_policy"
    assert plugin.min_num_params == 4_000_000


MESHES = {"hsdp": "dp_replicate_size", "tensor_parallel": "tp_size"}


@pytest.mark.parametrize(("name", "size"), MESHES.items())
def test_presets_with_a_mesh_are_fsdp2_but_for_its_size(name, size):
    plain, other = (yaml.safe_load((FOLDER / f"{preset}.yaml").read_text()) for preset in ("fsdp2", name))
    assert other.pop("parallelism_config") == {f"parallelism_config_{size}": -1}
    assert other == plain


@pytest.mark.parametrize(("name", "size"), MESHES.items())
@pytest.mark.parametrize("given", [-1, 2])
def test_accelerate_hands_on_the_size_of_a_mesh(name, size, given):
    sizes = {} if given == -1 else {size: given}
    environment = accelerates_environment(name, Topology(processes_per_node=4), sizes=sizes)[1]
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    handed_on = {key: environment[f"PARALLELISM_CONFIG_{key.upper()}"] for key in MESHES.values()}
    assert handed_on == {key: str(given) if key == size else "1" for key in MESHES.values()}


ATTENTION = ("MultiheadAttention", "ShiftedWindowAttention", "ShiftedWindowAttentionV2")


@pytest.mark.parametrize("name", ["vit_h_14", "vit_l_16", "swin_b", "swin_v2_b"])
def test_fsdp2_does_not_cut_attention_where_it_breaks(name):
    """Attention hands its projections' weights to a function: one sharded on its own is never gathered."""
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


def weights(part):
    return sum(parameter.numel() for parameter in part.parameters())


# What is refused -----------------------------------------------------------------------------------------------------------

FSDP2 = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: "
REFUSED = {
    "MULTI_CPU": ("distributed_type: MULTI_CPU", ["one process", "MULTI_GPU", "gloo"]),
    "unquoted NO": ("distributed_type: NO", ["YAML", "'NO'"]),
    "a list as type": ("distributed_type: [FSDP]", ["distributed_type is ['FSDP']"]),
    "unquoted no": ("distributed_type: MULTI_GPU\nmixed_precision: no", ["YAML", "'no'"]),
    "unknown precision": ("distributed_type: MULTI_GPU\nmixed_precision: bf8", ["'bf8'", "bf16"]),
    "settings of 8 bits": ("distributed_type: MULTI_GPU\nfp8_config: {backend: TE}", ["8-bit precision is not supported"]),
    "fp16 on the CPU": ("distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16", ["use_cpu is true: fp16 needs a GPU"]),
    "two of NO": ("distributed_type: 'NO'\nnum_processes: 2", ["num_processes is 2", "MULTI_GPU"]),
    "machines": ("distributed_type: MULTI_GPU\nnum_machines: 0", ["num_machines is 0", "--num_machines"]),
    "ignored": ("distributed_type: MULTI_GPU\nrdzv_backend: c10d", ["rdzv_backend is 'c10d'", "ignores"]),
    "use_cpu": ("distributed_type: MULTI_GPU\nuse_cpu: true", ["use_cpu", "ignores"]),
    "cloud": ("distributed_type: MULTI_GPU\ncompute_environment: AMAZON_SAGEMAKER", ["LOCAL_MACHINE"]),
    "typing error": ("distributed_type: MULTI_GPU\nmixed_precison: bf16", ["did you mean mixed_precision"]),
    "wrong section": ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}", ["fsdp_config", "ignore"]),
    "no section": ("distributed_type: FSDP\nfsdp_config: 2", ["fsdp_config is 2"]),
    "fsdp 1": ("distributed_type: FSDP", ["fsdp_version is 1", "must be 2"]),
    "fsdp 1's key": ("distributed_type: FSDP\nfsdp_config: {version: 2, sharding_strategy: FULL_SHARD}", ["reshard"]),
    "fsdp typing error": ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, min_num_param: 1}", ["fsdp_min_num_params"]),
    "clipping": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_multinode_launcher: standard, gradient_clipping: 1.0}",
        ["gradient_clipping is 1.0", "optim.clip_norm"],
    ),
    "zero_stag": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_multinode_launcher: standard, zero_stag: 3}",
        ["zero_stag", "did you mean zero_stage"],
    ),
    "NVMe": ("distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: nvme}", ["'nvme'", "one of none, cpu"]),
    "megatron": ("distributed_type: MULTI_GPU\nmegatron_lm_config: {megatron_lm_pp_degree: 2}", ["Megatron-LM "
        "is not supported"]),
    "sizes without a prefix": (f"{FSDP2}{{tp_size: 2}}", ["tp_size is 2", "ignores it", "write parallelism_config_tp_size: 2"]),
    "no size": (f"{FSDP2}{{parallelism_config_tp_size: 0}}", ["parallelism_config_tp_size is 0", "-1"]),
    "no such size": (f"{FSDP2}{{parallelism_config_ep_size: 2}}", ["unknown key", "parallelism_config_tp_size"]),
    "contexts": (f"{FSDP2}{{parallelism_config_cp_size: 2}}", ["cp_size is 2", "context parallelism is not supported"]),
    "sequences": (f"{FSDP2}{{sp_size: 2}}", ["sp_size is 2", "sequence parallelism is not supported"]),
    "pipelines": (f"{FSDP2}{{parallelism_config_pp_size: 2}}", ["pp_size is 2", "pipelines are not supported"]),
    "sizes with DDP": (
        "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_tp_size: 2}",
        ["distributed_type is MULTI_GPU", "FSDP"],
    ),
    "sizes with DeepSpeed": (
        "distributed_type: DEEPSPEED\nparallelism_config: {parallelism_config_dp_replicate_size: 2}\n"
        "deepspeed_config: {deepspeed_multinode_launcher: standard}",
        ["distributed_type is DEEPSPEED", "FSDP"],
    ),
    "no compiler": ("distributed_type: MULTI_GPU\ndynamo_config: inductor", ["dynamo_config is 'inductor'", "key: value"]),
    "no sizes": (f"{FSDP2}2", ["parallelism_config is 2", "key: value"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, text, words):
    path = tmp_path / "my preset.yaml"
    path.write_text(text)
    with pytest.raises(PresetError) as caught:
        preset.load(str(path))
    assert [word for word in [*words, str(path)] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value), "one mistake, one sentence"


def test_a_preset_of_the_users_is_found_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    mine = preset.load("mine.yaml")
    assert (mine.name, mine.path, mine.is_single_process) == ("mine", tmp_path / "mine.yaml", False)


# Our lists of keys against Accelerate's own ----------------------------------------------------------------------------------


def test_every_key_we_know_is_accelerates():
    fields = set(ClusterConfig.__dataclass_fields__) | {"dynamo_backend"}  # which it takes for dynamo_config
    options = {action.dest for action in launch_command_parser()._actions} | {"fsdp_ignored_modules"}  # read with getattr
    assert set(preset._KEYS) <= fields
    assert {parallelism.KEY + name for name in (*parallelism._SIZES, *parallelism._OF_UNSUPPORTED)} <= options
    assert set().union(*preset._SECTION_KEYS.values()) <= options
    assert set(preset._REFUSED) <= fields | options
    assert set(preset._REFUSED).isdisjoint(preset._KEYS.union(*preset._SECTION_KEYS.values()))


def test_every_deepspeed_and_fsdp_option_of_accelerate_is_taken_or_refused():
    groups = {group.title: {action.dest for action in group._group_actions} for group in launch_command_parser()._action_groups}
    known = set(preset._REFUSED).union(*preset._SECTION_KEYS.values())
    assert groups["DeepSpeed Arguments"] | groups["FSDP Arguments"] <= known


def test_the_keys_called_ignored_are_those_that_accelerate_ignores():
    """It copies a value from the file only where the option's default is None."""
    defaults = {action.dest: action.default for action in launch_command_parser()._actions}
    ignored = {name for name in ClusterConfig.__dataclass_fields__ if defaults.get(name) is not None}
    said = {key for key, text in preset._REFUSED.items() if "ignores" in text}
    assert said == {name for name in ignored if not name.startswith("tpu_")}


# For real ------------------------------------------------------------------------------------------------------------------

# In one system call, which a pipe does not divide; unbuffered, as launchers start it, print makes one of each word.
SHOW = """import os
words = ("world", *(str(os.environ.get(name)) for name in ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")))
os.write(1, f"{' '.join(words)}\\n".encode())
"""


@pytest.mark.multiproc
def test_plain_accelerate_launch_starts_one_preset_of_each_kind(tmp_path):
    (tmp_path / "show_environment.py").write_text(SHOW)
    two = ["world 0 2 no", "world 1 2 no"]
    expected = {"cpu": ["world None None no"], "multi_gpu": two, "deepspeed_zero3": two, "fsdp2": two}
    started = {}
    for name in expected:
        count = [] if name == "cpu" else ["--num_processes", "2", "--main_process_port", "0"]
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        command += ["--config_file", str(FOLDER / f"{name}.yaml"), *count, "-m", "show_environment"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started[name] = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    outputs = {name: process.communicate(timeout=120)[0] for name, process in started.items()}
    found = {name: sorted(line for line in text.splitlines() if line.startswith("world")) for name, text in outputs.items()}
    assert found == expected
