"""`python -m benchmarks`: how fast the training loop is, beside a hand-written one and the peers that are installed.

Every program does the same work in processes of its own, and they take turns in rounds, so that whatever else the machine does
meets all of them. What is measured is CPU time a step (all threads of a process, and its workers), after a warm-up; the
hand-written loop over tensors in memory with the fused AdamW is the limit, and ratios are to its window of the same round.

What programs do not have in common is left out: schedule, clipping, weight decay, label smoothing, averages of the weights,
logging to trackers. Samerun keeps what it has of its own: the ConvNet's images in channels_last order, memory that is not given
back, metrics and ledger.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from app.errors import RecipeError, RunFolderError, SamerunError, TrainingError
from app.options.values import above_zero, names, numbers, positive
from app.place.cores import machine
from app.recipe import recipe_file
from benchmarks import contestants, whole_runs
from benchmarks.figures import AUGMENTED, LINEAR, REFERENCE, Group, Result, Turn, results, table, versions, write

_HAND_WRITTEN = (REFERENCE, "hand-written")
_WARM_STEPS = 10
"""Steps before anything is measured; from the same number of the reference's the length of a window is chosen."""
_WINDOW_STEPS = 50
"""Windows are multiples of this: the steps between two logs of Samerun."""


@dataclass(frozen=True)
class Entry:
    """A program as it takes part."""

    name: str
    """As the tables have it."""
    program: str
    augmented: bool = False
    overrides: tuple[str, ...] = ()
    """Recipe values of its own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, as a preset sets them."""


_SWITCHES = {
    "channels_first": Entry("samerun, channels_first", "samerun", overrides=("train.channels_last=false",)),
    "bf16": Entry("samerun, bf16", "samerun", variables={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "compile": Entry("samerun, compiled", "samerun", variables={"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
}
"""What a recipe or a preset can be asked for, to train faster."""


def main(argv: list[str]) -> int:
    """Measure, show the tables, write bench.csv and bench.json, and return 0."""
    options = _parser().parse_intermixed_args(argv)
    options.argv = argv
    console = Console() if sys.stdout.isatty() else Console(width=144)
    folder = Path(options.out or f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"the folder {folder} (--out) cannot be made: {error.strerror}. Choose another.") from error
    entries = _entries(options, console)
    rows: list[Turn] = []
    found: list[Result] = []
    failed: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="samerun-bench-") as place:
        work, batch = _common(options, Path(place))
        for group in _groups(options):
            # Several processes have a hand-written loop of their own; a matrix trains faster than any peer's feed goes.
            only_ours = group.processes > 1 or group.model == LINEAR
            mine = [entry for entry in entries if _has_no_peer(entry)] if only_ours else entries
            measured = _compete(group, mine, work, options, console)
            failed |= {entry.name for entry in mine} - {row.program for row in measured}
            rows += measured
            found = results(rows)
            console.print(table(group, [result for result in found if result.group == group], batch))
            write(folder, _about(options), rows, found)
        runs = _whole_runs([entry for entry in entries if entry.name not in failed], work, options, console)
    write(folder, {**_about(options), "whole_runs": runs}, rows, found)
    console.print(f"{_about(options)['machine']}\nwritten to {folder}", markup=False, highlight=False)
    return 0


def _entries(options: argparse.Namespace, console: Console) -> list[Entry]:
    """Return what takes part, and say which peers do not."""
    from benchmarks.peers import PEERS

    entries = [Entry(name, name) for name in (*_HAND_WRITTEN, "samerun")]
    peers = {"all": list(PEERS), "none": []}.get(options.peers, options.peers.split(","))
    for name in peers:
        if name not in PEERS:
            raise RecipeError(f"--peers has {name!r}: choose from {', '.join(PEERS)}; or all, or none.")
        package = PEERS[name][1]
        if importlib.util.find_spec(package) is None:
            console.print(f"{name}: not installed (pip install 'samerun[peers]')", markup=False)
        else:
            entries.append(Entry(name, name))
    if options.augmented:
        entries += [Entry(name + AUGMENTED, name, augmented=True) for name in ("samerun", "accelerate")[: 1 + bool(peers)]]
    for switch in options.switches:
        if switch not in _SWITCHES:
            raise RecipeError(f"--switches has {switch!r}: choose from {', '.join(_SWITCHES)}.")
        entries.append(_SWITCHES[switch])
    return entries


def _has_no_peer(entry: Entry) -> bool:
    return entry.name in (*_HAND_WRITTEN, "samerun")


def _groups(options: argparse.Namespace) -> list[Group]:
    return [
        Group(model, threads, processes)
        for model in options.models
        for threads in options.threads
        for processes in options.processes
        if processes == 1 or threads == min(options.threads)
    ]


def _common(options: argparse.Namespace, place: Path) -> tuple[dict[str, Any], int]:
    """Return what the tasks of all programs have in common, with the data at hand, and the batch in samples."""
    from app.tasks.image_classification.data.open import open_data
    from benchmarks import work

    recipe = work.load(options.recipe, options.overrides, model=options.models[0], augmented=True).recipe
    data = open_data(recipe.sections)
    shape = work.shape_of(data)
    if shape[0] == 1:
        work.write_for_torchvision(data, place)
    elif options.peers != "none":
        raise RecipeError(
            f"the recipe's images have {shape[0]} channels, and peers are fed by torchvision's MNIST, which is grey: take "
            "fashion_mnist or mnist, or --peers none."
        )
    common = {"recipe": options.recipe, "folder": str(place), "shape": shape, "overrides": options.overrides}
    return common, recipe.train.global_batch_size


def _compete(
    group: Group, entries: list[Entry], work: dict[str, Any], options: argparse.Namespace, console: Console
) -> list[Turn]:
    """Let the programs of a group take turns, and return all windows but those of the warm-up."""
    with ExitStack() as stack:
        started = {}
        for entry in entries:
            task, log = _task(entry, work, group.model), Path(work["folder"], f"{entry.name}.log")
            variables = {**contestants.ON_CPU, **entry.variables}
            one = contestants.start(
                entry.name, task, threads=group.threads, processes=group.processes, log=log, variables=variables
            )
            started[entry.name] = stack.enter_context(one)
        ready = {entry.name: started[entry.name] for entry in entries if _is_ready(entry, started[entry.name], console)}
        warm_s = {name: contestant.run(_WARM_STEPS).cpu_s for name, contestant in ready.items()}[REFERENCE]
        steps = _WINDOW_STEPS * max(1, math.ceil(options.window * _WARM_STEPS / warm_s / _WINDOW_STEPS))
        rows = []
        names = list(ready)
        for number in range(1 + options.rounds):
            console.print(f"{group}: round {number} of {options.rounds}, {steps} steps each", markup=False)
            turned = names[number % len(names) :] + names[: number % len(names)]
            windows = {name: ready[name].run(steps) for name in turned}
            if number > 0:
                rows += [
                    Turn(group, name, number, steps, windows[name].cpu_us_per_step, windows[name].wall_us_per_step)
                    for name in names
                ]
        return rows


def _is_ready(entry: Entry, contestant: contestants.Contestant, console: Console) -> bool:
    """Wait for the first step; say if a peer fails. Raises TrainingError if another program does."""
    try:
        contestant.take_first_step()
    except TrainingError as error:
        if entry.program in (*_HAND_WRITTEN, "samerun"):
            raise
        console.print(f"left out: {error}", markup=False)
        return False
    return True


def _task(entry: Entry, work: dict[str, Any], model: str, *, epochs: int | None = None) -> dict[str, Any]:
    overrides = recipe_file.replaced(work["overrides"], entry.overrides)
    own = {"program": entry.program, "augmented": entry.augmented, "model": model, "epochs": epochs, "overrides": overrides}
    return {**work, **own}


def _whole_runs(entries: list[Entry], work: dict[str, Any], options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return what was asked for of the CPU seconds to the first step, and with an epoch and an evaluation, and show it."""
    model, threads, log = options.models[0], options.threads[0], Path(work["folder"], "whole.log")
    programs = {
        entry.name: whole_runs.Program(_task(entry, work, model, epochs=1), {**contestants.ON_CPU, **entry.variables})
        for entry in entries
    }
    first = whole_runs.first_steps(programs, starts=options.starts, threads=threads, log=log) if options.starts else {}
    epochs = whole_runs.epochs(programs, threads=threads, log=log) if options.epoch else {}
    if not (first or epochs):
        return {}
    console.print(whole_runs.table(model, first, epochs))
    return {"first_step_cpu_s_of_starts": first, "epoch_cpu_s": epochs}


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *options.argv]),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "versions": versions(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [options] [key=value ...]",
        description="Compare the training loop with a hand-written one over tensors in memory (the limit), and with the peers "
        "that are installed, on the same work: AdamW at a constant rate, the recipe's data and batch. By CPU time a step, in "
        "rounds in which all take turns. linear is one matrix, whose step shows what the loop around it costs (no peer is fed "
        "so fast: they are left out); convnet is the small one of 409 thousand weights; any other name is a model as in "
        "model.name.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", default="fashion_mnist", help="name or path, of data that fits in memory (default: "
                        "fashion_mnist)")  # fmt: skip
    parser.add_argument("--models", type=names, default=["linear", "convnet", "resnet18"],
                        help="comma-separated (default: linear,convnet,resnet18)")  # fmt: skip
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="of each process, comma-separated (default: 1,2)")
    parser.add_argument("--processes", type=numbers, default=[1, 2], help="comma-separated; several, with the least "
                        "threads, compare Samerun under DDP with a hand-written DDP loop (default: 1,2)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=9, help="windows of each program that count (default: 9)")
    parser.add_argument("--window", type=above_zero, default=1.0, metavar="SECONDS",
                        help="CPU time of the reference in a window, about (default: 1)")  # fmt: skip
    parser.add_argument("--peers", default="all", metavar="all|none|NAMES", help="comma-separated: accelerate, fabric, "
                        "lightning, transformers, timm, torchvision (default: all that are installed)")  # fmt: skip
    parser.add_argument("--augmented", action="store_true", help="also Samerun and Accelerate with the recipe's random crops "
                        "and flips")  # fmt: skip
    parser.add_argument("--switches", type=names, default=[], metavar="NAMES", help="also Samerun with each of "
                        "channels_first, bf16, compile; comma-separated")  # fmt: skip
    parser.add_argument("--starts", type=positive, metavar="N", help="also the CPU seconds from the start of each program to "
                        "its first step, with the first model and threads: so many starts, in turns")  # fmt: skip
    parser.add_argument("--epoch", action="store_true", help="also the CPU seconds of a process that trains an epoch and "
                        "evaluates, with the first model and threads")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder for bench.csv and bench.json (default: bench-TIME)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values, for all programs")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SamerunError as error:
        sys.exit(f"python -m benchmarks: {error}")
