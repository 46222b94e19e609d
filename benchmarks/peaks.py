"""`python -m benchmarks.peaks`: the most memory of its own that a rank has while a model of 334 million weights is trained.

Under presets that shard, on 2 and 4 processes: while the model is built and prepared, trained, saved, the result written, the
run taken up again, then in `samerun export` and `app.evaluate`. Each figure is anonymous memory (RssAnon of proc(5)) less what
the process had before, its libraries, of the rank with most. Beside it stands its share: the tensors that it has to keep then.
`hsdp` has two copies of the model, as on two nodes, and needs 4 processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from app import export
from app.options.values import names, numbers
from app.place.cores import machine
from app.place.topology import Topology
from benchmarks.figures import versions
from benchmarks.memory import peak_anonymous_bytes
from launch import preset
from launch.node_command import accelerate_argv

_HIDDEN, _LAYERS, _INNER, _VOCABULARY, _LENGTH = 1024, 16, 4096, 32000, 16
_WEIGHTS = 2 * _VOCABULARY * _HIDDEN + _LAYERS * (4 * _HIDDEN**2 + 3 * _HIDDEN * _INNER + 2 * _HIDDEN) + _HIDDEN
_MIB = 4 * _WEIGHTS / 2**20
"""Of the weights in float32."""
_LARGEST_MIB = 4 * _VOCABULARY * _HIDDEN / 2**20
"""Of the largest unit, an embedding."""
_PRESETS = ("fsdp2", "hsdp", "tensor_parallel", "deepspeed_zero3")
_PARTS = {
    "building": (1, 0),
    "preparing": (1, 0),
    "training": (4, 0),
    "saving": (4, 3),
    "ending": (4, 3),
    "resuming": (4, 0),
    "evaluating": (1, 0),
}
"""How often a rank has its share of the weights in each part: a gradient and two moments are as large, and a save copies the
weights and the moments to memory that it keeps. Ranks with the same share save a part of it each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table for each number of ranks. Raises RuntimeError, with its last words, if a run fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peaks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--presets", type=names, default=[*_PRESETS], help="comma-separated names or files")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], help="comma-separated (default: 2,4)")
    options = parser.parse_args(argv)
    sys.stdout.write(f"{_title()}\n")
    for ranks in options.ranks:
        presets = [name for name in options.presets if ranks > _copies(name)]
        sys.stdout.write("\n".join(_table(presets, ranks)) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{machine()}; {', '.join(f'{name} {number}' for name, number in versions().items())}.\n")
    return 0


def _copies(name: str) -> int:
    """How many copies of the model the ranks hold together."""
    return 2 if name == "hsdp" else 1


def _measured(name: str, ranks: int, folder: Path) -> dict[str, float]:
    """Return MiB by part, of the rank with most."""
    run_dir = folder / "run"
    tokens = folder / "tokens"
    tokens.mkdir()
    for file in ("train.bin", "val.bin"):  # as nanoGPT has them, 16 bits a token
        (tokens / file).write_bytes(bytes(range(125)) * 2 * (_LENGTH + 1))
    words = ["--trackers", "none", "--run-dir", str(run_dir), "--recipe", "lm_tiny", f"data.path={tokens}", *_recipe()]
    found = _peaks(name, ranks, folder, "train", words)
    again = _peaks(name, ranks, folder, "train", [*words, "--resume", "auto"])
    found |= {"resuming": again["resuming"], "ending without a checkpoint": again["ending"]}
    found |= _peaks(name, ranks, folder, "evaluate", [str(run_dir), "--json"])
    exported = peak_anonymous_bytes(lambda: _exported(run_dir))
    return found | {"exporting": exported / 2**20}


def _recipe() -> list[str]:
    return [
        "model.architecture=llama", f"model.hidden_size={_HIDDEN}", f"model.layers={_LAYERS}", "model.heads=16",
        f"model.intermediate_size={_INNER}", f"model.vocab_size={_VOCABULARY}", "model.tie_embeddings=false",
        f"data.sequence_length={_LENGTH}", "train.global_batch_size=4", "train.steps=2", "train.max_validation_samples=4",
        "train.checkpoint_activations=blocks", "optim.warmup_steps=null", "log.examples=0", "log.every_steps=1",
    ]  # fmt: skip


def _peaks(name: str, ranks: int, folder: Path, what: str, words: Sequence[str]) -> dict[str, float]:
    out = Path(tempfile.mkdtemp(dir=folder))
    topology = Topology(processes_per_node=ranks, origins={"processes_per_node": "--ranks"})
    copies = {"dp_replicate_size": _copies(name)} if _copies(name) > 1 else {}
    command = accelerate_argv(
        topology, preset.load(name), [str(out), what, *words], module="benchmarks.peaks_case", sizes=copies
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{what} under {name} on {ranks} processes failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    of_ranks = [json.loads(file.read_text()) for file in out.glob("*.json")]
    return {part: max(of_rank[part] for of_rank in of_ranks) for part in of_ranks[0]}


def _exported(run_dir: Path) -> None:
    if export.main([str(run_dir), "--out", str(run_dir.parent / "exported")]) != 0:
        raise RuntimeError(f"samerun export of {run_dir} failed")


def _table(presets: Sequence[str], ranks: int) -> Iterator[str]:
    """Measure presets on so many ranks; yield the lines of a table."""
    columns = {}
    for name in presets:
        with tempfile.TemporaryDirectory() as folder:
            columns[name] = _measured(name, ranks, Path(folder))
    yield f"\n| {ranks} ranks | {' | '.join(Path(name).stem for name in presets)} |"
    yield "|---" * (len(presets) + 1) + "|"
    for part in (*_PARTS, "ending without a checkpoint", "exporting"):
        cells = []
        for name, found in columns.items():
            kept, saved = _PARTS.get(part, (0, 0))
            share = (kept * _copies(name) + saved) * _MIB / ranks
            cells.append(f"{found[part]:,.0f}" + (f" of {share:,.0f}" if share else ""))
        yield f"| {part} | {' | '.join(cells)} |"


def _title() -> str:
    return f"peak of a rank's own memory, of the share; weights {_MIB:.0f} MiB, the largest unit {_LARGEST_MIB:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
