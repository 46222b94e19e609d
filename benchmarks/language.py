"""`python -m benchmarks.language`: what a step of a language model costs, beside a hand-written loop and the peers installed.

CPU time a step of a tiny Llama, in rounds in which all take turns, as `python -m benchmarks` does it; and, with --memory, how
much more anonymous memory a process takes with a vocabulary of 50,257 than with one of 257: for weights, what belongs to them,
and logits.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from app.options.values import numbers, positive
from app.place.cores import machine
from benchmarks import contestants
from benchmarks.figures import OURS, REFERENCE, Group, Turn, results, table
from benchmarks.language_case import PROGRAMS
from benchmarks.memory import status_bytes

TINY = {"hidden_size": 64, "layers": 2, "heads": 4, "intermediate_size": 128, "vocab_size": 257}
FEW = {**TINY, "hidden_size": 128}
MANY = {**FEW, "vocab_size": 50_257}
_WARM_STEPS, _MEMORY_STEPS = 10, 1


def main(argv: list[str]) -> int:
    """Measure and show the tables; return 0."""
    options = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=144)
    names = [name for name, (_, package) in PROGRAMS.items() if importlib.util.find_spec(package)]
    with tempfile.TemporaryDirectory(prefix="samerun-bench-") as place:
        for threads in options.threads:
            _compete(names, Path(place), threads, options, console)
        if options.memory:
            for name in (REFERENCE, OURS, *(["transformers"] if "transformers" in names else [])):
                small, large = (_peak(name, network, Path(place), options.threads[0]) for network in (FEW, MANY))
                console.print(f"{name}: {(large - small) / 2**20:,.0f} MiB more with 50,257 tokens than with 257", markup=False)
    console.print(machine(), markup=False, highlight=False)
    return 0


def _task(name: str, place: Path, *, network: dict[str, int], batch: int, length: int) -> dict[str, object]:
    return {"program": name, "folder": str(place), "network": network, "batch": batch, "length": length}


def _compete(names: list[str], place: Path, threads: int, options: argparse.Namespace, console: Console) -> None:
    group = Group("llama", threads, 1)
    with ExitStack() as stack:
        ready = {}
        for name in names:
            task = _task(name, place, network=TINY, batch=options.batch, length=options.length)
            log = place / f"{name}.log"
            started = contestants.start(name, task, log=log, threads=threads, case="benchmarks.language_case")
            ready[name] = stack.enter_context(started)
        for one in ready.values():
            one.take_first_step()
            one.run(_WARM_STEPS)
        rows = []
        for number in range(1, options.rounds + 1):
            turned = names[number % len(names) :] + names[: number % len(names)]
            windows = {name: ready[name].run(options.steps) for name in turned}
            rows += [
                Turn(group, name, number, options.steps, windows[name].cpu_us_per_step, windows[name].wall_us_per_step)
                for name in names
            ]
    console.print(table(group, results(rows), options.batch))


def _peak(name: str, network: dict[str, int], place: Path, threads: int) -> int:
    """Return the most anonymous memory of a program in its first steps, in bytes (RssAnon of proc(5))."""
    task = _task(name, place, network=network, batch=4, length=256)
    log, peak = place / f"{name}-memory.log", 0
    with contestants.start(name, task, log=log, threads=threads, case="benchmarks.language_case") as one:
        over = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.002):
                peak = max(peak, status_bytes("RssAnon", one.process_ids[0]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            one.take_first_step()
            one.run(_MEMORY_STEPS)
        finally:
            over.set()
            watcher.join()
    return peak


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--threads", type=numbers, default=[1], help="of each process, comma-separated (default: 1)")
    add("--rounds", type=positive, default=9, help="windows of each program that count (default: 9)")
    add("--steps", type=positive, default=50, help="in a window (default: 50)")
    add("--batch", type=positive, default=8, help="rows in a step (default: 8)")
    add("--length", type=positive, default=64, help="tokens in a row (default: 64)")
    add(
        "--memory",
        action="store_true",
        help=f"also the peak memory of steps with a large vocabulary; {OURS} goes by chunks there",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
