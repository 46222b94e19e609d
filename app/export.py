"""`samerun export CHECKPOINT_OR_RUN`: the trained weights of a checkpoint as a plain `model.safetensors`.

    model.safetensors   the parameters, in the precision that they were trained in, and the buffers, by their plain names
    model.json          what rebuilds the model around them
    recipe.yaml         what it learns: with it the folder is one for `app.evaluate` and `app.predict`

The bytes go from the checkpoint's files to the new one in chunks of a few MiB, so the machine may have far less memory
than the model needs, and neither torch nor a device is wanted. What is damaged is not exported, and each file appears whole
or not at all, the weights last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from app.checkpoints import step_folders as files
from app.checkpoints import tensor_file
from app.checkpoints.durable import Stamp, telling, write_bytes
from app.checkpoints.piece import AVERAGE, WEIGHT
from app.checkpoints.step_folders import Reader
from app.errors import CheckpointError, RunFolderError
from app.recipe import recipe_file
from app.record import run_folder
from app.record.claim import sync

_KEYS = {"average": AVERAGE, "raw": WEIGHT}
_WORDS = {AVERAGE: "averaged weights", WEIGHT: "weights"}


def main(argv: Sequence[str]) -> int:
    """Run `samerun export` with these arguments and return its exit code. Raises CheckpointError and RunFolderError."""
    options = _parser().parse_args(argv)
    folder = _whole(options.place)
    reader = Reader(folder)
    key = _chosen(reader, options.weights)
    out = options.out or _beside(folder)
    written = export(reader, out, key=key, force=options.force)
    size_bytes = written.stat().st_size
    sys.stdout.write(f"{written}: the {_WORDS[key]} after {reader.state['step']} steps, {size_bytes:,} bytes\n")
    return 0


def export(reader: Reader, out: Path, *, key: str, force: bool = False) -> Path:
    """Write the tensors `key` and the buffers of a checkpoint and return the path of the weights.

    They go into the folder `out`, with what rebuilds the model, or alone into the file `out` if it ends in .safetensors.
    Raises RunFolderError if something is there already and is not to be replaced, CheckpointError if a disk refuses.
    """
    alone = out.suffix == ".safetensors"
    weights = out if alone else out / run_folder.MODEL
    texts = {} if alone else {run_folder.MODEL_CONFIG: json.dumps(reader.state["model"], indent=2) + "\n"}
    texts |= {} if alone else {run_folder.RECIPE: recipe_file.flat_to_yaml(reader.state["recipe"])}
    there = [str(path) for path in (weights, *(out / name for name in texts)) if path.exists()]
    if there and not force:
        raise RunFolderError(f"{', '.join(there)} exists already: choose another --out, or replace it by --force.")
    with telling(weights.parent, "written"):
        weights.parent.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        _put(out / name, lambda path, text=text: write_bytes(path, text.encode()))  # type: ignore[misc]
    _put(weights, lambda path: tensor_file.write(path, reader.contents(key), tensor_file.OF_TORCH))
    return weights


def _put(path: Path, write: Callable[[Path], Stamp]) -> None:
    """Write a file beside its name and rename it; what fills a disk does not stay."""
    temporary = path.with_name(f".{path.name}")
    try:
        write(temporary)
        with telling(path, "written"):
            temporary.replace(path)
            sync(path.parent)
    except CheckpointError:
        with suppress(OSError):  # a folder that cannot be written has nothing to remove
            temporary.unlink()
        raise


def _whole(place: Path) -> Path:
    """Return the checkpoint that a path names: itself, or of a run folder the newest that is whole."""
    if files.is_checkpoint(place):
        files.verify(place)
        return place
    folder, damaged = files.newest(place)
    if folder is None:
        raise CheckpointError("\n".join([*damaged, f"{place} is no checkpoint and has none that is whole: give another path."]))
    for sentence in damaged:
        sys.stderr.write(f"passed over: {sentence}\n")
    return folder


def _chosen(reader: Reader, wanted: str | None) -> str:
    """The key of the weights that are exported: what was asked for, or what a finished run leaves."""
    if wanted is None:
        return reader.finished_key()
    if _KEYS[wanted] not in reader.keys():  # noqa: SIM118 - it is no dict
        raise CheckpointError(
            f"{reader.folder} has no average of the weights: its run had no train.ema_decay. Export --weights raw."
        )
    return _KEYS[wanted]


def _beside(folder: Path) -> Path:
    """Where a checkpoint is exported to if nothing is said: a folder of its own in the run folder."""
    folder = folder.absolute()
    return (folder.parents[1] if folder.parent.name == files.FOLDER else folder.parent) / "exported" / folder.name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samerun export",
        description="Write the weights of a checkpoint as a plain model.safetensors, with what rebuilds the model around them. "
        "Needs no device and little memory, whatever the size of the model.",
        allow_abbrev=False,
    )
    parser.add_argument("place", type=Path, metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or a run folder: the newest in it "
                        "that is whole")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE_OR_FOLDER", help="a folder for model.safetensors, model.json and "
                        "recipe.yaml, or a file *.safetensors for the weights alone (default: RUN/exported/NAME)")  # fmt: skip
    parser.add_argument("--weights", choices=_KEYS, help="the moving average of the weights, or the weights as they were "
                        "(default: the average if the run has one, as a finished run leaves it)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    return parser
