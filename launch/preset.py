"""Presets: Accelerate's own files that define how processes cooperate, found by name or path, read and checked.

A preset knows nothing of machines: numbers of processes, addresses and ports come from the command line. It shares no key
with a recipe. `accelerate launch` accepts much more and then ignores it, or starts something else; what would go wrong silently
is refused here, before anything is started. Facts: accelerate 1.15, `commands/launch.py` (`_validate_launch_command`) and
`utils/launch.py`.

Of `parallelism_config`, Accelerate hands on the keys that have their whole prefix and drops others without a word; on its
command line they count only where the file has the section.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from app.environment import deepspeed_file
from app.environment.deepspeed_file import section_of
from app.environment.launched import NO_FP16_ON_CPU, PRECISIONS, Sharding, Strategy
from app.environment.topology import DERIVED, KEY, UNSUPPORTED, Degrees, Topology, derived
from app.errors import PresetError, did_you_mean
from app.files import text_files

SHIPPED = Path(__file__).parent.parent / "accelerate_configs"

_SECTION_OF = {"NO": "", "MULTI_GPU": "", "DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}
"""Section of each supported distributed_type."""
PARALLELISM = "parallelism_config"
OPTIONS = {"dp_replicate_size": "--replicas", "tp_size": "--tensor-parallel", "cp_size": "--context-parallel"}
"""Our option for each size of `parallelism_config`."""
_PRESETS = {"dp_replicate_size": "hsdp", "tp_size": "tensor_parallel", "cp_size": "context_parallel"}
_SIZES = (*OPTIONS, "dp_shard_size")
# Settings of what is not supported. `accelerate config` writes them anyway.
_WITHOUT_EFFECT = ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
                   "sp_attn_implementation")  # fmt: skip

# Keys that a preset may hold. A key of a section that Accelerate does not know is ignored by it without a word.
_KEYS = {
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "num_machines",
    "main_training_function", "dynamo_backend", "dynamo_config", "deepspeed_config", "fsdp_config", PARALLELISM,
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

# Keys that Accelerate knows and a preset must not hold, by the reason and remedy. Others are unknown or unsupported.
_MACHINE = "it belongs to the machine: remove it; samerun launch finds or takes it"
_RANDOM = (
    "with dropout its gradients are wrong, because Accelerate recomputes layers with other random numbers: remove it, and "
)
_REFUSED = {
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "gpu_ids"), _MACHINE),
    **dict.fromkeys(
        ("rdzv_backend", "same_network", "enable_cpu_affinity", "downcast_bf16"),
        "accelerate launch ignores it in a file: remove it",
    ),
    "gradient_accumulation_steps": "it is derived from the recipe: remove it; to limit memory, set train.max_micro_batch",
    "gradient_clipping": "clipping belongs to the recipe: remove it, and set optim.clip_norm in the recipe",
    **dict.fromkeys(
        ("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"),
        f"{_RANDOM}set train.checkpoint_activations=blocks in the recipe",
    ),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo"), "TPUs are not supported: remove it"),
}
# Values that change nothing, besides empty ones, as `accelerate config` writes them into every file.
_NOTHING = {"gpu_ids": ("all",), "rdzv_backend": ("static",), "same_network": (True,), "downcast_bf16": ("no",),
            "gradient_accumulation_steps": (1, "auto")}  # fmt: skip
_OFFLOAD = ("none", "cpu")
_BACKENDS = ("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "CUDAGRAPHS", "ONNXRT", "TENSORRT", "TVM", "HPU_BACKEND")
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3), "offload_optimizer_device": _OFFLOAD, "offload_param_device": _OFFLOAD,
    "compute_environment": ("LOCAL_MACHINE",), "mixed_precision": PRECISIONS,
}  # fmt: skip

_OTHER_FILES = {
    ("train", "optim"): "a recipe: give --recipe",
    ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"): "a config file of DeepSpeed: write a preset "
    f"with distributed_type: DEEPSPEED that names it as {deepspeed_file.KEY} in its section deepspeed_config",
}
"""Files that are no preset, by keys that only they have."""
_PRECISIONS = {"no": ("fp32", "float32"), "bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16")}


@dataclass(frozen=True)
class Preset:
    """A checked preset."""

    path: Path
    """Absolute path for `accelerate launch --config_file`."""
    settings: Mapping[str, Any] = field(repr=False)
    """The whole file."""
    strategy: Strategy
    """The strategy: `Launched.strategy`."""
    mixed_precision: str
    """Precision of the forward and backward pass, unless the command line gives another."""
    use_cpu: bool
    """True if it requests the CPU, also where there is a GPU."""
    sizes: Mapping[str, int]
    """Sizes of its `parallelism_config`, by the names without their prefix; -1 is derived from the topology."""
    deepspeed: Mapping[str, Any] | None
    """DeepSpeed's own config file, if the preset names one."""

    @property
    def name(self) -> str:
        """Name of the shipped preset, or of the file without its ending."""
        return self.path.stem

    @property
    def is_single_process(self) -> bool:
        """True if it starts one process even if more are requested."""
        return bool(self.settings["distributed_type"] == "NO")

    @property
    def num_processes(self) -> int | None:
        """Processes of all nodes, if the file has a number: a launch of another number is refused."""
        return self.settings.get("num_processes")

    def degrees(self, topology: Topology, requested: Mapping[str, int] = MappingProxyType({})) -> Degrees:
        """Return the degrees of a launch, in which the sizes of the command line, `requested`, replace the file's.

        Raises PresetError for a size that the preset does not have, and TopologyError for one that does not divide the
        processes.
        """
        for name, size in requested.items():
            if name not in self.sizes:
                raise PresetError(
                    f"{OPTIONS[name]} is {size}, but preset {self.name} has no {KEY}{name}, so Accelerate would "
                    f"ignore it: use preset {_PRESETS[name]}"
                )
        sizes = {**self.sizes, **requested}
        origins = {name: OPTIONS[name] if name in requested else f"preset {self.name}" for name in sizes}
        return derived(sizes, origins, world_size=topology.world_size, per_node=topology.processes_per_node)

    def sharding(self, degrees: Degrees) -> Sharding:
        """Return how the processes shard a model, in a launch with these degrees."""
        section, zero = section_of(self.settings, "deepspeed_config"), (self.deepspeed or {}).get("zero_optimization", {})
        kinds = ("offload_param", "offload_optimizer")
        places = [(zero.get(kind) or {}).get("device") if self.deepspeed else section.get(f"{kind}_device") for kind in kinds]
        is_offloaded = any(place not in (None, "none") for place in places)
        is_offloaded |= section_of(self.settings, "fsdp_config").get("fsdp_offload_params") is True
        stage = zero["stage"] if self.deepspeed else section.get("zero_stage", 2) if self.strategy == "deepspeed" else 0
        return Sharding(self.strategy, stage, is_offloaded, *degrees)

    def compiler(self) -> dict[str, Any]:
        """Return how it compiles, by the names without their prefix. With `dynamo_backend` Accelerate reads nothing else."""
        if "dynamo_backend" in self.settings:
            return {"backend": self.settings["dynamo_backend"]}
        return {key.removeprefix("dynamo_"): value for key, value in section_of(self.settings, "dynamo_config").items()}

    def contradiction(self, topology: Topology, precision: str) -> str | None:
        """Return what in the file contradicts a launch with this precision, or None."""
        section = section_of(self.settings, "deepspeed_config")
        if self.deepspeed and (problem := deepspeed_file.precision_problem(self.deepspeed, precision)):
            return f"{section[deepspeed_file.KEY]}: {problem}"
        for key, actual in {"num_machines": topology.num_nodes, "num_processes": topology.world_size}.items():
            if self.settings.get(key) not in (None, actual):
                return f"{key} is {self.settings[key]}, and this launch has {actual}: remove it from the file"
        launcher = section.get("deepspeed_multinode_launcher", "missing, which means pdsh")
        if self.strategy == "deepspeed" and topology.num_nodes > 1 and launcher != "standard":
            return (
                f"deepspeed_multinode_launcher is {launcher}: it must be standard, because the command runs on every "
                "machine; the others log in from one machine to the rest"
            )
        return None


def names() -> list[str]:
    """Return the names of the presets that come with the package, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def requested_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes that the options of a launch set."""
    values = {name: getattr(options, option[2:].replace("-", "_")) for name, option in OPTIONS.items()}
    return {name: size for name, size in values.items() if size is not None}


def from_options(options: argparse.Namespace) -> Preset | None:
    """Load the preset that the options name, or the shipped one that has the sizes they set; None: neither."""
    name = options.preset or next((_PRESETS[size] for size in requested_sizes(options)), None)
    return load(name) if name else None


def load(name_or_path: str) -> Preset:
    """Find, read and check a preset. Raises PresetError with everything that is wrong with it, one problem a line."""
    if precision := next((to for to, names in _PRECISIONS.items() if name_or_path.lower() in names), None):
        hint = f"give --mixed-precision {precision}, with a preset or without; `samerun presets` lists them"
        raise PresetError(f"preset {name_or_path}: this is a precision, not a preset: {hint}")
    path = text_files.find_yaml("preset", name_or_path, SHIPPED, error=PresetError)
    settings, lines, problems = _read(path)
    problems += [f"preset {path}{lines.get(key, '')}: {key}{problem}" for key, problem in _problems(settings)]
    if problems:
        raise PresetError("\n".join(problems))
    strategies: dict[str, Strategy] = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}
    file = section_of(settings, "deepspeed_config").get(deepspeed_file.KEY)
    return Preset(
        path=path.absolute(),
        settings=settings,
        strategy=strategies.get(settings["distributed_type"], "ddp"),
        mixed_precision=settings.get("mixed_precision") or "no",
        use_cpu=settings.get("use_cpu") is True,
        sizes=_sizes(settings),
        deepspeed=None if file is None else deepspeed_file.read(str(file)),
    )


def _sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    section = section_of(settings, PARALLELISM)
    return {name: section[KEY + name] for name in _SIZES if KEY + name in section}


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, str], list[str]]:
    """Return the settings of a file, the line of each key as `:3`, and which keys are repeated."""
    text, root = text_files.compose_yaml(path, name=f"preset {path}", error=PresetError)
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:  # values that no plain type has
        raise PresetError(f"preset {path}: it is not YAML of plain values: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise PresetError(f"preset {path}: it must hold `key: value` lines, such as `distributed_type: MULTI_GPU`")
    for names, hint in _OTHER_FILES.items():
        if "distributed_type" not in settings and not settings.keys().isdisjoint(names):
            raise PresetError(f"preset {path}: it is {hint}")
    keys, twice = [*text_files.keys_with_lines(root)], "is given twice, in line"
    repeated = [f"preset {path}:{line}: {key} {twice} {first} as well: keep one" for key, first, line in keys if first]
    return settings, {key: f":{line}" for key, _, line in reversed(keys)}, repeated


def _problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield everything that is wrong, a key and what follows it in the sentence.

    In the order of the file but for the types that decide the rest.
    """
    kind = settings.get("distributed_type")
    kind = "NO" if kind is False else kind
    name = _SECTION_OF.get(kind, "") if isinstance(kind, str) else ""
    yield from _basic_problems(settings)
    if settings.get("mixed_precision") == "fp16" and settings.get("use_cpu") is True:
        yield "mixed_precision", f" is fp16, and use_cpu is true: {NO_FP16_ON_CPU}"
    for key, value in settings.items():
        yield from _key_problems(key, value, _KEYS)
        is_section = key in _SECTION_KEYS
        if is_section and kind in list(_SECTION_OF) and key != name:
            yield key, f": distributed_type is {kind}, so Accelerate would ignore it; remove it, or change distributed_type"
        elif not isinstance(value, dict) and (is_section or (key in ("dynamo_config", PARALLELISM) and value is not None)):
            yield key, f" is {value!r}: it must hold `key: value` lines"
    yield from _size_problems(section_of(settings, PARALLELISM))
    if kind != "FSDP" and any(size != 1 for size in _sizes(settings).values()):
        yield PARALLELISM, f": distributed_type is {kind}, and these sizes need FSDP; remove them, or change distributed_type"
    if name and (name not in settings or isinstance(settings[name], dict)):
        yield from _section_problems(name, section_of(settings, name))


def _basic_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind, precision = settings.get("distributed_type"), settings.get("mixed_precision")
    if kind is False or precision is False:
        yield "distributed_type or mixed_precision", " is false in YAML: write 'NO' or 'no', with quotes"
    elif kind not in list(_SECTION_OF):
        yield "distributed_type", f" is {'missing' if kind is None else repr(kind)}: {_suggest(str(kind), _SECTION_OF)}"
    for key, values in _VALUES.items():
        value = settings.get(key, section_of(settings, "deepspeed_config").get(key))
        if value not in (None, False, *values):
            yield key, f" is {value!r}: it must be one of {', '.join(map(str, values))}"
    compiler = {"dynamo_backend": None, **section_of(settings, "dynamo_config"), **settings}
    backend = compiler["dynamo_backend"] or compiler.get("backend", "NO")
    if str(backend).upper() not in _BACKENDS:
        yield "dynamo_backend", f" is {backend!r}: {_suggest(str(backend).upper(), _BACKENDS)}"
    for key in ("num_processes", "num_machines"):
        if key in settings and (type(settings[key]) is not int or settings[key] < 1):
            yield key, f" is {settings[key]!r}: it must be a whole number, at least 1; {_MACHINE}"
    if kind != "NO" and settings.get("use_cpu"):
        yield "use_cpu", f" is true: accelerate launch ignores it with distributed_type {kind}; remove it"


def _key_problems(key: str, value: Any, known: Collection[str]) -> Iterator[tuple[str, str]]:
    if key in _REFUSED and value and value not in _NOTHING.get(key, ()):
        yield key, f" is {value!r}: {_REFUSED[key]}"
    elif key not in _REFUSED and key not in known:
        yield key, f": unknown or unsupported in a preset; {_suggest(key, sorted(known))}"


def _size_problems(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        name = key.removeprefix(KEY)
        if name in _WITHOUT_EFFECT and name != key:
            continue
        if name in UNSUPPORTED:
            if value != 1:
                yield key, f" is {value!r}: {UNSUPPORTED[name]}; remove it"
        elif name not in _SIZES or name == key:
            known = ", ".join(KEY + size for size in _SIZES)
            yield key, f" is {value!r}: unknown key of a preset, which Accelerate ignores; known are {known}"
        elif type(value) is not int or (value < 1 and value != DERIVED):
            yield key, f" is {value!r}: it must be a whole number, at least 1, or -1, which derives it from the topology"


def _section_problems(name: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # Accelerate takes fsdp's keys with their prefix and without.
    prefix = "fsdp_" if name == "fsdp_config" else ""
    section = {key if key.startswith(prefix) else prefix + key: value for key, value in section.items()}
    version = section.get("fsdp_version", "missing")
    if name == "fsdp_config" and str(version) != "2":
        yield "fsdp_version", f" is {version}: it must be 2; version 1 is not supported"
        return  # most of its keys belong to that version
    without_layers = not section.get("fsdp_transformer_layer_cls_to_wrap")
    if section.get("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP" and without_layers:
        remedy = "set it, or use SIZE_BASED_WRAP with fsdp_min_num_params, as fsdp2.yaml does"
        yield "fsdp_auto_wrap_policy", f" is TRANSFORMER_BASED_WRAP, and fsdp_transformer_layer_cls_to_wrap is empty: {remedy}"
    for key, value in section.items():
        yield from _key_problems(key, value, _SECTION_KEYS[name])


def _suggest(word: str, known: Collection[str]) -> str:
    return did_you_mean(word, known, then=f"use one of {', '.join(known)}")
