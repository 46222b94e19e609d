"""What saving costs, against `accelerator.save_state`: `python -m benchmarks.saving [--state-gb 1.2]`.

The model is a stack of linear layers with AdamW, whose weights and moments are as large as wanted, on 1 and on 2 processes
under DDP. How to read the table, of which every line is the slowest rank, or the one with most memory:

    held        seconds in which no step is taken. samerun copies what the rank owns, and writes it while the loop goes on, with
                the same cores; save_state returns when the system has taken its files
    on disk     seconds from the start of the save until the disk has it. samerun has hashed everything by then, has waited for
                the disk (fsync) and renamed; for save_state the benchmark calls fsync, and there are no hashes
    saving      MiB at the peak of a save beyond the state itself, in a fresh process, and of those what is no file's: files
                that are mapped can be dropped again. samerun keeps its copy, of what the rank owns, for the next save
    loading     the same while loading, beyond weights and moments

Times are medians over rounds in which both take turns, after one that is not counted; memory is that of one save or load, and
is left out by `--times-only`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from app.options.values import above_zero, positive
from app.place.cores import machine
from app.place.topology import Topology
from benchmarks.figures import versions
from launch import preset
from launch.node_command import accelerate_argv

_WAYS = {"samerun": "samerun", "accelerate": "`save_state`"}
_MIB = 2**20


def main(argv: list[str]) -> int:
    """Measure, print the table, and return 0."""
    options = _parser().parse_args(argv)
    from benchmarks.saving_case import LAYER_STATE_BYTES

    layers = round(options.state_gb * 1e9 / LAYER_STATE_BYTES)
    size = f"{layers * LAYER_STATE_BYTES / 1e9:.2f} GB of weights and AdamW moments"
    lines = [
        f"{size}; {options.rounds} rounds, medians (smallest-largest)",
        "",
        "| processes | | held s | on disk s | saving MiB (no file's) | loading MiB (no file's) |",
        "|---|---|---|---|---|---|",
    ]
    for processes in options.processes:
        figures = _measure(processes, layers, options)
        lines += _rows(processes, figures)
    lines += ["", f"{machine()}; {', '.join(f'{name} {number}' for name, number in versions().items())}.", ""]
    sys.stdout.write("\n".join(lines))
    return 0


def _measure(processes: int, layers: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the figures of every task by their names: times of the rounds, and bytes."""
    figures: dict[str, list[float]] = {}
    memory = () if options.times_only else tuple(f"{what}-{way}" for what in ("save", "load") for way in _WAYS)
    with tempfile.TemporaryDirectory(prefix="samerun-saving-", dir=options.folder) as folder:
        for task in ("times", *memory):
            result = Path(folder) / f"{task}.json"
            words = ["--task", task, "--layers", str(layers), "--rounds", str(options.rounds + 1)]
            words += ["--folder", folder, "--result", str(result)]
            topology = Topology(processes_per_node=processes, origins={"processes_per_node": "--processes"})
            command = accelerate_argv(topology, preset.load("multi_gpu"), words, module="benchmarks.saving_case")
            subprocess.run(command, check=True, stdout=sys.stderr)
            figures |= json.loads(result.read_text())
    return figures


def _rows(processes: int, figures: dict[str, list[float]]) -> list[str]:
    rows, medians = [], {}
    for way, name in _WAYS.items():
        cells = []
        for what in ("held_s", "on_disk_s"):
            times = figures[f"{way} {what}"][1:]
            medians[way, what] = statistics.median(times)
            cells.append(f"{medians[way, what]:.2f} ({min(times):.2f}-{max(times):.2f})")
        for what in ("save", "load"):
            if f"{what}-{way} extra_bytes" not in figures:
                cells.append("")
                continue
            resident, own = (figures[f"{what}-{way} {kind}"][0] / _MIB for kind in ("extra_bytes", "extra_anonymous_bytes"))
            cells.append(f"{resident:,.0f} ({own:,.0f})")
        rows.append(f"| {processes} | {name} | {' | '.join(cells)} |")
    ratios = [f"{medians['samerun', what] / medians['accelerate', what]:.2f}" for what in ("held_s", "on_disk_s")]
    return [*rows, f"| {processes} | ratio | {' | '.join(ratios)} | | |"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description="Measure what saving costs.")
    parser.add_argument(
        "--state-gb", type=above_zero, default=1.2, help="weights and moments in GB of 10^9 bytes (default: 1.2)"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="rounds that are counted (default: 5)")
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    parser.add_argument(
        "--folder", type=Path, help="where to save: the disk that is measured (default: that of temporary files)"
    )
    parser.add_argument("--times-only", action="store_true", help="how long saves take, without what they need of memory")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
