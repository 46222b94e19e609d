"""How the sizes of a preset become copies of a model and parts of its matrices, on any processes."""

from __future__ import annotations

import pytest

from app.environment.launched import read
from app.errors import PresetError, TopologyError

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def started(world_size: int, per_node: int, *, rank: int = 0, **sizes: int) -> dict[str, str]:
    """What a rank's environment has, with sizes as `accelerate launch` hands them on."""
    there = {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % per_node), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": str(per_node),
    }  # fmt: skip
    return FSDP2 | there | {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("world_size", "per_node", "sizes", "replicas", "tensor_parallel"),
    [
        (8, 4, {"dp_replicate_size": -1}, 2, 1),
        (4, 4, {"dp_replicate_size": -1}, 1, 1),  # one node: fsdp2
        (8, 8, {"dp_replicate_size": 4, "dp_shard_size": 2}, 4, 1),
        (8, 4, {"tp_size": -1}, 1, 4),
        (8, 4, {"tp_size": 2, "dp_shard_size": -1}, 1, 2),
        (1, 1, {"tp_size": -1}, 1, 1),
        (1, 1, {"dp_replicate_size": -1}, 1, 1),
        (8, 4, {"tp_size": 1, "cp_size": 1}, 1, 1),
    ],
)
def test_sizes_are_taken_or_derived(world_size, per_node, sizes, replicas, tensor_parallel) -> None:
    launched = read(started(world_size, per_node, rank=world_size - 1, **sizes))
    assert (launched.replicas, launched.tensor_parallel) == (replicas, tensor_parallel)
    assert (launched.data_rank, launched.data_ranks) == (world_size // tensor_parallel - 1, world_size // tensor_parallel)
    assert launched.strategy == "fsdp2"


def test_one_process_without_a_group_is_one_of_each() -> None:
    launched = read(FSDP2 | {"PARALLELISM_CONFIG_TP_SIZE": "-1", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1"})
    assert (launched.replicas, launched.tensor_parallel, launched.data_ranks) == (1, 1, 1)


def test_neighbours_get_the_same_samples() -> None:
    groups = [read(started(8, 4, rank=rank, tp_size=2)).data_rank for rank in range(8)]
    assert groups == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [
        (
            started(6, 3, tp_size=4),
            TopologyError,
            r"tp_size is 4 \(PARALLELISM_CONFIG_TP_SIZE\), which does not divide the 6 pro",
        ),
        (
            started(6, 3, dp_replicate_size=4),
            TopologyError,
            r"_dp_replicate_size is 4 \(\S+\), which does not divide",
        ),
        (started(2, 1, dp_replicate_size=-1), TopologyError, r"there are 2 processes: .*nothing is sharded.* multi_node\.yaml"),
        (
            started(8, 4, dp_replicate_size=2, dp_shard_size=2),
            TopologyError,
            r"dp_shard_size is 2 \(\S+\), but 8 processes leave 4",
        ),
        (
            started(8, 4, dp_replicate_size=-1, tp_size=2),
            PresetError,
            r"dp_replicate_size is -1 .* and \S+tp_size is 2 \S+: replicas",
        ),
        (started(8, 4, cp_size=2), PresetError, r"parallelism_config_cp_size is 2: context parallelism is not supported"),
        (started(8, 4, sp_size=2), PresetError, r"parallelism_config_sp_size is 2: sequence parallelism is not supported"),
        (started(8, 4, tp_size=0), PresetError, r"tp_size is '0' \(PARALLELISM_CONFIG_TP_SIZE\): it must be a whole number"),
        (started(8, 4, tp_size=2) | {"ACCELERATE_USE_FSDP": "false"}, PresetError, r"tp_size is 2, and .* strategy is ddp: "),
        (
            started(8, 4, dp_replicate_size=2) | {"ACCELERATE_USE_DEEPSPEED": "true"},
            PresetError,
            r"dp_replicate_size is 2, and .* strategy is deepspeed: it needs distributed_type FSDP, fsdp_version 2",
        ),
    ],
)
def test_what_cannot_be_is_refused(environment, error, words) -> None:
    with pytest.raises(error, match=words):
        read(environment)


def test_what_a_user_should_know_is_said() -> None:
    assert read(started(8, 4, tp_size=4)).notes == ()
    (said,) = read(started(8, 4, tp_size=8)).notes
    assert "8 tensor-parallel processes span several nodes of 4" in said
    (said,) = read(started(4, 4, dp_replicate_size=-1)).notes
    assert "on one node there is one copy" in said
