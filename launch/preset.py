"""Presets: Accelerate's own files that define how processes cooperate, found by name or path, read and checked.

A preset knows nothing of machines: numbers of processes, addresses and ports come from the command line. It shares no key
with a recipe. `accelerate launch` accepts much more and then ignores it, or starts something else; what would go wrong silently
is refused here, before anything is started. Facts: accelerate 1.15, `commands/launch.py` (`_validate_launch_command`) and
`utils/launch.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from app.environment import deepspeed_file
from app.environment.degrees import Degrees
from app.environment.launched import NO_FP16_ON_CPU, PRECISIONS, Sharding, Strategy
from app.environment.topology import Topology
from app.errors import PresetError, did_you_mean
from app.files import yaml_text
from launch import parallelism

SHIPPED = Path(__file__).parent.parent / "accelerate_configs"

# Common names for presets that have another name here.
_OTHER_NAMES = {
    "ddp": "multi_gpu", "distributed": "multi_gpu", "gpu": "single_gpu", "cuda": "single_gpu", "ddp_multi_node": "multi_node",
    "zero1": "deepspeed_zero1", "zero2": "deepspeed_zero2", "zero3": "deepspeed_zero3", "zero": "deepspeed_zero2",
    "hybrid": "hsdp", "hybrid_shard": "hsdp", "tp": "tensor_parallel",
    "deepspeed": "deepspeed_zero2", "fsdp": "fsdp2", "offload": "deepspeed_zero3_offload",
}  # fmt: skip
_TYPES = ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP")
_SECTION_OF = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}

# Keys that a preset may hold. A key of a section that Accelerate does not know is ignored by it without a word.
_KEYS = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "num_machines",
    "main_training_function", "dynamo_backend", "dynamo_config", "deepspeed_config", "fsdp_config", parallelism.SECTION,
}  # fmt: skip
_SECTION_KEYS = {
    "deepspeed_config": {
        "zero_stage", "zero3_init_flag", "zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device",
        "offload_optimizer_nvme_path", "offload_param_nvme_path", deepspeed_file.KEY, "deepspeed_multinode_launcher",
        "deepspeed_moe_layer_cls_names",
    },
    "fsdp_config": {
        "fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_min_num_params", "fsdp_offload_params",
        "fsdp_transformer_layer_cls_to_wrap", "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type", "fsdp_ignored_modules",
    },
}  # fmt: skip

# Keys that Accelerate knows and a preset must not hold, with what to do instead.
_MACHINE = "it belongs to the machine: remove it, and use {}"
_IGNORED = "accelerate launch ignores it in a file: remove it, and give --{} on the command line if you need it"
_REFUSED = {
    "machine_rank": _MACHINE.format("--machine_rank"),
    "main_process_ip": _MACHINE.format("--main_process_ip"),
    "main_process_port": _MACHINE.format("--main_process_port"),
    "gpu_ids": _MACHINE.format("CUDA_VISIBLE_DEVICES"),
    **{key: _IGNORED.format(key) for key in ("rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16")},
    "megatron_lm_config": "Megatron-LM is not supported: remove it",
    "fp8_config": "8-bit precision is not supported: remove it, and set mixed_precision to bf16",
    "gradient_accumulation_steps": "it is derived from the recipe: remove it; to limit memory, set train.max_micro_batch",
    "gradient_clipping": "clipping belongs to the recipe: remove it, and set optim.clip_norm in the recipe",
    "deepspeed_hostfile": _MACHINE.format("--num_machines"),
    "deepspeed_inclusion_filter": _MACHINE.format("CUDA_VISIBLE_DEVICES"),
    "deepspeed_exclusion_filter": _MACHINE.format("CUDA_VISIBLE_DEVICES"),
    "fsdp_sharding_strategy": "it is for FSDP 1: remove it, and set fsdp_reshard_after_forward",
    **dict.fromkeys(
        ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states"),
        "FSDP2 has no such setting: remove it",
    ),
    "fsdp_activation_checkpointing": (
        "with dropout its gradients are wrong, because Accelerate recomputes layers with other random "
        "numbers: remove it, and set train.checkpoint_activations=blocks in the recipe"
    ),
    "fsdp_activation_checkpointing_offload": (
        "it belongs to fsdp_activation_checkpointing: remove it, and set train.checkpoint_activations=blocks in the recipe"
    ),
    **dict.fromkeys(
        ("tpu_env", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo"), "TPUs are not supported: remove it"
    ),
}

# Values of these keys that change nothing, as `accelerate config` writes them into every file.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "machine_rank": (0,), "gpu_ids": ("all",), "rdzv_backend": ("static",), "same_network": (True, False),
    "enable_cpu_affinity": (False,), "downcast_bf16": (False, "no"), "gradient_accumulation_steps": (1, "auto"),
    "tpu_env": ([],), "tpu_use_cluster": (False,), "tpu_use_sudo": (False,),
    "fsdp_activation_checkpointing": (False,), "fsdp_activation_checkpointing_offload": (False,),
}  # fmt: skip
# Accelerate refuses these, in a traceback, in a preset with a config file of DeepSpeed's.
_OF_THE_FILE = ("zero_stage", "zero3_save_16bit_model", *(f"offload_{what}" for what in
                ("optimizer_device", "param_device", "optimizer_nvme_path", "param_nvme_path")))  # fmt: skip
_OFFLOAD = ("none", "cpu")
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3), "offload_optimizer_device": _OFFLOAD, "offload_param_device": _OFFLOAD
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A checked preset."""

    name: str
    """Name of the shipped preset, or of the file without its ending."""
    path: Path
    """Absolute path for `accelerate launch --config_file`."""
    distributed_type: str
    """NO, MULTI_GPU, DEEPSPEED or FSDP."""
    mixed_precision: str = "no"
    """Precision of the forward and backward pass, unless the command line gives another."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for settings of the file that `accelerate launch` drops."""
    use_cpu: bool = False
    """Whether it asks for the CPU, also where there is a GPU."""
    num_processes: int | None = None
    """Processes of all nodes, if the file has a number: a launch of another number is refused."""
    num_machines: int | None = None
    """Nodes, likewise."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of its `parallelism_config`, by the names without their prefix; -1 is derived from the topology."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole file."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's own config file, if the preset names one."""

    @property
    def strategy(self) -> Strategy:
        """How the processes cooperate: `Launched.strategy`."""
        return "deepspeed" if self.distributed_type == "DEEPSPEED" else "fsdp2" if self.distributed_type == "FSDP" else "ddp"

    def sharding(self, degrees: Degrees) -> Sharding:
        """Return how the processes shard a model, in a launch with these degrees."""
        section, zero = _section(self.settings, "deepspeed_config"), (self.deepspeed or {}).get("zero_optimization", {})
        kinds = ("offload_param", "offload_optimizer")
        places = [(zero.get(kind) or {}).get("device") if self.deepspeed else section.get(f"{kind}_device") for kind in kinds]
        is_offloaded = any(place not in (None, "none") for place in places)
        is_offloaded |= _section(self.settings, "fsdp_config").get("fsdp_offload_params") is True
        stage = zero["stage"] if self.deepspeed else section.get("zero_stage", 2) if self.strategy == "deepspeed" else 0
        return Sharding(self.strategy, stage, is_offloaded, degrees.replicas, degrees.tensor_parallel)

    @property
    def is_single_process(self) -> bool:
        """Whether it starts one process even if more are requested."""
        return self.distributed_type == "NO"


def names() -> list[str]:
    """Return the names of the presets that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load(name_or_path: str) -> Preset:
    """Find, read and check a preset. Raises PresetError with everything that is wrong with it, one problem a line."""
    path = _find(name_or_path)
    settings, problems = _read(path)
    problems += [f"preset {path}: {problem}" for problem in _problems(settings)]
    if problems:
        raise PresetError("\n".join(problems))
    compiling = compiler(settings) if settings["distributed_type"] == "DEEPSPEED" else {}
    file = _section(settings, "deepspeed_config").get(deepspeed_file.KEY)
    return Preset(
        name=path.stem,
        path=path.absolute(),
        distributed_type=settings["distributed_type"],
        mixed_precision=settings.get("mixed_precision") or "no",
        # Accelerate (1.15, `prepare_deepspeed_cmd_env`) hands on how to compile under every type but this.
        variables={
            f"ACCELERATE_DYNAMO_{key.upper()}": str(value) for key, value in compiling.items() if compiling.get("backend")
        },
        use_cpu=settings.get("use_cpu") is True,
        num_processes=settings.get("num_processes"),
        num_machines=settings.get("num_machines"),
        sizes=parallelism.sizes_of(settings.get(parallelism.SECTION)),
        settings=settings,
        deepspeed=None if file is None else deepspeed_file.read(file),
    )


def contradiction(preset: Preset, topology: Topology, precision: str) -> str | None:
    """Return what in the file contradicts the launch, or None."""
    section = _section(preset.settings, "deepspeed_config")
    if preset.deepspeed and (problem := deepspeed_file.precision_problem(preset.deepspeed, precision)):
        return f"{section[deepspeed_file.KEY]}: {problem}"
    if preset.num_machines not in (None, topology.num_nodes):
        return f"num_machines is {preset.num_machines}, and this launch has {topology.num_nodes} nodes: remove it from the file"
    if preset.num_processes not in (None, topology.world_size):
        return (
            f"num_processes is {preset.num_processes}, and this launch has {topology.world_size} processes: "
            "remove it from the file"
        )
    launcher = section.get("deepspeed_multinode_launcher", "missing, which means pdsh")
    if preset.strategy == "deepspeed" and topology.num_nodes > 1 and launcher != "standard":
        return (
            f"deepspeed_multinode_launcher is {launcher}: it must be standard, because the command runs on every "
            "machine; the others log in from one machine to the rest"
        )
    return None


def compiler(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a preset compiles, by the names without their prefix. With `dynamo_backend` Accelerate reads nothing else."""
    if "dynamo_backend" in settings:
        return {"backend": settings["dynamo_backend"]}
    return {key.removeprefix("dynamo_"): value for key, value in _section(settings, "dynamo_config").items()}


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return settings.get(name) or {}


def _find(name_or_path: str) -> Path:
    """Return the file of a shipped name or of a path; a shipped name goes before a file of that name."""
    path = Path(name_or_path)
    if name_or_path in names():
        return SHIPPED / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    what = "there is no such file" if path.suffix or len(path.parts) > 1 else "there is no preset and no file of that name"
    if path.exists():
        raise PresetError(f"preset {name_or_path}: it is not a text file; give an Accelerate config file, or a name")
    other = _OTHER_NAMES.get(path.stem.lower())
    near = f"did you mean {other}? There is {', '.join(names())}" if other else _suggest(path.stem, names())
    raise PresetError(f"preset {name_or_path}: {what}; {near}")


def _read(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return the settings of a file, and which keys are repeated."""
    text, root = yaml_text.compose(path, name=f"preset {path}", error=PresetError)
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:  # values that no plain type has
        raise PresetError(f"preset {path}: it is not YAML of plain values: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise PresetError(f"preset {path}: it must hold `key: value` lines, such as `distributed_type: MULTI_GPU`")
    twice = [
        f"preset {path}:{line}: {key} is given twice, in line {first} as well: keep one of them"
        for key, first, line in yaml_text.repeated(root)
    ]
    return settings, twice


def _problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield everything that is wrong, in the order of the file but for the types that decide the rest."""
    kind = settings.get("distributed_type")
    yield from _type_problems(kind)
    yield from _precision_problems(settings.get("mixed_precision"), on_cpu=settings.get("use_cpu") is True)
    for key, value in settings.items():
        yield from _key_problems(key, value, _KEYS)
        if key in _SECTION_KEYS and kind in _TYPES and key != _SECTION_OF.get(kind):
            yield f"{key}: distributed_type is {kind}, so Accelerate would ignore it; remove it, or change distributed_type"
        elif not isinstance(value, dict) and (key in _SECTION_KEYS or (key == "dynamo_config" and value)):
            yield f"{key} is {value!r}: it must hold `key: value` lines"
    yield from parallelism.problems(settings.get(parallelism.SECTION), kind)
    if kind == "NO" and settings.get("num_processes", 1) != 1:
        yield f"num_processes is {settings['num_processes']}: distributed_type NO starts 1 process; use MULTI_GPU for more"
    for key in ("num_processes", "num_machines"):
        if key in settings and (type(settings[key]) is not int or settings[key] < 1):
            yield f"{key} is {settings[key]!r}: it must be a whole number, at least 1; {_MACHINE.format(f'--{key}')}"
    if kind != "NO" and settings.get("use_cpu"):
        yield f"use_cpu is true: accelerate launch ignores it with distributed_type {kind}; remove it"
    if settings.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield f"compute_environment is {settings['compute_environment']!r}: it must be LOCAL_MACHINE, also on a cluster"
    name = _SECTION_OF.get(str(kind), "")
    section = settings.get(name, {})
    if name and isinstance(section, dict):
        yield from _section_problems(name, section)
        yield from _file_problems(settings, section)


def _type_problems(kind: Any) -> Iterator[str]:
    if kind == "MULTI_CPU":
        yield (
            "distributed_type is MULTI_CPU: on one machine Accelerate starts only one process for it, "
            "whatever --num_processes says; use MULTI_GPU, which runs on CPUs through gloo if there is no GPU"
        )
    elif kind is False:
        yield "distributed_type is NO without quotes, which YAML reads as false: write 'NO'"
    elif kind not in _TYPES:
        yield f"distributed_type is {kind!r}: {_suggest(str(kind), _TYPES)}"


def _precision_problems(precision: Any, *, on_cpu: bool) -> Iterator[str]:
    if precision is False:
        yield "mixed_precision is no without quotes, which YAML reads as false: write 'no'"
    elif precision is not None and precision not in PRECISIONS:
        eight = "; 8-bit precision is not supported" if precision == "fp8" else ""
        yield f"mixed_precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}{eight}"
    elif precision == "fp16" and on_cpu:
        yield f"mixed_precision is fp16, and use_cpu is true: {NO_FP16_ON_CPU}"


def _key_problems(key: str, value: Any, known: Collection[str]) -> Iterator[str]:
    if key in _REFUSED:
        has_no_effect = any(value == known and type(value) is type(known) for known in (None, *_NOTHING.get(key, ())))
        if not has_no_effect:
            yield f"{key} is {value!r}: {_REFUSED[key]}"
    elif key not in known:
        yield f"{key}: unknown key of a preset; {_suggest(key, sorted(known))}"


def _section_problems(name: str, section: Mapping[str, Any]) -> Iterator[str]:
    for key, values in _VALUES.items():
        if section.get(key) not in (None, *values):
            yield f"{key} is {section[key]!r}: it must be one of {', '.join(map(str, values))}"
    version = section.get("fsdp_version", section.get("version", 1))
    if name == "fsdp_config" and str(version) != "2":
        yield f"fsdp_version is {version}: it must be 2; version 1 is not supported"
        return  # most of its keys belong to that version
    wrap, layer = (
        section.get(f"fsdp_{key}", section.get(key)) for key in ("auto_wrap_policy", "transformer_layer_cls_to_wrap")
    )
    if wrap == "TRANSFORMER_BASED_WRAP" and not layer:
        yield (
            "fsdp_auto_wrap_policy is TRANSFORMER_BASED_WRAP, and fsdp_transformer_layer_cls_to_wrap is "
            "empty: Accelerate would find no layer to shard; set it, or use SIZE_BASED_WRAP with "
            "fsdp_min_num_params, as fsdp2.yaml does"
        )
    for key, value in section.items():
        # Accelerate takes fsdp's keys with their prefix and without.
        full = f"fsdp_{key}" if name == "fsdp_config" and not key.startswith("fsdp_") else key
        yield from _key_problems(full, value, _SECTION_KEYS[name])


def _file_problems(settings: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what cannot be combined with a config file of DeepSpeed's own."""
    file = section.get(deepspeed_file.KEY)
    if file is None:
        return
    if not isinstance(file, str):
        yield f"{deepspeed_file.KEY} is {file!r}: it must be the path of a file"
    for key in _OF_THE_FILE:
        if key in section:
            yield f"{key} is {section[key]!r}: it belongs in {file}, under zero_optimization: remove it here"
    if "mixed_precision" in settings:
        value = settings["mixed_precision"]
        yield f"mixed_precision is {value!r}: remove it beside {deepspeed_file.KEY}, and give --mixed-precision"


def _suggest(word: str, known: Collection[str]) -> str:
    return did_you_mean(word, known, then=f"There is {', '.join(known)}", cutoff=0.5)
