"""Programs that take turns on one machine: each is a process (`benchmarks.case`), and only one of them runs at a time.

Figures of a program are medians (quartiles) of its windows. Its speed compared with another program's is that of the same
rounds, so that whatever else the machine does meets both. A program that fails leaves the contest, and the others continue.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.errors import TrainingError
from app.recipe import recipe_file
from launch.run_module import program

HAND, SAMERUN = "hand-written, fused", "samerun"
"""Names of programs of `benchmarks.case`: the reference, a loop over tensors in memory with the fused optimizer; and ours."""
CONSTANT = (
    "train.ema_decay=null", "train.evaluate_every_epochs=0", "train.evaluate_every_steps=null", "optim.name=adamw",
    "optim.schedule=constant", "optim.lr=0.001", "optim.weight_decay=0", "checkpoint.every_minutes=null", "log.every_steps=50",
)  # fmt: skip
"""Recipe values of every contest: what the programs do not have in common is switched off."""
IMAGES = (
    *CONSTANT, "optim.warmup_epochs=null", "optim.clip_norm=null", "augment.label_smoothing=0", "augment.crop_padding=0",
    "augment.flip=0", "data.source=arrays", "data.validation_split=null", "train.validation_fraction=null",
)  # fmt: skip
TEXT = (*CONSTANT, "optim.warmup_steps=null", "optim.schedule_steps=null", "optim.clip_norm=1.0")
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "PMI", "OMPI_", "PBS_")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A program that takes part."""

    task: Mapping[str, Any]
    """Input of `benchmarks.case`."""
    variables: Mapping[str, str]
    """Environment variables, as a preset sets them."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Entries of the same contest that it is compared with, and the goal for its share of their speed, such as `>= 0.98`."""


@dataclass(frozen=True)
class Found:
    """Microseconds per step by program, one for each round, and why other programs failed."""

    wall_us: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    """CPU time of the process and of its workers."""
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Rounds that were measured."""
        return max(map(len, self.wall_us.values()), default=0)


@dataclass(frozen=True)
class Contestant:
    """A program that was started."""

    name: str
    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path

    def run(self, steps: int) -> dict[str, float]:
        """Return what a window took: `wall_s`, `cpu_s` of the process and its workers, bytes `allocated` and `reserved`.

        Raises TrainingError if the program fails.
        """
        try:
            self.connection.send(steps)
        except OSError as error:  # it ended while the others had their turns
            raise self._failure() from error
        return self.answer()

    def answer(self) -> dict[str, float]:
        """Wait for the end of the first step, or of a window. Raises TrainingError, with its last lines, if it fails."""
        try:
            answer: dict[str, float] = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._failure() from error
        return answer

    def _failure(self) -> TrainingError:
        lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
        return TrainingError(f"{self.name} failed before all of it was measured: {lines or 'it printed nothing'}")


def environment(threads: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what would place a program in a run of several processes, and with these."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(_UNSET)}
    return {**plain, "OMP_NUM_THREADS": str(threads), **variables}


@contextmanager
def start(name: str, entry: Entry, *, threads: int, log: Path) -> Iterator[Contestant]:
    """Start a program, and end it after the block."""
    ours, theirs = Pipe()
    command = [*program("benchmarks.case"), str(theirs.fileno()), str(threads), json.dumps(dict(entry.task))]
    variables = environment(threads, entry.variables)
    pipes = {"stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
    with ours, log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, **pipes)  # type: ignore[call-overload]
        theirs.close()
        try:
            yield Contestant(name, process, ours, log)
        finally:
            process.kill()
            process.wait()


def compete(entries: Mapping[str, Entry], *, steps: int, rounds: int, threads: int, folder: Path, end_s: float) -> Found:
    """Let programs take turns, for so many rounds of so many steps or until `end_s` of the monotonic clock, at least one round.

    Each writes its output to `folder`. Each round goes to stderr as well, in case the program is ended before its table.
    """
    found = Found()
    with ExitStack() as stack:
        running: dict[str, Contestant] = {}
        for number, (name, entry) in enumerate(entries.items()):
            running[name] = stack.enter_context(start(name, entry, threads=threads, log=folder / f"{number}.log"))

        def each(act: Callable[[Contestant], Any], names: Iterable[str]) -> dict[str, Any]:
            done = {}
            for name in names:
                try:
                    done[name] = act(running[name])
                except TrainingError as error:
                    found.failures[name] = str(error)
                    del running[name]
            return done

        each(Contestant.answer, list(running))
        each(lambda contestant: contestant.run(steps), list(running))
        for number in range(rounds):
            if number and time.monotonic() > end_s:
                break
            measured = each(lambda contestant: contestant.run(steps), sorted(running, reverse=number % 2 == 1))
            for name, window in measured.items():
                found.wall_us.setdefault(name, []).append(1e6 * window["wall_s"] / steps)
                found.cpu_us.setdefault(name, []).append(1e6 * window["cpu_s"] / steps)
            sys.stderr.write(f"round {number + 1}, windows of {steps} steps: {measured}\n")
    return found


def spread(values: Sequence[float], form: str) -> str:
    """Return median and quartiles, each in this form."""
    low, median, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def shares(us: Mapping[str, Sequence[float]], name: str, beside: str) -> list[float]:
    """Return the speed of a program as a share of another one's, for each round that both were in."""
    return [other / own for own, other in zip(us.get(name, ()), us.get(beside, ()), strict=False)]


def say_rates(entries: Mapping[str, Entry], found: Found, *, rows: str, units: int, on_cpu: bool, about: str = "") -> int:
    """Print a line for each program: units per second, MFU, its speed compared with others; return 0 if none failed.

    A step has `units` units, which are the elements of the batch's field `rows`. MFU is the arithmetic of the model's products
    over what the maker claims that the device can do (`app/metrics/clock.py`), where that is known.
    """
    import torch

    from app.metrics import clock
    from app.planning import tracing
    from app.task import Form

    task = next(iter(entries.values())).task
    made = tracing.build_blueprint(recipe_file.load(task["recipe"], task["overrides"]).recipe)
    example = made.task.example(made.facts, Form())
    flop_per_unit = clock.training_flops(made.model, lambda called: made.task.loss(called, example)) / example[rows].numel()
    peak = clock.peak_per_s(torch.device("cpu" if on_cpu else "cuda"), mixed_precision="bf16")
    for name, entry in entries.items():
        if name in found.failures:
            say(failed_line(about + name, found.failures[name], columns=5))
        if wall_us := found.wall_us.get(name):
            rates = [1e6 * units / each for each in wall_us]
            mfu = "unknown" if peak is None else f"{statistics.median(rates) * flop_per_unit / peak:.1%}"
            compared = {other: share for other in entry.beside if (share := shares(found.wall_us, name, other))}
            speeds = "; ".join(f"{spread(share, '.3f')} of {other}" for other, share in compared.items())
            verdicts = [verdict(entry.beside[other], statistics.median(share)) for other, share in compared.items()]
            say(f"| {about}{name} | {spread(rates, ',.0f')} | {mfu} | {speeds} | {'; '.join(filter(None, verdicts))} |")
    return int(bool(found.failures))


def verdict(goal: str, value: float) -> str:
    """Return the goal, if any, and whether a figure meets it: `>= 0.98: met`."""
    if not goal:
        return ""
    sign, limit = goal.split()
    met = value >= float(limit) if sign == ">=" else value <= float(limit)
    return f"{goal}: {'met' if met else 'NOT MET'}"


def failed_line(name: str, reason: str, *, columns: int) -> str:
    """Return the line of a table for a program that failed; the whole reason goes to stderr."""
    sys.stderr.write(f"{name}: {reason}\n")
    last = reason.splitlines()[-1].replace("|", "\\|")
    return f"| {name} | FAILED: {last} |{' |' * (columns - 2)}"


def say(text: str) -> None:
    """Print it immediately: what comes next might be killed."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def versions() -> str:
    """Return the versions of the packages that take part and are installed."""
    packages = ("torch", "torchvision", "accelerate", "deepspeed", "lightning", "transformers", "timm", "safetensors")
    return ", ".join(f"{name} {version(name)}" for name in packages if importlib.util.find_spec(name))
