"""The cost of saving, compared with `accelerator.save_state`: `python -m benchmarks.saving [--state-gb 1.2]`.

A Llama whose weights and AdamW moments are as large as wanted trains on 1 and on 2 processes under DDP, and is saved after each
step both ways, in turns. Each line of the table is the slowest rank:

    held        seconds without a step. Samerun copies what the rank owns, and writes it while the loop continues, with the same
                cores; save_state returns when the system has taken its files
    on disk     seconds from the start of the save until the disk has it. Samerun has hashed everything by then, has waited for
                the disk (fsync) and renamed; for save_state the benchmark calls fsync, and there are no hashes

Times are medians (smallest-largest) of rounds, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.environment.host import machine
from app.environment.topology import Topology
from app.options import above_zero, positive
from benchmarks.contest import say, versions
from launch import preset
from launch.node_command import accelerate_argv

_WIDTH = 512
_LAYER_STATE_BYTES = (4 * _WIDTH**2 + 3 * _WIDTH * 4 * _WIDTH) * 12
_WAYS = {"samerun": "samerun", "accelerate": "`save_state`"}


def main(argv: list[str]) -> int:
    """Measure, print the table, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description="Measure what saving costs.")
    add = parser.add_argument
    add("--state-gb", type=above_zero, default=1.2, help="weights and moments in GB of 10^9 bytes (default: 1.2)")
    add("--rounds", type=positive, default=5, help="rounds that are counted (default: 5)")
    add("--processes", type=positive, nargs="+", default=[1, 2], help="numbers of processes (default: 1 2)")
    add("--folder", type=Path, help="where to save: the disk that is measured (default: that of temporary files)")
    options = parser.parse_args(argv)
    layers = max(1, round(options.state_gb * 1e9 / _LAYER_STATE_BYTES))
    say(f"{layers * _LAYER_STATE_BYTES / 1e9:.2f} GB of weights and AdamW moments; {options.rounds} rounds\n")
    say("| processes | | held s | on disk s |\n|---|---|---|---|")
    for processes in options.processes:
        seconds = _measure(processes, layers, options)
        for way, name in _WAYS.items():
            cells = (f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})" for each in seconds[way])
            say(f"| {processes} | {name} | {' | '.join(cells)} |")
    say(f"\n{machine()}; {versions()}.")
    return 0


def _measure(processes: int, layers: int, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return by way the seconds that training is held, and those until the disk has it, of the rounds that count."""
    with tempfile.TemporaryDirectory(prefix="samerun-saving-", dir=options.folder) as folder:
        words = [
            "--recipe", "lm_tiny", "--run-dir", f"{folder}/run", "--trackers", "none", f"model.hidden_size={_WIDTH}",
            f"model.intermediate_size={4 * _WIDTH}", f"model.layers={layers}", "data.sequence_length=8",
            f"train.global_batch_size={processes}", f"train.steps={options.rounds + 1}", "checkpoint.every_steps=1",
            "train.evaluate_every_steps=null", "train.evaluate_every_epochs=0", "train.max_validation_samples=2",
            "optim.warmup_steps=null", "log.examples=0",
        ]  # fmt: skip
        topology = Topology(processes_per_node=processes, origins={"processes_per_node": "--processes"})
        command = accelerate_argv(topology, preset.load("multi_gpu"), ["--rank", folder, *words], module="benchmarks.saving")
        subprocess.run(command, check=True, stdout=sys.stderr)
        rounds = json.loads(Path(folder, "seconds.json").read_text())
    return {way: [list(times) for times in zip(*each[1:], strict=True)] for way, each in rounds.items()}


def _save_both_ways(folder: Path, words: list[str]) -> None:
    """Train with these words of `app.train`, as one rank, and write the seconds of each save to `folder`/seconds.json."""
    from app import train
    from app.checkpoints.checkpoint import Checkpoints

    plain, theirs = Checkpoints.save, folder / "accelerate"
    rounds: dict[str, list[list[float]]] = {way: [] for way in _WAYS}

    def save(checkpoints: Checkpoints, *arguments: Any) -> None:
        runtime = checkpoints._runtime
        for way in sorted(_WAYS, reverse=len(rounds["samerun"]) % 2 == 1):
            shutil.rmtree(theirs, ignore_errors=True)
            os.sync()  # what was written before is not to be waited for by what is measured
            runtime.accelerator.wait_for_everyone()
            start_s = time.perf_counter()
            if way == "samerun":
                plain(checkpoints, *arguments)
                held_s = time.perf_counter() - start_s
                checkpoints.finish()
            else:
                runtime.accelerator.save_state(str(theirs))
                runtime.accelerator.wait_for_everyone()
                held_s = time.perf_counter() - start_s
                for file in theirs.iterdir() if runtime.is_main else ():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            seconds = (held_s, time.perf_counter() - start_s)
            rounds[way].append([max(of_ranks) for of_ranks in zip(*runtime.gather(seconds), strict=True)])
        if runtime.is_main:
            (folder / "seconds.json").write_text(json.dumps(rounds))
        if f"train.steps={len(rounds['samerun'])}" in words:
            runtime.accelerator.wait_for_everyone()
            os._exit(0)  # the scores of the test split would take minutes, and a task that exits is refused

    Checkpoints.save = save  # type: ignore[assignment, method-assign]
    train.main(words)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _save_both_ways(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
