"""Presets, options and environments that no run can be launched with: each is one sentence, before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from processes import Started
from refusals import Refused, put

DRY = ["samerun", "launch", "--dry-run"]
DEEPSPEED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n"
PRESETS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "preset bad.yaml: the file is empty"),
    "a list": (b"- a\n", "preset bad.yaml: it must hold `key: value` lines"),
    "a recipe": (b"optim:\n  lr: 0.1\n", "optim: unknown key of a preset"),
    "latin-1": (b"# caf\xe9\ndistributed_type: MULTI_GPU\n", "preset bad.yaml:1: it is not UTF-8 (byte 0xe9)"),
    "a tab": (b"fsdp_config:\n\tfsdp_version: 2\n", "preset bad.yaml:2: it is not YAML: found character"),
    "a zero byte": (b"debug: \x00", "preset bad.yaml: it is not YAML: unacceptable character"),
    "two documents": (b"debug: true\n---\ndebug: false\n", "preset bad.yaml:2: it is not YAML: but found another document"),
    "a key twice": (b"debug: true\ndistributed_type: 'NO'\ndebug: false\n", "bad.yaml:3: debug is given twice, in line 1"),
    "a key twice in a section": (
        f"{DEEPSPEED}  zero_stage: 2\n  zero_stage: 3\n".encode(), "bad.yaml:4: zero_stage is given twice, in line 3",
    ),
    "a tag of Python": (b"distributed_type: !!python/name:os.system\n", "it is not YAML of plain values"),
    "a list as key": (b"[a]: 1\n", "it is not YAML of plain values"),
    "an open bracket": (b"distributed_type: [\n", "preset bad.yaml:2: it is not YAML"),
    "lists without end": (b"debug: " + b"[" * 3000, "it is not YAML: maximum recursion depth"),
    "an unknown type": (b"distributed_type: MULTIGPU\n", "distributed_type is 'MULTIGPU': did you mean MULTI_GPU?"),
    "no type": (b"debug: true\n", "distributed_type is None: There is NO, MULTI_GPU, DEEPSPEED, FSDP"),
    "an unknown stage": (f"{DEEPSPEED}  zero_stage: 7\n".encode(), "zero_stage is 7: it must be one of 0, 1, 2, 3"),
    "an unknown place": (f"{DEEPSPEED}  offload_param_device: gpu\n".encode(), "offload_param_device is 'gpu': it must be one"),
    "8 bits": (b"distributed_type: MULTI_GPU\nmixed_precision: fp8\n", "mixed_precision is 'fp8': it must be one of no"),
    "checkpointing by Accelerate": (
        b"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_activation_checkpointing: true\n",
        "fsdp_activation_checkpointing is True: with dropout its gradients are wrong",
    ),
    "a word for a number": (b"distributed_type: MULTI_GPU\nnum_processes: two\n", "num_processes is 'two': it must be a whole"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), PRESETS.values(), ids=PRESETS)
def test_a_preset(content: bytes, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "bad.yaml", content)
    refused([*DRY, "--preset", "bad.yaml"], sentence, 4)


ZERO = '{"zero_optimization": {"stage": 2}'
FILES: dict[str, tuple[str, str, str]] = {
    "clipping": (f'{ZERO}, "gradient_clipping": 1.0}}', "", "gradient_clipping: 1.0: clipping belongs to the recipe: set"),
    "a batch": (f'{ZERO}, "train_batch_size": 64}}', "", "train_batch_size: 64: set train.global_batch_size in the recipe"),
    "a micro-batch": (f'{ZERO}, "train_micro_batch_size_per_gpu": 64}}', "", "to limit memory, set train.max_micro_batch"),
    "accumulation": (f'{ZERO}, "gradient_accumulation_steps": 2}}', "", 'and write "auto" here or leave it out'),
    "an optimizer": (f'{ZERO}, "optimizer": {{"type": "Adam"}}}}', "", "optimizer: the optimizer is the recipe's (optim.name)"),
    "a schedule": (f'{ZERO}, "scheduler": {{}}}}', "", "scheduler: the learning rate is the recipe's (optim.schedule)"),
    "a tracker": (f'{ZERO}, "wandb": {{"enabled": true}}}}', "", "wandb: use --trackers"),
    "an unknown key": (f'{ZERO}, "gradient_cliping": 1.0}}', "", "gradient_cliping: unknown or unsupported; did you mean"),
    "quantized gradients": (
        '{"zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}', "", "zero_quantized_gradients: it changes",
    ),
    "no norm": ('{"zero_optimization": {"stage": 2, "compute_grad_norm": false}}', "", "zero_optimization.compute_grad_norm:"),
    "half of the optimizer": (
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}', "", "_optimizer.ratio:",
    ),
    "NVMe": ('{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}', "", "offload to the CPU (device:"),
    "infinite gradients": (f'{ZERO}, "bf16": {{"check_grad_overflow": false}}}}', "", "bf16.check_grad_overflow: steps whose"),
    "a precision": (f'{ZERO}, "bf16": {{"enabled": true}}}}', "", "bf16.enabled is true, and the precision is no"),
    "no stage": ('{"zero_optimization": {}}', "", "zero_optimization.stage: null: it must be 0, 1, 2 or 3"),
    "no section": ("{}", "", "no section zero_optimization"),
    "broken": (ZERO, "", "the preset's deepspeed_config_file, zero.json, is not JSON"),
    "none": ("", "", "the preset's deepspeed_config_file, zero.json, cannot be read from"),
    "a stage in the preset": (f"{ZERO}}}", "  zero_stage: 3\n", "zero_stage is 3: it belongs in zero.json"),
    "a precision in the preset": (f"{ZERO}}}", "mixed_precision: bf16\n", "mixed_precision is 'bf16': remove it beside"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "more", "sentence"), FILES.values(), ids=FILES)
def test_a_config_file_of_deepspeed(content: str, more: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "preset.yaml", f"{DEEPSPEED}  deepspeed_config_file: zero.json\n{more}")
    if content:
        put(tmp_path, "zero.json", content)
    refused([*DRY, "--preset", "preset.yaml"], sentence, 4)


OPTIONS: dict[str, tuple[str, int]] = {
    "--preset fifo": ("preset fifo: it is not a text file", 4),
    "--preset folder": ("preset folder: it is not a text file", 4),
    "--preset none.yaml": ("preset none.yaml: there is no such file", 4),
    "--preset ddp": ("did you mean multi_gpu?", 4),
    "--preset deepspeed_zero": ("there is no preset and no file of that name; did you mean deepspeed_zero", 4),
    "--config_file zero3": ("did you mean deepspeed_zero3?", 4),
    "--preset cpu --processes 2": ("preset cpu starts 1 process, and this run has 2", 4),
    "--preset cpu --mixed-precision fp16": ("fp16 needs a GPU", 4),
    "--mixed-precision fp8": ("--mixed-precision: invalid choice: 'fp8'", 2),
    "--mixed_precision half": ("invalid choice: 'half'", 2),
    "--processes x": ("--processes: invalid int value: 'x'", 2),
    "--processes -1": ("--processes is -1: a run needs at least 1 process", 5),
    "--processes 7": ("train.global_batch_size is 64, which 7 processes cannot divide", 3),
    "--num_processes 2.5": ("'2.5': expected a whole number, 1 or more", 2),
    "--num_processes 2 --processes 3": ("--num_processes is 2, 2 per node, but the options also say 3", 5),
    "--processes-per-node 2": ("--processes-per-node is 2, but there is no scheduler's allocation here", 5),
    "--nodes 2": ("--nodes is 2, but there is no scheduler's allocation here", 5),
    "--num_machines 2": ("--nodes is 2, but there is no scheduler's allocation here", 5),
    "--port 99999": ("port is 99999 (--port): it must be a TCP port", 5),
    "--main_process_port here": ("invalid int value: 'here'", 2),
    "--max-restarts -1": ("--max-restarts: '-1': expected a whole number, 0 or more", 2),
    "--max-requeues often": ("--max-requeues: 'often': expected a whole number, 0 or more", 2),
    "--run-dir file": ("file is a file: choose another --run-dir", 7),
    "--run-dir file/run": ("file/run cannot be made, because", 7),
    "--run-dir old --resume never": ("old, which already contains a run (it has a recipe.yaml)", 7),
    "--resume file": ("--resume is file: that is a file", 11),
    "--resume nowhere": ("--resume is nowhere: no such folder", 11),
    "--recipe imagefolder": ("data.path is not given, and the recipe has no data without it: give data.path=PATH", 6),
    "--recipe imagefolder data.path=nowhere": ("data.path is 'nowhere': no such file or folder, or you may not read it", 6),
    "--recipe lm_tiny data.path=$NONE/tokens": ("data.path is '$NONE/tokens': no such file or folder", 6),
    "train.init_from=nowhere": ("train.init_from is nowhere: there is no such file or folder", 11),
    "--init-from here.pth": ("recipe values are given as key=value: train.init_from=here.pth", 2),
    "--trackers tensorboard,wandbb": ("--trackers has 'wandbb': unknown tracker; did you mean wandb", 9),
    "--trackers aim": ("--trackers has aim, which is not installed here: pip install aim", 9),
    "--trackers": ("--trackers: expected one argument", 2),
    "--hang-timeout 1e3": ("'1e3': expected a whole number, 0 or more", 2),
    "--hang-timeout -5": ("'-5': expected a whole number, 0 or more", 2),
    "--lr 0.1": ("--lr: unknown option; recipe values are given as key=value: optim.lr=0.1", 2),
    "--recip digits": ("did you mean --recipe?", 2),
    "--dryrun": ("did you mean --dry-run?", 2),
    "--explain=yes": ("--explain: ignored explicit argument 'yes'", 2),
    "0.1": ("'0.1' (command line): expected key=value", 3),
}


@pytest.mark.parametrize(("words", "expected"), OPTIONS.items(), ids=OPTIONS)
def test_options(words: str, expected: tuple[str, int], refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    put(tmp_path, "folder", None)
    put(tmp_path, "old/recipe.yaml", "seed: 0\n")
    os.mkfifo("fifo")
    refused([*DRY, *words.split()], *expected)


HOSTS = "SAMERUN_HOSTS=a,b "
ENVIRONMENTS: dict[str, str] = {
    "SAMERUN_HOSTS=a,,b": "SAMERUN_HOSTS is 'a,,b': it must be names of different hosts",
    "SAMERUN_HOSTS=a,a": "SAMERUN_HOSTS is 'a,a': it must be names of different hosts",
    "SAMERUN_HOSTS=": "SAMERUN_HOSTS is '': it must be names of different hosts",
    "SAMERUN_HOSTS=a;b,c": "SAMERUN_HOSTS is 'a;b,c': it must be names of different hosts",
    "SAMERUN_HOSTS=127.0.0.1,b": "head_address is '127.0.0.1' (SAMERUN_HOSTS): on each of the 2 nodes this "
    "means the node itself",
    f"{HOSTS}SAMERUN_STARTER=rsh": "SAMERUN_STARTER is 'rsh': it must be one of",
    f"{HOSTS}SAMERUN_PORT=x": "SAMERUN_PORT is 'x': it must be a whole number",
    f"{HOSTS}SAMERUN_NODE_RANK=5": "node_rank is 5 (SAMERUN_NODE_RANK): with num_nodes is 2 (SAMERUN_HOSTS) it must be 0 to 1",
    f"{HOSTS}SAMERUN_NODE_RANK=x": "SAMERUN_NODE_RANK is 'x': it must be a whole number",
    f"{HOSTS}SAMERUN_THREADS=0": "threads_per_process is 0 (SAMERUN_THREADS): it must be at least 1",
    "SAMERUN_END_TIME=soon": "SAMERUN_END_TIME",
    "RANK=0": "the environment has RANK=0",
    "OMPI_COMM_WORLD_SIZE=4": "mpirun (Open MPI) started 4 processes",
    "PMI_SIZE=3": "mpiexec (PMI) started 3 processes",
    "PBS_JOBID=1 PBS_NODEFILE=nowhere": "PBS_JOBID is 1, but PBS_NODEFILE, nowhere, cannot be read",
    "SLURM_JOB_ID=5": "SLURM_JOB_ID is set, but SLURM_JOB_NUM_NODES is not",
}


@pytest.mark.parametrize(("variables", "sentence"), ENVIRONMENTS.items(), ids=ENVIRONMENTS)
def test_environments(variables: str, sentence: str, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    refused(DRY, sentence, 5)


@pytest.mark.parametrize(
    ("words", "sentence", "code"),
    [
        ("--processes 2", "--processes is 2, which is for one machine", 5),
        ("--nodes 3", "--nodes is 3, and num_nodes is 2 (SAMERUN_HOSTS): give 1 to 2", 5),
        ("--num_processes 3", "it must be a multiple of 2", 5),
        ("--preset cpu", "preset cpu starts 1 process, and this run has 2", 4),
    ],
)
def test_options_across_hosts(words: str, sentence: str, code: int, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMERUN_HOSTS", "a,b")
    refused([*DRY, *words.split()], sentence, code)


@pytest.mark.parametrize(
    ("module", "words", "sentence", "code"),
    [
        ("launch.cli", "launch --lr 0.1", "samerun: UsageError: --lr: unknown option", 2),
        ("app.train", "seed=1 seed=2", "RecipeError: seed is given twice (command line: 1 and 2)", 3),
    ],
)
def test_a_process_of_its_own(module: str, words: str, sentence: str, code: int) -> None:
    finished = Started([sys.executable, "-m", module, *words.split()]).wait()
    assert (finished.returncode, len(finished.output.splitlines())) == (code, 1), finished.output
    assert sentence in finished.output
