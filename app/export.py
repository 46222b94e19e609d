"""`samerun export RUN|CHECKPOINT`: the trained weights of a checkpoint as a plain `model.safetensors`.

    model.safetensors   the parameters, in the precision that they were trained in, and the buffers, by their plain names
    model.json          what rebuilds the model around them
    recipe.yaml         what it learns: with it the folder is one for `app.evaluate` and `app.predict`
    README.md           the model card, in the hub's format
    config.json, ...    of a language model: what makes the folder one that transformers loads

Weights of more than 5 GB are parts, model-00001-of-00004.safetensors and so on, with model.safetensors.index.json,
which has the file of each tensor, as transformers splits them.

The bytes go from the checkpoint's files to the new one in chunks of a few MiB, so the machine may have far less memory
than the model needs, and neither torch nor a device is wanted. What is damaged is not exported, and each file appears whole
or not at all, the weights last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import options, tasks
from app.checkpoints import step_folders, tensor_file
from app.checkpoints.step_folders import Reader
from app.checkpoints.tensor_file import Content
from app.errors import CheckpointError, RunFolderError, UsageError, printable
from app.files.atomic_files import disk_errors, file_made_whole, sync
from app.files.text_files import Lines
from app.init.region import AVERAGE, WEIGHT
from app.options import Parser
from app.recipe import recipe_file, task_file
from app.runs import model_card, run_folder
from app.runs.run_folder import PROGRAMS

if TYPE_CHECKING:
    from app.task import Adapters

_PART_BYTES = 5 * 10**9
"""Largest file of weights, as of transformers: a larger model is split into parts with an index."""
_KEYS = {"average": AVERAGE, "raw": WEIGHT}
_WORDS = {AVERAGE: "averaged weights", WEIGHT: "weights"}


def main(argv: Sequence[str]) -> int:
    """Run `samerun export` with these arguments and return its exit code. Raises CheckpointError and RunFolderError."""
    options = _parser().parse_all(argv)
    folder = (step_folders.choose_best if options.best else step_folders.choose)(options.place)
    reader = Reader(folder)
    key = reader.finished_key() if options.weights is None else _KEYS[options.weights]
    if key not in reader.keys():  # noqa: SIM118 - it is no dict
        raise CheckpointError(f"{folder} has no average of the weights: its run had no train.ema_decay. Export --weights raw.")
    out = options.out
    if out is None:
        folder = folder.absolute()
        run = folder.parents[1] if folder.parent.name == step_folders.FOLDER else folder.parent
        out = run / "exported" / f"{folder.name}{'-adapter' if options.adapter else ''}"
    if out.is_file() and out.suffix != ".safetensors":
        raise RunFolderError(f"--out {out} is a file: give a folder, or one that ends in .safetensors for the weights alone.")
    if options.replayed and (options.adapter or out.suffix == ".safetensors"):
        raise UsageError("--replayed is for the model card, which is written with a folder of the whole model")
    replayed = _replayed(options.replayed) if options.replayed else ""
    if options.to is not None:
        _check_program(options, reader, out)
        written = _export_with_program(reader, out, to=options.to, key=key, force=options.force, replayed=replayed)
    elif options.adapter:
        written = export_adapter(reader, out, key=key, force=options.force)
    else:
        written = export(reader, out, key=key, force=options.force, replayed=replayed)
    size_bytes = sum(path.stat().st_size for path in written)
    where = written[0] if len(written) == 1 else f"{written[-1]} and {len(written) - 1} parts"
    sys.stdout.write(f"{printable(str(where))}: the {_WORDS[key]} after {reader.state['step']} steps, {size_bytes:,} bytes\n")
    return 0


def export(reader: Reader, out: Path, *, key: str, force: bool = False, program: str = "", replayed: str = "") -> list[Path]:
    """Write the tensors `key` and the buffers of a checkpoint and return the paths of the weights, an index last.

    They go into the folder `out`, with the files that rebuild the model, or alone into the file `out` if it ends in
    .safetensors. `program` is the model card's text about a program next to them, `replayed` about replayed steps.

    Raises RunFolderError if a file already exists and is not to be replaced, CheckpointError if a disk refuses, DataError if a
    file that belongs next to them no longer exists.
    """
    alone = out.suffix == ".safetensors"
    folder, others = (out.parent, dict[str, bytes]()) if alone else (out, _other_files(reader, program, replayed))
    contents = reader.contents(key)
    if (adapters := _adapters(reader)) is not None:
        from app.checkpoints import stored_weights  # adds up with torch, which nothing else here needs

        contents = stored_weights.merged(contents, adapters)
    parts, index = ({out.name: contents}, dict[str, bytes]()) if alone else _parts(contents)
    weights = [folder / name for name in (*parts, *index)]
    older = set[Path]() if alone else set(folder.glob("model*.safetensors*"))
    _check_replacing([*older, *weights, *(folder / name for name in others)], force=force)
    for name, content in (others | parts | index).items():
        _put(folder / name, content)
    for path in older - set(weights):  # or they would be taken for the model
        with disk_errors(path, "removed"):
            path.unlink()
    return weights


def _check_program(options: argparse.Namespace, reader: Reader, out: Path) -> None:
    """Raise RunFolderError if there cannot be a program, or something is there that is not to be replaced."""
    if options.adapter or out.suffix == ".safetensors":
        other = "--adapter" if options.adapter else f"--out {out}"
        raise RunFolderError(f"--to {options.to} writes the whole model into a folder: leave {other} out.")
    if reader.state["recipe"].get("task") in tasks.WITH_FOLDERS:
        raise RunFolderError(
            f"--to {options.to} is not for language models: export the folder without it, and convert it with "
            "`optimum-cli export` (pip install optimum), which supports key-value caches."
        )
    # Now, because making the program takes longer.
    _check_replacing([out / PROGRAMS[options.to], *out.glob("model*.safetensors*")], force=options.force)


def _check_replacing(paths: Sequence[Path], *, force: bool) -> None:
    """Raise RunFolderError if files exist that are not to be replaced."""
    existing = sorted({path for path in paths if path.exists()})
    if existing and not force:
        raise RunFolderError(f"{', '.join(map(str, existing))} exists already: choose another --out, or replace it by --force.")


def _export_with_program(reader: Reader, out: Path, *, to: str, key: str, force: bool, replayed: str) -> list[Path]:
    """Write the weights and a program that computes the same as the model; neither if its outputs differ."""
    from app.checkpoints import programs, stored_weights  # with torch, which nothing else here needs

    with disk_errors(out, "written"):
        out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as aside:
        made = Path(aside, PROGRAMS[to])
        export(reader, Path(aside, "weights"), key=key)
        about, usage = programs.write(*stored_weights.load(Path(aside, "weights")), made, to=to)
        weights = export(reader, out, key=key, force=force, program=usage, replayed=replayed)
        with disk_errors(out / made.name, "written"):
            made.replace(out / made.name)
            sync(out)
    sys.stdout.write(f"{out / made.name}: {about}\n")
    return weights


def export_adapter(reader: Reader, out: Path, *, key: str, force: bool = False) -> list[Path]:
    """Write the adapters of a checkpoint alone, into the folder `out`, as peft writes them; return the path of the weights.

    Raises RunFolderError if it has none, or something already exists, CheckpointError if a disk refuses.
    """
    adapters = _adapters(reader)
    if adapters is None:
        raise RunFolderError(f"{reader.folder} has no adapters: its run had no model.lora_rank. Leave --adapter out.")
    about, weights = out / "adapter_config.json", out / "adapter_model.safetensors"
    _check_replacing([about, weights], force=force)
    base = {"base_model_name_or_path": reader.state["recipe"].get("train.init_from")}
    _put(about, (json.dumps({**adapters.about, **base}, indent=2) + "\n").encode())
    whole = reader.contents(key)
    _put(weights, {there: whole[name] for name, there in adapters.alone.items()})
    return [weights]


def _adapters(reader: Reader) -> Adapters | None:
    """Return how the weights of a checkpoint are written into files; None: unchanged, as the exported model has all of them."""
    state = reader.state
    own = recipe_file.own_sections(state["recipe"].get("task", tasks.DEFAULT))
    gone = [f"{name}.{key}" for name, section in own.items() for key in getattr(section, "not_left", ())]
    if all(state["recipe"].get(key) is None for key in gone):
        return None
    from app.init import filling

    task = _task(state["recipe"])
    return task.adapters(filling.made(task, state["model"]["facts"], seed=0)[0])  # type: ignore[no-any-return]


def _task(values: Mapping[str, Any]) -> Any:
    """Return the task of a recipe, given by keys and values as JSON has them."""
    return tasks.of(recipe_file.build({key: tuple(it) if isinstance(it, list) else it for key, it in values.items()}))


def _other_files(reader: Reader, program: str, replayed: str) -> dict[str, bytes]:
    """Return the files that rebuild the model, and those that the task's library needs, by name."""
    state = reader.state
    task, facts = state["recipe"].get("task", tasks.DEFAULT), state["model"]["facts"]
    run = reader.folder.absolute().parents[1]
    info = {
        "recipe": state["recipe"],
        "steps": state["step"],
        "scores": _scores(run, state["step"]),
        **({"program": program} if program else {}),
        "replayed": replayed or None,
        "run": run_folder.read_json(run / run_folder.RUN) if (run / run_folder.RUN).exists() else {},
    }
    files = {
        run_folder.MODEL_CONFIG: (json.dumps(state["model"], indent=2) + "\n").encode(),
        run_folder.RECIPE: recipe_file.flat_to_yaml(state["recipe"]).encode(),
        model_card.FILE: model_card.written(tasks.card(task, facts, state["recipe"]), info),
    }
    if task_file.is_own(task) and not Path(task).exists():
        sys.stderr.write(printable(f"note: {task} no longer exists, so the files of its export_files, if any, are missing\n"))
    elif task_file.is_own(task) or task in tasks.WITH_FOLDERS:
        from app.task import overrides  # imports torch, which other tasks do not need

        if overrides(made := _task(state["model"]["recipe"]), "export_files"):
            files |= made.export_files(facts, info)
    return files


def _replayed(file: Path) -> str:
    """Return the model card's text on replayed steps. Raises UsageError if the file is not the output of `samerun verify`."""
    try:
        found = json.loads(file.read_bytes())
        is_good, count, largest = found["verified"], *map(found["replayed"].__getitem__, ("steps", "largest"))
        text = f"{count:,} of {found['last_step']:,} steps, largest difference {largest:.1e}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "the output of `samerun verify RUN --replay N --json`"
        raise UsageError(f"--replayed {file}: expected {expected} ({error})") from error
    if not is_good:
        raise UsageError(f"--replayed {file}: the run was not verified")
    return text


def _scores(run: Path, step: int) -> dict[str, float]:
    """Return the scores of the weights after a step, by name, if the run folder has them."""
    path = run / run_folder.EVALUATIONS
    found: dict[str, float] = {}
    for _, _, values in Lines(path) if path.exists() else ():
        if values.get("step") == step:
            of_split = {name: it for name, it in values.items() if name.startswith(("validation_", "test_"))}
            found |= {name: it for name, it in of_split.items() if isinstance(it, float)}
    return found


def _parts(contents: Mapping[str, Content]) -> tuple[dict[str, dict[str, Content]], dict[str, bytes]]:
    """Return the tensors of each file, by its name, and the index of several files, by its name."""
    from huggingface_hub import split_state_dict_into_shards_factory  # here: the help need not wait for it

    split = split_state_dict_into_shards_factory(
        dict(contents),
        get_storage_size=tensor_file.size_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_PART_BYTES,
    )
    parts = {file: {name: contents[name] for name in names} for file, names in split.filename_to_tensors.items()}
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return parts, {run_folder.MODEL_INDEX: (json.dumps(index, indent=2) + "\n").encode()} if split.is_sharded else {}


def _put(path: Path, content: bytes | Mapping[str, Content]) -> None:
    """Write a file whole, or not at all: bytes, or tensors. Raises CheckpointError."""
    with disk_errors(path.parent, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path, "written"), file_made_whole(path) as temporary:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            tensor_file.write(temporary, content, tensor_file.OF_TORCH, final=path)


def _parser() -> Parser:
    parser = Parser("export", "Write the weights of a checkpoint as a plain model.safetensors file, with the files that "
        "rebuild the model. Needs no GPU and little memory, whatever the size of the model.")  # fmt: skip
    parser.add_argument("place", type=run_folder.existing, metavar="RUN|CHECKPOINT", help="run folder (its newest complete "
        "checkpoint), or a checkpoint")  # fmt: skip
    options.add_best(parser)
    options.add_full_traceback(parser)
    parser.add_argument("--out", type=Path, metavar="PATH", help="folder for model.safetensors, model.json and "
        "recipe.yaml; or a *.safetensors file, for the weights alone (default: RUN/exported/STEP)")  # fmt: skip
    parser.add_argument("--weights", choices=_KEYS, help="average: the moving average of the weights; raw: the weights "
        "themselves (default: average if the run has one, else raw)")  # fmt: skip
    parser.add_argument("--to", choices=PROGRAMS, help="also write a program that needs no code of ours: torch, model.pt2 by "
                        "torch.export; onnx, model.onnx (pip install -e \".[onnx]\"). Its outputs are compared with the "
                        "model's")  # fmt: skip
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapter (model.lora_rank), as a folder "
        "that peft loads (default: the weights with the adapter merged into them)")  # fmt: skip
    parser.add_argument("--replayed", type=Path, metavar="FILE", help="output of `samerun verify --replay N --json`")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser
