"""`samerun parity --quick`: whether a task keeps the rules by which a run is the same on any topology, in under a minute.

Three steps of small global batches are taken on one process, on one with accumulation, and on two, by real processes. What
each has fetched, made ready, lost and found as gradient is compared, in this order, so that the first rule that is broken is
named, and what to change.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app import tasks
from app.errors import RecipeError
from app.place import cores
from app.place.inherited import own_environment
from app.place.topology import Topology
from app.recipe import recipe_file
from app.recipe.schema import Recipe
from app.record import passed
from launch import preset
from launch.node_command import accelerate_argv
from launch.schedulers.local import count_accelerators

STEPS = 3
_MOST_SAMPLES = 32
"""Samples of a global batch, if neighbours allow it: rules do not depend on it, but time does."""
_OWN_KEYS = ("train.steps", "train.epochs", "train.max_micro_batch", "train.global_batch_size")
_TAIL_LINES = 20
_MOST_S = 600.0
"""Longer than opening any data and three steps take; a process that hangs is killed then."""
_SENTENCE = re.compile(r"(\[rank .*?\] )?\w+Error: .+")
"""The last line of a process that ended with one of our errors."""


@dataclass(frozen=True)
class Case:
    """A topology."""

    name: str
    processes: int
    accumulation: int


CASES = (Case("1 process", 1, 1), Case("1 process with accumulation 2", 1, 2), Case("2 processes", 2, 1))


def main(name_or_path: str, overrides: Sequence[str]) -> int:
    """Examine a recipe's task and print what is to be said of it; 0 only if it keeps the rules. Raises RecipeError."""
    said, keeps_them = _examined(name_or_path, overrides)
    sys.stdout.write(f"{said}\n")
    return 0 if keeps_them else 1


def _examined(name_or_path: str, overrides: Sequence[str]) -> tuple[str, bool]:
    given = [key for word in overrides if (key := word.partition("=")[0].strip()) in _OWN_KEYS]
    if given:
        raise RecipeError(*(f"{key} (command line): --quick sets it" for key in given))
    recipe = recipe_file.load(name_or_path, [*overrides, f"train.steps={STEPS}"]).recipe
    size = batch_of(recipe)
    own = [f"train.steps={STEPS}", f"train.global_batch_size={size}"]
    with tempfile.TemporaryDirectory(prefix="samerun-quick-") as folder:
        failures = _run(Path(folder), name_or_path, [*overrides, *own], size)
        from app.tools import comparison  # only now torch: the processes need the cores first
        from app.tools import seen as records

        seen = {case.name: records.read(Path(folder, str(number))) for number, case in enumerate(CASES)}
    found = comparison.broken(seen)
    if found:
        return f"rule broken ({found[0]}): {found[1]}", False
    if failures:
        said = {error: name for name, error in reversed(failures.items())}
        return "\n".join(f"on {name}: {error}" for error, name in said.items()), False
    if recipe.task not in tasks.SHIPPED:
        passed.remember(next(iter(seen.values())).sources)
    topologies = ", ".join(case.name for case in CASES)
    return f"{STEPS} steps of {size} samples on {topologies}:\n{comparison.table(seen)}", True


def batch_of(recipe: Recipe) -> int:
    """Return the size of the global batch. Raises RecipeError if the recipe's cannot be halved."""
    size, neighbours = recipe.train.global_batch_size, int(recipe.sections.neighbours)
    small = 2 * neighbours * max(1, _MOST_SAMPLES // 2 // neighbours)
    if size >= small:
        return small
    if size % (2 * neighbours):
        raise RecipeError(f"train.global_batch_size is {size}: --quick needs a multiple of {2 * neighbours}, to compare halves")
    return size


def _run(folder: Path, name_or_path: str, overrides: Sequence[str], size: int) -> dict[str, str]:
    """Run every case in a folder of its own, as many at once as there are cores for; return how those failed that did."""
    of_machine = cores.of_this_process(1)
    *alone, together = range(len(CASES))
    rounds = (
        [[*alone, together]] if of_machine > 3 else [alone, [together]] if of_machine > 1 else [[case] for case in range(3)]
    )

    def start(number: int) -> str:
        return _failure(folder / str(number), CASES[number], name_or_path, overrides, size)

    found: dict[str, str] = {}
    for numbers in rounds:
        with ThreadPoolExecutor(len(numbers)) as pool:
            for number, failure in zip(numbers, pool.map(start, numbers), strict=True):
                if failure:
                    found[CASES[number].name] = failure
    return found


def _failure(folder: Path, case: Case, name_or_path: str, overrides: Sequence[str], size: int) -> str:
    """Run a case, and return why it failed; nothing if it did not."""
    folder.mkdir()
    environment = own_environment()
    on_gpus = count_accelerators(environment)[0] > 1
    used = preset.load("multi_gpu" if case.processes > 1 else "single_gpu" if on_gpus else "cpu")
    topology = Topology(processes_per_node=case.processes, threads_per_process=1)
    words = ["--recipe", name_or_path, "--out", str(folder), *overrides]
    words.append(f"train.max_micro_batch={size // case.processes // case.accumulation}")
    command = accelerate_argv(topology, used, words, module="app.tools.rules")
    if not on_gpus:  # two processes cannot share one
        command = ["env", "CUDA_VISIBLE_DEVICES=", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as running:
        try:
            output, _ = running.communicate(timeout=_MOST_S)
        except subprocess.TimeoutExpired:
            running.terminate()  # its launcher ends the others
            output, _ = running.communicate()
    if running.returncode == 0:
        return ""
    lines = output.splitlines()
    said = next((line for line in lines if _SENTENCE.match(line)), "")
    if said and "Traceback" not in output:
        return said
    return "\n".join([f"exit code {running.returncode}, after these last lines:", *lines[-_TAIL_LINES:]])
