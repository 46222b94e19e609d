"""Presets, options and environments that no run can be launched with: each is one sentence, before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import Started
from refusals import Refused, put

DRY = ["samerun", "launch", "--dry-run"]
MULTI = "distributed_type: MULTI_GPU\n"
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
FSDP = "distributed_type: FSDP\nfsdp_config: "
SIZES = f"{FSDP}{{fsdp_version: 2}}\nparallelism_config: "
PRESETS: dict[str, str] = {
    "": "preset bad.yaml: the file is empty",
    "- a\n": "preset bad.yaml: it must hold `key: value` lines",
    f"{DEEPSPEED}  zero_stage: 2\n  zero_stage: 3\n": "bad.yaml:4: zero_stage is given twice, in line 3",
    "distributed_type: !!python/name:os.system\n": "it is not YAML of plain values",
    "distributed_type: MULTIGPU\n": "distributed_type is 'MULTIGPU': did you mean MULTI_GPU?",
    "distributed_type: MULTI_CPU\n": "distributed_type is MULTI_CPU: on one machine Accelerate starts only one process",
    f"{MULTI}mixed_precision: no\n": "is false in YAML: write 'NO' or 'no'",
    f"{MULTI}mixed_precision: fp8\n": "mixed_precision is 'fp8': it must be one of no, bf16, fp16",
    "distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\n": "use_cpu is true: fp16 needs a GPU",
    "distributed_type: 'NO'\nnum_processes: 2\n": "num_processes is 2: distributed_type NO starts 1 process; use MULTI_GPU",
    f"{MULTI}num_processes: two\n": "num_processes is 'two': it must be a whole number, at least 1",
    f"{MULTI}main_process_ip: head\n": "main_process_ip is 'head': it belongs to the machine: remove it",
    f"{MULTI}use_cpu: true\n": "use_cpu is true: accelerate launch ignores it with distributed_type MULTI_GPU",
    f"{MULTI}mixed_precison: bf16\n": "mixed_precison: unknown or unsupported in a preset; did you mean mixed_precision?",
    f"{MULTI}fsdp_config: {{fsdp_version: 2}}\n": "fsdp_config: distributed_type is MULTI_GPU, so Accelerate would ignore it",
    f"{FSDP}2\n": "fsdp_config is 2: it must hold `key: value` lines",
    "distributed_type: FSDP\n": "fsdp_version is 1: it must be 2",
    f"{FSDP}{{version: 2, sharding_strategy: FULL_SHARD}}\n": "fsdp_sharding_strategy: unknown or unsupported in a preset",
    f"{FSDP}{{fsdp_version: 2, fsdp_activation_checkpointing: true}}\n": "with dropout its gradients are wrong",
    f"{DEEPSPEED}  offload_param_device: nvme\n": "offload_param_device is 'nvme': it must be one of none, cpu",
    f"{SIZES}{{tp_size: 2}}\n": "tp_size is 2: unknown key of a preset, which Accelerate ignores",
    f"{SIZES}{{parallelism_config_tp_size: 0}}\n": "parallelism_config_tp_size is 0: it must be a whole number",
    f"{SIZES}{{parallelism_config_cp_size: 2}}\n": "cp_size is 2: context parallelism is not supported",
    f"{MULTI}parallelism_config: {{parallelism_config_tp_size: 2}}\n": "MULTI_GPU, and these sizes need FSDP",
}


@pytest.mark.parametrize(("content", "sentence"), PRESETS.items(), ids=PRESETS)
def test_a_preset(content: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "bad.yaml", content.encode("latin-1"))
    refused([*DRY, "--preset", "bad.yaml"], sentence, 4)


ZERO = '{"zero_optimization": {"stage": 2}'
FILES: dict[str, str] = {
    f'{ZERO}, "gradient_clipping": 1.0}}': "gradient_clipping: 1.0: clipping belongs to the recipe: set optim.clip_norm",
    f'{ZERO}, "train_batch_size": 64}}': "train_batch_size: 64: set train.global_batch_size in the recipe",
    f'{ZERO}, "gradient_accumulation_steps": 2}}': 'and write "auto" here or leave it out',
    f'{ZERO}, "optimizer": {{"type": "Adam"}}}}': "optimizer: the optimizer is the recipe's (optim.name)",
    f'{ZERO}, "wandb": {{"enabled": true}}}}': "wandb: use --trackers",
    f'{ZERO}, "gradient_cliping": 1.0}}': "gradient_cliping: unknown or unsupported; did you mean",
    '{"zero_optimization": {"stage": 2, "compute_grad_norm": false}}': "zero_optimization.compute_grad_norm:",
    '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}': "_optimizer.ratio:",
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}': "offload to the CPU (device: cpu)",
    f'{ZERO}, "bf16": {{"check_grad_overflow": false}}}}': "bf16.check_grad_overflow: steps whose",
    f'{ZERO}, "bf16": {{"enabled": true}}}}': "bf16.enabled is true, and the precision is no",
    '{"zero_optimization": {}}': "zero_optimization.stage: null: it must be 0, 1, 2 or 3",
    "{}": "no section zero_optimization",
    ZERO: "the preset's deepspeed_config_file, zero.json, is not JSON",
    "": "the preset's deepspeed_config_file, zero.json, cannot be read from",
}


@pytest.mark.parametrize(("content", "sentence"), FILES.items(), ids=FILES)
def test_a_config_file_of_deepspeed(content: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "preset.yaml", f"{DEEPSPEED}  deepspeed_config_file: zero.json\n")
    if content:
        put(tmp_path, "zero.json", content)
    refused([*DRY, "--preset", "preset.yaml"], sentence, 4)


OPTIONS: dict[str, tuple[str, int]] = {
    "--preset fifo": ("preset fifo: it is not a text file", 4),
    "--config_file deepspeed_zero": ("no file of that name; did you mean deepspeed_zero", 4),
    "--preset cpu --processes 2": ("preset cpu starts 1 process, and this run has 2", 4),
    "--preset cpu --mixed-precision fp16": ("fp16 needs a GPU", 4),
    "--processes -1": ("--processes is -1: a run needs at least 1 process", 5),
    "--processes 7": ("train.global_batch_size is 64, which 7 processes cannot divide", 3),
    "--num_processes 2.5": ("'2.5': expected a whole number, 1 or more", 2),
    "--num_processes 2 --processes 3": ("on 1 nodes, and another option asks for 3 per node", 5),
    "--processes-per-node 2": ("--processes-per-node is 2, but there is no scheduler's allocation here", 5),
    "--port 99999": ("port is 99999 (--port): it must be a TCP port", 5),
    "--run-dir file/run": ("file/run cannot be made, because", 7),
    "--run-dir old --resume never": ("old, which already contains a run (it has a recipe.yaml)", 7),
    "--resume nowhere": ("--resume is nowhere: no such folder", 11),
    "--recipe imagefolder data.path=nowhere": ("data.path is 'nowhere': no such file or folder, or you may not read it", 6),
    "train.init_from=nowhere": ("train.init_from is nowhere: there is no such file or folder", 11),
    "--trackers tensorboard,wandbb": ("--trackers has 'wandbb': unknown tracker; did you mean wandb", 9),
    "--trackers aim": ("--trackers has aim, which is not installed here: pip install aim", 9),
    "--gpus 4": ("--gpus: unknown option; give --processes 4", 2),
    "--batch_size 32": ("recipe values are given as key=value: train.global_batch_size=32", 2),
    "--lr 0.1": ("--lr: unknown option; recipe values are given as key=value: optim.lr=0.1", 2),
    "0.1": ("'0.1' (command line): expected key=value", 3),
}


@pytest.mark.parametrize(("words", "expected"), OPTIONS.items(), ids=OPTIONS)
def test_options(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    put(tmp_path, "old/recipe.yaml", "seed: 0\n")
    os.mkfifo("fifo")
    refused([*DRY, *words.split()], *expected)


HOSTS = "SAMERUN_HOSTS=a,b"
ENVIRONMENTS: dict[str, tuple[str, str, int]] = {
    "SAMERUN_HOSTS=a,a": ("", "SAMERUN_HOSTS is 'a,a': it must be names of different hosts", 5),
    "SAMERUN_HOSTS=127.0.0.1,b": ("", "head_address is '127.0.0.1' (SAMERUN_HOSTS): on each of the 2 nodes this means", 5),
    f"{HOSTS} SAMERUN_STARTER=rsh": ("", "SAMERUN_STARTER is 'rsh': it must be one of", 5),
    f"{HOSTS} SAMERUN_NODE_RANK=5": ("", "node_rank is 5 (SAMERUN_NODE_RANK): with num_nodes is 2 (SAMERUN_HOSTS)", 5),
    f"{HOSTS} SAMERUN_THREADS=0": ("", "threads_per_process is 0 (SAMERUN_THREADS): it must be at least 1", 5),
    f"{HOSTS} A=1": ("--processes 2", "--processes is 2, which is for one machine", 5),
    f"{HOSTS} A=2": ("--nodes 3", "--nodes is 3, and num_nodes is 2 (SAMERUN_HOSTS): give 1 to 2", 5),
    f"{HOSTS} A=3": ("--num_processes 3", "it must be a multiple of 2", 5),
    "SAMERUN_END_TIME=soon": ("", "SAMERUN_END_TIME", 5),
    "RANK=0": ("", "the environment has RANK=0: torchrun", 5),
    "OMPI_COMM_WORLD_SIZE=4": ("", "OMPI_COMM_WORLD_SIZE=4: mpirun (Open MPI) started this process as one of several", 5),
    "PBS_JOBID=1 PBS_NODEFILE=nowhere": ("", "PBS_JOBID is 1, but PBS_NODEFILE nowhere cannot be read", 5),
    "SLURM_JOB_ID=5": ("", "SLURM_JOB_ID is set, but SLURM_JOB_NUM_NODES is not", 5),
}


@pytest.mark.parametrize(("variables", "expected"), ENVIRONMENTS.items(), ids=ENVIRONMENTS)
def test_environments(
    variables: str, expected: tuple[str, str, int], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, sentence, code = expected
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    refused([*DRY, *words.split()], sentence, code)


def test_a_process_of_its_own() -> None:
    finished = Started([sys.executable, "-m", "launch.cli", "launch", "--lr", "0.1"]).wait()
    assert (finished.returncode, len(finished.output.splitlines())) == (2, 1), finished.output
    assert "samerun: UsageError: --lr: unknown option" in finished.output
