"""What a process reads of how it was started; the scheduler environments are captured from real jobs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import Started, accelerate

from app.environment.launched import Launched, SchedulerJob, read, read_job
from app.errors import PresetError, TopologyError

ENVIRONMENTS = Path(__file__).parents[1] / "environments"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def captured(name: str) -> dict[str, str]:
    lines = (ENVIRONMENTS / f"{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_nothing_said_is_one_process() -> None:
    assert read({}) == Launched()


def test_torchrun_says_it_all() -> None:
    launched = read(TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"})
    assert (launched.world_size, launched.rank, launched.local_rank, launched.local_world_size) == (4, 1, 1, 2)
    assert launched.strategy == "deepspeed"


def test_a_precision_that_no_run_has_is_refused() -> None:
    assert read({"ACCELERATE_MIXED_PRECISION": "BF16"}).mixed_precision == "bf16"
    with pytest.raises(PresetError, match=r"mixed_precision is fp8, .*one of no, bf16, fp16\. 8-bit numbers are not supported"):
        read({"ACCELERATE_MIXED_PRECISION": "fp8"})


@pytest.mark.parametrize("missing", TORCHRUN)
def test_half_an_environment_is_refused(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(TopologyError, match=f"but not {missing}: "):
        read(environment)


@pytest.mark.parametrize("name", ["slurm-2node-2task-step", "srun-pmi2-2node-2task", "mpirun-slurm-2node-2task"])
def test_what_a_scheduler_started_one_by_one_finds_its_place(name: str) -> None:
    launched = read(captured(name))
    assert (launched.world_size, launched.local_world_size) == (4, 2)
    torchrun = read(launched.variables)
    assert (torchrun.world_size, torchrun.rank) == (launched.world_size, launched.rank)


def test_such_processes_are_joined_by_ddp_only() -> None:
    with pytest.raises(PresetError, match=r"srun started 4 processes, which can only run DDP.*deepspeed: use srun to start"):
        read(captured("slurm-2node-2task-step") | {"ACCELERATE_USE_DEEPSPEED": "true"})


@pytest.mark.parametrize("name", ["slurm-2node-2task-step", "mpirun-slurm-2node-2task"])
def test_torchrun_inside_a_scheduler_is_fine(name: str) -> None:
    assert read(captured(name) | TORCHRUN).world_size == 4


def test_the_batch_step_of_an_allocation_is_one_process() -> None:
    assert read(captured("slurm-2node-2task-batch")).world_size == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", "train.max_micro_batch"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "MEGATRON_LM"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp_version is 1"),
    ],
)
def test_what_the_recipe_decides_or_nobody_supports_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(PresetError, match=message):
        read({name: value})


def test_checkpointing_with_other_random_numbers_is_refused() -> None:
    said = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    with pytest.raises(PresetError, match=r"fsdp_activation_checkpointing is true.*train\.checkpoint_activations=blocks"):
        read(said)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_number_that_is_none_is_named(name: str) -> None:
    with pytest.raises(TopologyError, match=f"{name} is 'two'"):
        read(TORCHRUN | {name: "two"})


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(TopologyError, match="RANK is 4 and WORLD_SIZE is 4"):
        read(TORCHRUN | {"RANK": "4"})


def test_the_end_of_the_allocation_is_taken_over() -> None:
    end_time_s = time.time() + 3600
    assert read({"SAMERUN_END_TIME": str(end_time_s)}).end_time_s == end_time_s
    assert read({**TORCHRUN, "SAMERUN_END_TIME": f"{end_time_s:.0f}"}).end_time_s == float(f"{end_time_s:.0f}")


@pytest.mark.parametrize("value", ["1000000000", "01:00:00", "", "nan", "1763748123000"])
def test_an_end_of_the_allocation_that_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(TopologyError, match=f"SAMERUN_END_TIME is '{value}': it must be the end of the allocation"):
        read({"SAMERUN_END_TIME": value})


def test_the_job_is_read_as_far_as_it_is_told() -> None:
    assert read_job({}) == SchedulerJob(name=None, submitted=None, allocated=None)
    told = {"PBS_JOBID": "14[1].head", "SAMERUN_SUBMIT_TIME": "1700000000", "SAMERUN_START_TIME": "1700000060"}
    assert read_job(told) == SchedulerJob(name="14[1].head", submitted=1.7e9, allocated=1.7e9 + 60)
    with pytest.raises(TopologyError, match="SAMERUN_SUBMIT_TIME is 'now'"):
        read_job({"SAMERUN_SUBMIT_TIME": "now"})


# Addresses that nobody needs ----------------------------------------------------------------------------------------------

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
PLAIN = ["python", "/venv/bin/accelerate", "launch", "--config_file"]


@pytest.mark.parametrize(
    ("environment", "commands"),
    [
        ({"MASTER_PORT": "29500"}, []),
        (ADDRESS, []),
        ({"MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}, []),
        (ADDRESS | {"ACCELERATE_USE_CPU": "true"}, [["bash"], [*PLAIN, "cpu.yaml", "train.py", "--num_processes", "2"]]),
    ],
)
def test_an_address_that_a_script_of_a_job_has_set_is_no_mistake(
    environment: dict[str, str], commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "accelerate_configs")
    assert read(environment, started_by=lambda: commands).world_size == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*PLAIN, "cpu.yaml", "--num_processes", "2", "train.py"], "was asked for several processes and started one"),
        (["python", "-m", "accelerate.commands.launch", "--num-machines=2", "--cpu", "-m", "app.train"], "asked for several"),
        (["bash", "launch"], "if it was asked for one, unset MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_one_for_several_is_refused_with_what_was_found(
    command: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "accelerate_configs")
    with pytest.raises(TopologyError, match=words) as refused:
        read(ADDRESS | {"ACCELERATE_USE_CPU": "true"}, started_by=lambda: [command])
    assert "MASTER_ADDR=node1, MASTER_PORT=29500, and no RANK" in str(refused.value)


@pytest.mark.multiproc
def test_what_accelerate_was_asked_for_is_read_of_the_real_one(tmp_path: Path) -> None:
    program = "import os; from app.environment.launched import read; print(read(os.environ).world_size)"
    (tmp_path / "reads.py").write_text(program)
    started = Started(accelerate("cpu", target=(str(tmp_path / "reads.py"),)), env=ADDRESS)
    assert started.wait().check().output.endswith("\n1\n")
