"""`python -m benchmarks.peaks`: the most memory of its own that a rank has while a model of 334 million weights is trained.

Under FSDP2 and ZeRO-3, on 2 and 4 processes: while the model is built and prepared, trained, saved, the result written, the run
taken up again, then in `samerun export` and `app.evaluate`. Each figure is anonymous memory (RssAnon of proc(5)) less what the
process had before, its libraries, of the rank with most. Beside it stands its share: the tensors that it has to keep then.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app import export
from app.options.values import names, numbers
from benchmarks.memory import peak_anonymous_bytes

_HIDDEN, _LAYERS, _INNER, _VOCABULARY, _LENGTH = 1024, 16, 4096, 32000, 16
_WEIGHTS = 2 * _VOCABULARY * _HIDDEN + _LAYERS * (4 * _HIDDEN**2 + 3 * _HIDDEN * _INNER + 2 * _HIDDEN) + _HIDDEN
_MIB = 4 * _WEIGHTS / 2**20
"""Of the weights in float32."""
_LARGEST_MIB = 4 * _VOCABULARY * _HIDDEN / 2**20
"""Of the largest unit, an embedding."""
_PARTS = {
    "building": 1,
    "preparing": 1,
    "training": 4,
    "saving": 7,
    "ending": 7,
    "resuming": 4,
    "evaluating": 1,
}
"""How often a rank has its share of the weights in each part: a gradient and two moments are as large, and a save copies the
weights and the moments to memory that it keeps."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table as Markdown. Raises RuntimeError, with its last words, if a run fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peaks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--presets", type=names, default=["fsdp2", "deepspeed_zero3"], help="comma-separated")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], help="comma-separated (default: 2,4)")
    options = parser.parse_args(argv)
    columns = {}
    for preset in options.presets:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                columns[preset, ranks] = _measured(preset, ranks, Path(folder))
    Console(width=120).print(_table(columns), markup=False)
    return 0


def _measured(preset: str, ranks: int, folder: Path) -> dict[str, float]:
    """Return MiB by part, of the rank with most."""
    run_dir = folder / "run"
    tokens = folder / "tokens"
    tokens.mkdir()
    for name in ("train.bin", "val.bin"):  # as nanoGPT has them, 16 bits a token
        (tokens / name).write_bytes(bytes(range(125)) * 2 * (_LENGTH + 1))
    words = ["--trackers", "none", "--run-dir", str(run_dir), "--recipe", "lm_tiny", f"data.path={tokens}", *_recipe()]
    found = _peaks(preset, ranks, folder, "train", words)
    again = _peaks(preset, ranks, folder, "train", [*words, "--resume", "auto"])
    found |= {"resuming": again["resuming"], "ending without a checkpoint": again["ending"]}
    found |= _peaks(preset, ranks, folder, "evaluate", [str(run_dir), "--json"])
    exported = peak_anonymous_bytes(lambda: _exported(run_dir))
    return found | {"exporting": exported / 2**20}


def _recipe() -> list[str]:
    return [
        "model.architecture=llama", f"model.hidden_size={_HIDDEN}", f"model.layers={_LAYERS}", "model.heads=16",
        f"model.intermediate_size={_INNER}", f"model.vocab_size={_VOCABULARY}", "model.tie_embeddings=false",
        f"data.sequence_length={_LENGTH}", "train.global_batch_size=4", "train.steps=2", "train.max_validation_samples=4",
        "train.checkpoint_activations=blocks", "optim.warmup_steps=null", "log.examples=0", "log.every_steps=1",
    ]  # fmt: skip


def _peaks(preset: str, ranks: int, folder: Path, what: str, words: Sequence[str]) -> dict[str, float]:
    out = Path(tempfile.mkdtemp(dir=folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{preset}.yaml")
    group = ("--num_processes", str(ranks), "--main_process_port", str(port))
    target = ("-m", "benchmarks.peaks_case", str(out), what)
    done = subprocess.run([*start, *group, *target, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{what} under {preset} on {ranks} processes failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    of_ranks = [json.loads(file.read_text()) for file in out.glob("*.json")]
    return {part: max(of_rank[part] for of_rank in of_ranks) for part in of_ranks[0]}


def _exported(run_dir: Path) -> None:
    if export.main([str(run_dir), "--out", str(run_dir.parent / "exported")]) != 0:
        raise RuntimeError(f"samerun export of {run_dir} failed")


def _table(columns: dict[tuple[str, int], dict[str, float]]) -> Table:
    table = Table("MiB", *(f"{preset} x{ranks}" for preset, ranks in columns), title=_title())
    for part in (*_PARTS, "ending without a checkpoint", "exporting"):
        if all(part in found for found in columns.values()):
            shares = [f" of {_PARTS[part] * _MIB / ranks:.0f}" if part in _PARTS else "" for _, ranks in columns]
            peaks = [f"{found[part]:.0f}" for found in columns.values()]
            table.add_row(part, *(peak + share for peak, share in zip(peaks, shares, strict=True)))
    return table


def _title() -> str:
    return f"peak of a rank's own memory, of the share; weights {_MIB:.0f} MiB, the largest unit {_LARGEST_MIB:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
