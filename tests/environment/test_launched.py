"""What a process reads of how it was started, and how the sizes of a preset become copies of a model and parts of its matrices.

The scheduler environments are captured from real jobs.
"""

from __future__ import annotations

import time

import pytest
from processes import captured

from app.environment.launched import Launched, read, read_job, without_leftovers
from app.errors import PresetError, SamerunError, TopologyError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "none"}
SRUN = "slurm-2node-2task-step"


def started(world_size: int, per_node: int, *, rank: int = 0, **sizes: int) -> dict[str, str]:
    """What a rank's environment has, with sizes as `accelerate launch` hands them on."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    numbers |= {f"PARALLELISM_CONFIG_{name.upper()}": size for name, size in sizes.items()}
    return TORCHRUN | FSDP2 | {name: str(number) for name, number in numbers.items()}


def test_nothing_set_is_one_process() -> None:
    assert read({}) == Launched()
    assert read(captured("slurm-2node-2task-batch")).world_size == 1
    address = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}  # of a script of a job
    assert read(address).world_size == 1
    assert read(address | {"ACCELERATE_USE_CPU": "true", "SAMERUN_LAUNCHER": "1-a"}).world_size == 1


def test_torchrun_sets_all() -> None:
    launched = read(TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "BF16"} | DEEPSPEED)
    assert (launched.world_size, launched.rank, launched.local_rank, launched.local_world_size) == (4, 1, 1, 2)
    assert (launched.strategy, launched.mixed_precision) == ("deepspeed", "bf16")


@pytest.mark.parametrize("name", [SRUN, "srun-pmi2-2node-2task", "mpirun-slurm-2node-2task"])
def test_what_a_scheduler_started_one_by_one_finds_its_place(name: str) -> None:
    launched = read(captured(name))
    assert (launched.world_size, launched.local_world_size) == (4, 2)
    torchrun = read(launched.variables)
    assert (torchrun.world_size, torchrun.rank) == (launched.world_size, launched.rank)
    assert read(captured(name) | TORCHRUN).variables == {}


@pytest.mark.parametrize(
    ("world_size", "per_node", "sizes", "replicas", "tensor_parallel", "context_parallel"),
    [
        (8, 4, {"dp_replicate_size": -1}, 2, 1, 1),
        (8, 8, {"dp_replicate_size": 4, "dp_shard_size": 2}, 4, 1, 1),
        (8, 4, {"tp_size": -1}, 1, 4, 1),
        (8, 4, {"tp_size": 2, "dp_shard_size": -1}, 1, 2, 1),
        (1, 1, {"tp_size": -1}, 1, 1, 1),
        (8, 4, {"cp_size": -1}, 1, 1, 4),
        (8, 4, {"cp_size": 2, "dp_shard_size": 4}, 1, 1, 2),
    ],
)
def test_sizes_are_taken_or_derived(world_size, per_node, sizes, replicas, tensor_parallel, context_parallel) -> None:
    launched = read(started(world_size, per_node, rank=world_size - 1, **sizes))
    assert (launched.strategy, launched.replicas) == ("fsdp2", replicas)
    assert (launched.tensor_parallel, launched.context_parallel) == (tensor_parallel, context_parallel)
    data_ranks = world_size // (tensor_parallel * context_parallel)
    assert (launched.data_rank, launched.data_ranks) == (data_ranks - 1, data_ranks)


IMPOSSIBLE: list[tuple[dict[str, str], type[SamerunError], str]] = [
    ({key: value for key, value in TORCHRUN.items() if key != "LOCAL_RANK"}, TopologyError, "but not LOCAL_RANK: "),
    (TORCHRUN | {"WORLD_SIZE": "two"}, TopologyError, "WORLD_SIZE is 'two'"),
    (TORCHRUN | {"RANK": "4"}, TopologyError, "RANK is 4 and WORLD_SIZE is 4"),
    ({"SAMERUN_END_TIME": "1000000000"}, TopologyError, "SAMERUN_END_TIME is 1000000000: it must be the end of the allocation"),
    ({"SAMERUN_END_TIME": "01:00:00"}, TopologyError, "SAMERUN_END_TIME is '01:00:00': it must be a whole number"),
    (captured(SRUN) | DEEPSPEED, PresetError, r"srun started 4 processes, which can only run DDP.*deepspeed: use srun"),
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, PresetError, r"mixed_precision is fp8, .*no, bf16, fp16\. 8-bit numbers are not"),
    ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}, PresetError, r"train\.max_micro_batch"),
    ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, PresetError, r"the preset's gradient_clipping is 0\.5: .*set optim\.clip_norm"),
    (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, PresetError, r"is true.*set train\.checkpoint_activations=blocks"),
    ({"ACCELERATE_USE_FSDP": "true"}, PresetError, "fsdp_version is 1 .*run `unset ACCELERATE_USE_FSDP`"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, PresetError, "is set in the shell, .*run `unset ACCELERATE_USE_DEEPSPEED`"),
    (FSDP2 | {"FSDP_VERSION": "1"}, PresetError, "fsdp_version is 1 .preset, or FSDP_VERSION of the shell"),
    (started(6, 3, tp_size=4), TopologyError, r"tp_size is 4 \(PARALLELISM_CONFIG_TP_SIZE\), which does not divide the 6 pro"),
    (started(2, 1, dp_replicate_size=-1), TopologyError, r"there are 2 processes: .*nothing is sharded.* multi_node\.yaml"),
    (started(8, 4, dp_replicate_size=2, dp_shard_size=2), TopologyError, r"dp_shard_size is 2 \(\S+\), but 8 processes leave"),
    (started(8, 4, dp_replicate_size=-1, tp_size=2), PresetError, r"_size is -1 .* and \S+tp_size is 2 \S+: replicas"),
    (started(8, 4, tp_size=2, cp_size=2), PresetError, r"tp_size is 2 .* and \S+cp_size is 2 \S+: replicas"),
    (started(6, 3, cp_size=4), TopologyError, r"cp_size is 4 \(PARALLELISM_CONFIG_CP_SIZE\), which does not divide the 6 pro"),
    (started(8, 4, sp_size=2), PresetError, r"parallelism_config_sp_size is 2: sequence parallelism is not supported"),
    (started(8, 4, tp_size=2) | {"ACCELERATE_USE_FSDP": "false"}, PresetError, r"tp_size is 2: .* strategy is ddp, "),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "error", "words"), IMPOSSIBLE)
def test_what_cannot_be_is_refused(environment: dict[str, str], error: type[SamerunError], words: str) -> None:
    with pytest.raises(error, match=words):
        read(environment)


def test_what_an_earlier_launcher_left_is_not_passed_on() -> None:
    kept, lines = {"PATH": "/bin", "ACCELERATE_LOG_LEVEL": "debug", "SAMERUN_END_TIME": "1"}, []
    left = FSDP2 | DEEPSPEED | {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert without_leftovers(kept | left, say=lines.append) == kept
    assert len(lines) == 1
    assert all(f"{name}={value}" in lines[0] for name, value in left.items())
    assert without_leftovers(kept, say=pytest.fail) == kept


def test_the_end_of_the_allocation_and_the_job_are_read() -> None:
    end_time_s = int(time.time()) + 3600
    assert read({"SAMERUN_END_TIME": str(end_time_s)}).end_time_s == end_time_s
    assert read_job({}) == {"job": None, "submitted": None, "allocated": None}
    variables = {"PBS_JOBID": "14[1].head", "SAMERUN_SUBMIT_TIME": "1700000000", "SAMERUN_START_TIME": "1700000060"}
    assert read_job(variables) == {"job": "14[1].head", "submitted": 1.7e9, "allocated": 1.7e9 + 60}
    with pytest.raises(TopologyError, match="SAMERUN_SUBMIT_TIME is 'now'"):
        read_job({"SAMERUN_SUBMIT_TIME": "now"})
