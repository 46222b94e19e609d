"""Presets, options and environments that no run or job can be started with: each is one sentence, before anything starts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from processes import Started, python_path
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
    "distributed_type: !!python/name:os.system\n": "bad.yaml:1: it is not YAML: the tag !!python/name:os.system is not allowed",
    "distributed_type: MULTIGPU\n": "distributed_type is 'MULTIGPU': did you mean MULTI_GPU?",
    "distributed_type: MULTI_CPU\n": "distributed_type is 'MULTI_CPU': did you mean MULTI_GPU?",
    f"{MULTI}mixed_precision: no\n": "is false in YAML: write 'NO' or 'no'",
    "distributed_type: MEGATRON_LM\n": "bad.yaml:1: distributed_type is 'MEGATRON_LM': use one of NO, ",
    "debug: false\n": "bad.yaml: distributed_type is missing: use one of NO, MULTI_GPU, DEEPSPEED, FSDP",
    f"{MULTI}mixed_precision: fp8\n": "bad.yaml:2: mixed_precision is 'fp8': it must be one of no, bf16, fp16",
    "distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: fp16\n": "use_cpu is true: fp16 needs a GPU",
    "distributed_type: 'NO'\nnum_processes: 2\n": "starts 1 process, and this run has 2: processes_per_node is 2",
    f"{MULTI}dynamo_config: {{dynamo_backend: inductorr}}\n": "dynamo_backend is 'inductorr': did you mean INDUCTOR?",
    f"{MULTI}num_machines: 2\n": "num_machines is 2, and this launch has 1: remove it from the file",
    f"{MULTI}num_processes: two\n": "num_processes is 'two': it must be a whole number, at least 1",
    f"{MULTI}main_process_ip: head\n": "main_process_ip is 'head': it belongs to the machine: remove it",
    f"{MULTI}use_cpu: true\n": "use_cpu is true: accelerate launch ignores it with distributed_type MULTI_GPU",
    f"{FSDP}2\n": "fsdp_config is 2: it must hold `key: value` lines",
    f"{MULTI}mixed_precison: bf16\n": "mixed_precison: unknown or unsupported in a preset; did you mean mixed_precision?",
    f"{MULTI}fsdp_config: {{fsdp_version: 2}}\n": "fsdp_config: distributed_type is MULTI_GPU, so Accelerate would ignore it",
    "distributed_type: FSDP\n": "fsdp_version is missing: it must be 2",
    f"{FSDP}\n  fsdp_version: 1\n": "bad.yaml:3: fsdp_version is 1: it must be 2",
    f"{FSDP}{{fsdp_version: 2, fsdp_activation_checkpointing: true}}\n": "with dropout its gradients are wrong",
    f"{SIZES}{{tp_size: 2}}\n": "tp_size is 2: unknown key of a preset, which Accelerate ignores",
    f"{SIZES}{{parallelism_config_tp_size: 0}}\n": "parallelism_config_tp_size is 0: it must be a whole number",
    f"{SIZES}{{parallelism_config_sp_size: 2}}\n": "sp_size is 2: sequence parallelism is not supported",
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
    f'{ZERO}, "gradient_cliping": 1.0}}': "gradient_cliping: unknown or unsupported; did you mean",
    '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}': "ratio: 0.5:",
    '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}': "offload to the CPU (device: cpu)",
    f'{ZERO}, "bf16": {{"enabled": true}}}}': "bf16.enabled is true, and the precision is no",
    '{"zero_optimization": {}}': "zero_optimization.stage: null: it must be 0, 1, 2 or 3",
    "{}": "no section zero_optimization",
    f'{ZERO}, "optimizer": {{"type": "Adam"}}}}': "optimizer: unknown or unsupported; leave it out",
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
    "--preset ddp": ("no preset or file of that name; did you mean multi_gpu or multi_node?", 4),
    "--preset FP32": ("preset FP32: this is a precision, not a preset: give --mixed-precision no, with a preset or", 4),
    "--preset zero.json": ("preset zero.json: it is a config file of DeepSpeed: write a preset with distributed_type: ", 4),
    "--preset old": ("preset old: it is a folder: give a YAML file in it", 4),
    "--recipe no/such.yaml": ("no recipe or file of that name; correct the path, or see `samerun recipes`", 3),
    "--processes two": ("--processes: 'two': expected a whole number", 2),
    "optim.lr=0,1": ("optim.lr is 0,1 (command line): expected a number; did you mean 0.1?", 3),
    "train.dtype=bf16": ("expected one of float32, float64; `samerun launch` has --mixed-precision bf16", 3),
    "--recipe lm_tiny model.architecture=lama": ("transformers has no such causal language model; did you mean llama", 3),
    "--recipe lm_tiny model.path=/nope": ("there is no such folder here, and the config.json of path sets architecture", 3),
    "--preset fifo": ("preset fifo: it is not a text file", 4),
    "--config_file deepspeed_zero": ("no preset or file of that name; did you mean deepspeed_zero", 4),
    "--preset cpu --processes 2": ("preset cpu starts 1 process, and this run has 2", 4),
    "--preset cpu --mixed-precision fp16": ("fp16 needs a GPU", 4),
    "--preset tensor_parallel --processes 2": ("cannot split the models of task image_classification: use fsdp2", 4),
    "--preset context_parallel --processes 2": ("cannot split the models of task image_classification: use fsdp2", 4),
    "--context-parallel 2 --replicas 2 --processes 4": ("but preset hsdp has no parallelism_config_cp_size", 4),
    "--mixed-precision fp8": ("expected no (float32), bf16 or fp16; fp8 is not supported", 2),
    "--processes -1": ("processes_per_node is -1 (--processes): it must be at least 1", 5),
    "--processes 7": ("train.global_batch_size is 64, which 7 processes cannot split", 3),
    "--num_processes 2 --processes 3": ("on 1 nodes, and another option asks for 3 per node", 5),
    "--processes-per-node 2": ("--processes-per-node is 2, but there is no scheduler's allocation here", 5),
    "--port 99999": ("port is 99999 (--port): it must be a TCP port", 5),
    "--run-dir old --resume never": ("old, which already contains a run (it has a recipe.yaml)", 7),
    "--resume nowhere": ("--resume is nowhere: no such folder", 11),
    "--recipe imagefolder data.path=nowhere": ("data.path is 'nowhere': no such file or folder, or it cannot be read", 6),
    "train.init_from=nowhere": ("train.init_from is nowhere: there is no such file or folder", 11),
    "--trackers aim": ("--trackers has aim, which is not installed here: pip install aim", 9),
    "--gpus 4": ("--gpus: unknown option; give --processes", 2),
    "--trackers tensorboard,wandbb": ("--trackers has 'wandbb': unknown tracker; did you mean wandb", 9),
    "0.1": ("'0.1' (command line): expected key=value", 3),
}


@pytest.mark.parametrize(("words", "expected"), OPTIONS.items(), ids=OPTIONS)
def test_options(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "old/recipe.yaml", "seed: 0\n")
    put(tmp_path, "zero.json", ZERO + "}")
    os.mkfifo("fifo")
    refused([*DRY, *words.split()], *expected)


HOSTS = "SAMERUN_HOSTS=a,b"
ENVIRONMENTS: dict[str, tuple[str, str, int]] = {
    "SAMERUN_HOSTS=a,a": ("", "SAMERUN_HOSTS is 'a,a': it must be names of different hosts", 5),
    "SAMERUN_HOSTS=127.0.0.1,b": ("", "head_address is '127.0.0.1' (SAMERUN_HOSTS): it must be a name or address by", 5),
    f"{HOSTS} SAMERUN_STARTER=rsh": ("", "SAMERUN_STARTER is 'rsh': it must be one of", 5),
    f"{HOSTS} SAMERUN_NODE_RANK=5": ("", "node_rank is 5 (SAMERUN_NODE_RANK): with num_nodes is 2 (SAMERUN_HOSTS)", 5),
    f"{HOSTS} SAMERUN_THREADS=0": ("", "threads_per_process is 0 (SAMERUN_THREADS): it must be at least 1", 5),
    f"{HOSTS} A=2": ("--nodes 3", "--nodes is 3, and num_nodes is 2 (SAMERUN_HOSTS): give 1 to 2", 5),
    "CUDA_VISIBLE_DEVICES=": ("--preset deepspeed_zero3 --mixed-precision fp16", "fp16, and there is no GPU here", 4),
    "SAMERUN_END_TIME=soon": ("", "SAMERUN_END_TIME", 5),
    "OMPI_COMM_WORLD_SIZE=4": ("", "OMPI_COMM_WORLD_SIZE=4: mpirun (Open MPI) started this process as one of several", 5),
    f"{HOSTS} A=4": ("--spares 1 --nodes 2", "--nodes is 2: remove it, since the run uses all nodes of the job but", 5),
    f"{HOSTS} A=3": ("--min-nodes 1", "--min-nodes is 1, but only a Slurm job can continue without one of its nodes", 5),
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


# Jobs that cannot be submitted: all that is wrong is reported before the queue --------------------------------------------


JOB = "--nodes 1 --time 1:00:00"
PROBLEMS: dict[str, str] = {
    "--num_processes 3 --gpus-per-node 2": "--num_processes is 3, the total number of processes, on 1 nodes, and another",
    "data.path=nowhere foo=1": "it cannot be read. Correct it, or give --data-on-nodes if only the nodes of the job have it",
    "--array x": "--array has 'x': expected key=value,value",
    "--array seed=1": "--array is 'seed=1', which is a single run",
    "--array optim.lr=1e-3,0.001": "--array has 'optim.lr=1e-3,0.001': expected key=value,value, each key and value once",
    "--array seed=1,2;seed=3,4": "--array has 'seed=3,4': expected key=value,value, each key and value once",
    "--array optim.lr=0.1,fast": "optim.lr is fast (command line): expected a number (task 1 of --array)",
    "--array train.global_batch_size=64,63 --processes-per-node 2": "is 63, which 2 processes cannot split",
    "--array seed=1,2 seed=3": "seed is given by --array and by seed=...: remove one of them",
    "--sbatch-option='--comment=a\nrm -r x'": "it must be one line that begins with -",
    "--spares 1": "--spares is 1, but the run has fewer than 2 nodes: request more, since the first node cannot be replaced",
    "-- --lr 0.1": "--lr: unknown option; recipe values are given as key=value: optim.lr=...",
}


@pytest.mark.parametrize(("words", "sentence"), PROBLEMS.items(), ids=PROBLEMS)
def test_what_would_fail_in_the_job(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    refused(["samerun", "submit", "--dry-run", "--scheduler", "slurm", *shlex.split(f"{JOB} {words}")], sentence, 10)
    assert not (tmp_path / "runs").exists()


SUBMIT_OPTIONS: dict[str, str] = {
    "--time 1:00:00": "the following arguments are required: --nodes",
    "--nodes 1 --time 1:60:00": "--time: '1:60:00': expected hours:minutes:seconds",
    "--nodes 1 --time 0:00:00": "--time: '0:00:00': expected hours:minutes:seconds, more than 0",
    f"{JOB} --gpus-per-node a100:2,h100:0": "--gpus-per-node: 'a100:2,h100:0': expected a whole number, 1 or more",
    f"{JOB} --partition 'gpu\n#SBATCH --nodes=9'": r"--partition: 'gpu\n#SBATCH --nodes=9': expected a word of letters",
    f"{JOB} --gpus-per-node 2 --processes-per-node 2": "--processes-per-node: not allowed with argument --gpus-per-node",
}


@pytest.mark.parametrize(("words", "sentence"), SUBMIT_OPTIONS.items(), ids=SUBMIT_OPTIONS)
def test_an_option_of_the_wrong_form(words: str, sentence: str, refused: Refused) -> None:
    refused(["samerun", "submit", "--dry-run", *shlex.split(words)], sentence, 2)


@pytest.mark.parametrize(
    ("file", "words", "code", "sentence"),
    [("mine.py", "--lr 0.1", 2, "samerun: UsageError: --lr: unknown option"),
     ("yaml.py", "--dry-run", 2, "/yaml.py is imported in place of the library yaml (module 'yaml' has no attribute ")],
)  # fmt: skip
def test_a_process_of_its_own(file: str, words: str, code: int, sentence: str, tmp_path: Path) -> None:
    put(tmp_path, file, "")
    command = [sys.executable, "-m", "launch.cli", "launch", *words.split()]
    finished = Started(command, env={"PYTHONPATH": python_path(tmp_path)}).wait()
    assert (finished.returncode, len(finished.output.splitlines())) == (code, 1), finished.output
    assert sentence in finished.output
