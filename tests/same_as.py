"""Whether this tree computes what another commit computes: both train the same cases side by side on this machine.

    make same-as BASE=main                        digits under every preset, a language model, users' tasks, dry runs
    make same-as BASE=main ARGS="--only fsdp2"    those whose name holds this word
    make same-as BASE=main ARGS=--recipes         every shipped recipe on generated files

Losses, gradient norms, learning rates, sample numbers (the ledger's digests) and final weights must be equal bit for bit;
evaluations to 1e-12, which leaves the order of additions free. The exit code is 1 if anything differs or does not run.

This is for changes that shall change no result. It uses what users use, so that both trees may look different inside: the
presets, `-m app.train`, `samerun export`, recipe keys, and the files of run folders. Users' tasks are those of each tree's own
examples/, in the spelling of that tree. Dry runs are compared by what they print: the commands and job scripts. The base is
checked out into a temporary folder and runs in the same Python environment; a rank that imported code of another tree fails.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from generated import keys_of
from outcomes import Facts, differences, facts, tensors
from processes import (
    ALONE,
    ONE_THREAD,
    REPOSITORY,
    SCRIPTS,
    Warm,
    captured,
    clean_environment,
    free_port,
    last_of_each,
    python_path,
    read,
)

ENVIRONMENTS = Path(__file__).parent / "environments"
STEPS = 10
DIGITS = ("--recipe", "digits", f"train.steps={STEPS}", "train.global_batch_size=256")  # two epochs
OFTEN = ("log.every_steps=1", "checkpoint.every_minutes=null", "train.validation_fraction=null")
AUGMENTED = ("augment.crop_padding=1", "augment.flip=0.5", "augment.randaugment_ops=2", "augment.erase=0.5")
MIXED = ("augment.mixup=0.4", "augment.cutmix=1.0")
AVERAGED = ("train.ema_decay=0.9", "checkpoint.every_steps=4")
"""With checkpoints, which hold the weights that are not averaged as well."""
SGD = ("optim.name=sgd", "optim.nesterov=true", "optim.lr=0.1", "optim.clip_norm=null", "augment.label_smoothing=0.1")
BATCH_NORM = ("model.norm=batch", "model.activation=relu", "model.pooling=max")
ALL = (*AUGMENTED, *MIXED, *AVERAGED, "train.max_micro_batch=64", "augment.label_smoothing=0.1")
LM = ("--recipe", "lm_tiny", "train.steps=8", "train.global_batch_size=8", "data.sequence_length=64", "optim.warmup_steps=2",
      "train.evaluate_every_steps=4")  # fmt: skip
GPT2 = ("model.architecture=gpt2", "model.dropout=0.1")
EXAMPLES = {"regression": 20, "segmentation": 4, "multilabel": 4, "text": 4}
"""Tasks of users, and how many steps of each: with and without scores, counts, random draws and tables of their own."""
SLURM_JOBS = ("2node-2task-gres2-batch", "1node-gpus1-batch", "cpucluster-2node-batch")
PBS_JOBS = ("select-2x2", "select-2x2-ngpus2", "nodes-2-ppn2")
JOB = ("--nodes", "2", "--time", "01:30:00", "--preset", "fsdp2", "--recipe", "digits", "optim.lr=0.002")
SUBMITTED = {
    "a job": JOB,
    "a job on shared nodes": ("--processes-per-node", "2", *JOB),
    "a sweep": ("--array", "optim.clip_norm=0.5,1;seed=0,1", *JOB),
}
SHARDED = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload", "fsdp2", "hsdp")
EVALUATION_TOLERANCE = 1e-12
"""Relative to the larger of 1 and the number."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that both trees do."""

    name: str
    preset: str = "cpu"
    processes: int = 1
    options: tuple[str, ...] = ()
    """Of `accelerate launch`."""
    keys: tuple[str, ...] = ()
    base: tuple[str, ...] = (*DIGITS, *OFTEN)
    is_resumed: bool = False
    """Whether a second run goes on from the first one's oldest checkpoint; that one is then compared."""


def cases_of_digits() -> list[Case]:
    """One thing at a time in one process; all of them together under every preset; a few of each kind of preset."""
    alone = {key.partition("=")[0]: (key,) for key in (*AUGMENTED, *MIXED)} | {
        "as shipped": (),
        "resized crops": ("augment.resized_crop_min_area=0.3", "data.image_size=8"),
        "mixup and cutmix": MIXED,
        "averages": AVERAGED,
        "accumulation": ("train.max_micro_batch=32",),
        "sgd": SGD,
        "batch norm": BATCH_NORM,
        "float64": ("train.dtype=float64",),
        "a line every 4 steps": ("log.every_steps=4",),
        "step schedule": ("optim.schedule=step", "optim.decay_epochs=1", "optim.warmup_epochs=null", "optim.warmup_steps=2"),
    }
    presets = [*(("multi_gpu", "multi_node")), *SHARDED]
    several = [(preset, processes) for preset in presets for processes in (1, 2)]
    everywhere = [(preset, 1) for preset in ALONE] + several
    bf16 = ("--mixed_precision", "bf16")
    return [
        *(Case(name=name, keys=keys) for name, keys in alone.items()),
        *(Case(name="all", preset=preset, processes=processes, keys=ALL) for preset, processes in everywhere),
        *(Case(name="sgd", preset=preset, processes=2, keys=SGD) for preset in ("multi_gpu", "deepspeed_zero2", "fsdp2")),
        *(Case(name="bf16", preset=preset, options=bf16) for preset in ("cpu", "deepspeed_zero2", "fsdp2")),
        Case(name="batch norm, bf16", preset="fsdp2", options=bf16, keys=BATCH_NORM),
        *(
            Case(name="resumed", preset=preset, processes=processes, keys=ALL, is_resumed=True)
            for preset, processes in (("cpu", 1), ("deepspeed_zero3", 2), ("fsdp2", 2))
        ),
    ]  # fmt: skip


def cases_of_recipes(folder: Path) -> list[Case]:
    """Every shipped recipe, three small steps over two epochs, in one process and in two."""
    names = sorted(path.stem for path in (REPOSITORY / "app").rglob("shipped/*.yaml"))
    assert len(names) >= 6, names
    data = {name: keys_of(name, folder) for name in names}
    few = ("train.steps=3", "train.global_batch_size=8", *OFTEN)
    return [
        Case(name=name, preset=preset, processes=processes, keys=data[name], base=("--recipe", name, *few))
        for name in names
        for preset, processes in (("cpu", 1), ("multi_gpu", 2))
    ]


def cases_of_text() -> list[Case]:
    """A language model: each kind of preset, and what only language models have."""
    text = functools.partial(Case, base=(*LM, *OFTEN))
    presets = ("multi_gpu", "deepspeed_zero2", "deepspeed_zero3", "fsdp2", "tensor_parallel", "context_parallel")
    return [
        text(name="lm_tiny"),
        *(text(name="lm_tiny", preset=preset, processes=2) for preset in presets),
        text(name="lm_tiny, hsdp of 2 x 2", preset="hsdp", processes=4),
        *(text(name="lm_tiny, gpt2", preset=preset, processes=n, keys=GPT2) for preset, n in (("cpu", 1), ("fsdp2", 2))),
        text(name="lm_tiny, documents", keys=("data.document_masks=true", "model.head=chunked")),
        text(name="lm_tiny, lora", keys=("model.lora_rank=4", "train.max_micro_batch=4")),
        text(name="lm_tiny, resumed", preset="fsdp2", processes=2, keys=("checkpoint.every_steps=4",), is_resumed=True),
    ]


def cases_of_tasks() -> list[Case]:
    """Users' tasks: the examples of each tree."""
    sharded = ("fsdp2", "deepspeed_zero2")
    return [
        Case(
            name=f"examples/{name}",
            preset=preset,
            processes=1 if preset == "cpu" else 2,
            keys=("train.max_micro_batch=8",) if preset == "multi_gpu" else (),
            base=("--recipe", f"examples/{name}.yaml", f"train.steps={steps}", "train.global_batch_size=32", *OFTEN),
        )
        for name, steps in EXAMPLES.items()
        for preset in ("cpu", "multi_gpu", *(sharded if name == "segmentation" else ()))
    ]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A command of both trees that prints what it would do."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    preset = "dry run"
    processes = 0


def dry_runs() -> list[DryRun]:
    """`samerun launch` in captured jobs of Slurm and PBS, and the scripts of `samerun submit`."""
    launch = ("launch", "--dry-run", "--preset", "fsdp2", "--recipe", "digits", "optim.lr=0.002")
    runs = [DryRun(name=f"slurm {name}", words=launch, environment=job_environment(f"slurm/{name}")) for name in SLURM_JOBS]
    for name in PBS_JOBS:
        there = {"PBS_NODEFILE": str(ENVIRONMENTS / f"pbs/nodefile-{name}.txt")}
        runs.append(DryRun(name=f"pbs {name}", words=launch, environment={**job_environment(f"pbs/{name}-batch"), **there}))
    return runs + [
        DryRun(name=f"{scheduler} {name}", words=("submit", "--scheduler", scheduler, "--dry-run", *words))
        for scheduler in ("slurm", "pbs")
        for name, words in SUBMITTED.items()
    ]


def job_environment(name: str) -> dict[str, str]:
    """What a scheduler gave a real job as its environment."""
    own = ("SLURM", "PBS", "CUDA", "OMP_", "NCPUS")
    return {name: value for name, value in captured(name).items() if name.startswith(own)}


def every_case() -> list[Case | DryRun]:
    """All cases but those of `--recipes`."""
    return [*cases_of_digits(), *cases_of_text(), *cases_of_tasks(), *dry_runs()]


@dataclass(frozen=True)
class Side:
    """One of the two trees, with a process that starts its ranks and a folder for what they write."""

    root: Path
    folder: Path
    warm: Warm
    _environments: dict[tuple[str, ...], list[dict[str, str]]] = field(default_factory=dict)

    def run(self, case: Case | DryRun, number: int) -> Facts:
        """Train the case, and return what came out. Raises AssertionError if it fails."""
        if isinstance(case, DryRun):
            return self._printed(case)
        run_dir = self.folder / f"{number}"
        self._train(case, run_dir)
        if case.is_resumed:
            oldest = min((run_dir / "checkpoints").glob("step*"))
            run_dir = self.folder / f"{number}-resumed"
            self._train(case, run_dir, "--resume", str(oldest))
        weights = {"weights": run_dir / "model.safetensors"}
        if "train.ema_decay" in " ".join(case.keys):
            raw = weights["weights not averaged"] = self.folder / f"{number}.safetensors"
            command = ("launch.cli", "export", str(run_dir), "--weights", "raw", "--out", str(raw))
            self.warm.start(command, [self._environment()]).wait().check()
        return facts(run_dir) | {name: tensors(path) for name, path in weights.items()}

    def _train(self, case: Case, run_dir: Path, *more: str) -> None:
        # Ranks that torchrun started met in its store, which went with it.
        meeting = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        ranks = [{**variables, **(meeting if "RANK" in variables else {})} for variables in self._launched(case)]
        words = [str(self.root / word) if word.startswith("examples/") else word for word in (*case.base, *case.keys)]
        command = ("app.train", "--trackers", "none", "--run-dir", str(run_dir), *more, *last_of_each(words))
        self.warm.start(command, ranks).wait().check()

    def _printed(self, case: DryRun) -> Facts:
        """What a dry run prints, without the names of this tree and the time of day."""
        command = [sys.executable, "-m", "launch.cli", *case.words]
        environment = {**self._environment(), **case.environment}
        finished = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        text = finished.stdout
        for own, name in ((sys.executable, "PYTHON"), (str(self.root), "ROOT"), (str(self.folder), "FOLDER")):
            text = text.replace(own, name)
        lines = re.sub(r"\d{8}-\d{6}", "TIME", text).splitlines()
        return {"commands": {f"line {number}": line for number, line in enumerate(lines)}}

    def _launched(self, case: Case) -> list[dict[str, str]]:
        """What `accelerate launch` under this tree's preset gives each rank as its environment."""
        number = () if case.preset in ALONE else ("--num_processes", str(case.processes))
        key = (case.preset, *number, *case.options)
        if key not in self._environments:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            preset = str(self.root / "accelerate_configs" / f"{case.preset}.yaml")
            options = ("--config_file", preset, *number, *case.options, "--main_process_port", str(free_port()))
            command = ("accelerate.commands.launch", *options, str(SCRIPTS / "environment.py"), str(folder))
            self.warm.start(command, [self._environment()]).wait().check()
            self._environments[key] = [read(folder / f"{rank}.json") for rank in range(case.processes)]
        return self._environments[key]

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": python_path(root=self.root), "SAMERUN_CACHE": str(self.folder / "cache")}
        return {**clean_environment(), **ONE_THREAD, **own}


COLUMNS = {"losses": 0.0, "rates": 0.0, "samples": 0.0, "weights": 0.0, "weights not averaged": 0.0,
           "evaluations": EVALUATION_TOLERANCE, "commands": 0.0}  # fmt: skip
"""What is compared, and how far its numbers may be apart."""


def row(case: Case | DryRun, results: Sequence[Future[Facts]]) -> tuple[list[str], list[str]]:
    """The cells of a case in the table, and what is to be said below it: nothing if all is equal."""
    name = [case.name, case.preset, str(case.processes)]
    errors = [(side, it.exception()) for side, it in zip(("base", "here"), results, strict=True)]
    if failed := [f"{side} failed: {error}" for side, error in errors if error]:
        return [*name, *("failed" for _ in COLUMNS)], failed
    base, head = (it.result() for it in results)
    cells, said = [], []
    for column, tolerance in COLUMNS.items():
        found = differences(base.get(column, {}), head.get(column, {}), tolerance=tolerance)
        total = len(base.get(column, {}))
        cells.append(f"{len(found)} of {total}" if found else "equal" if total else "")
        said += [f"{column}: {line}" for line in found[:2]]
    return [*name, *cells], said


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A commit's tree in a folder of its own, for as long as the block runs."""
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def compare(sides: Sequence[Side], cases: Sequence[Case | DryRun]) -> int:
    """Run all cases on both sides, print a line for each, and return the number of those that differ."""
    widths = [max(len(case.name) for case in cases), 23, 9, *(max(len(column), 10) for column in COLUMNS)]
    said_below: list[str] = []

    def show(cells: Sequence[str]) -> None:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    show(["case", "preset", "processes", *COLUMNS])
    differing = 0
    pools = [ThreadPoolExecutor(1) for _ in sides]
    results = [[pool.submit(side.run, case, number) for pool, side in zip(pools, sides, strict=True)]
               for number, case in enumerate(cases)]  # fmt: skip
    try:
        for case, both in zip(cases, results, strict=True):
            cells, said = row(case, both)
            show(cells)
            differing += bool(said)
            said_below += [f"{case.name}, {case.preset}, {case.processes}: {line}" for line in said]
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
    print(*said_below, sep="\n")
    return differing


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare what this tree computes with what another commit computes.")
    parser.add_argument("base", nargs="?", default="HEAD", help="commit (default: HEAD, for what is not committed)")
    parser.add_argument("--only", default="", help="word that the name of a case or its preset holds")
    parser.add_argument("--recipes", action="store_true", help="every shipped recipe on generated files, instead of digits")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the worktree and the ranks go as well
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="samerun-same-as-") as name, checked_out(options.base, Path(name, "tree")) as tree:
        folder = Path(name)
        cases = every_case() if not options.recipes else cases_of_recipes(folder / "data")
        cases = [case for case in cases if options.only in f"{case.name} {case.preset}"]
        if not cases:
            parser.error(f"no case holds {options.only!r}, so nothing was compared")
        changed = len(git("status", "--porcelain").splitlines())
        print(f"base: {git('log', '-1', '--format=%h %s', options.base)}")
        print(f"here: {git('log', '-1', '--format=%h %s')}{f', and {changed} changed files' if changed else ''}")
        sides: list[Side] = []
        try:
            for root in (tree, REPOSITORY):
                sides.append(Side(root, Path(tempfile.mkdtemp(dir=folder)), Warm(root)))
            differing = compare(sides, cases)
        finally:
            for side in sides:
                side.warm.close()
    print(f"{len(cases)} cases in {time.monotonic() - start_s:.0f} s: {f'{differing} differ' if differing else 'all equal'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
