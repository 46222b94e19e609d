"""`samerun export RUN|CHECKPOINT`: the trained weights of a checkpoint as a plain `model.safetensors`.

    model.safetensors   the parameters, in the precision that they were trained in, and the buffers, by their plain names
    model.json          what rebuilds the model around them
    recipe.yaml         what it learns: with it the folder is one for `app.evaluate` and `app.predict`
    README.md           the model card, in the hub's format
    config.json, ...    of a language model or a model of timm: what makes the folder one that transformers or timm loads;
                        of other image models: the network and how images are preprocessed

Weights of more than 5 GB are parts, model-00001-of-00004.safetensors and so on, with model.safetensors.index.json,
which has the file of each tensor, as transformers splits them.

With --push the folder is uploaded to the Hugging Face hub.

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
from app.environment.launched import read
from app.environment.slurm_variables import own_environment
from app.errors import CheckpointError, RunFolderError, UsageError, printable
from app.files import hub
from app.files.atomic_files import disk_errors, file_made_whole, sync
from app.files.text_files import Lines
from app.init.region import AVERAGE, WEIGHT
from app.options import Parser
from app.recipe import recipe_file, task_file
from app.runs import model_card, run_folder
from app.runs.run_folder import PROGRAMS

if TYPE_CHECKING:
    from app.task import Adapters

DCP, DCP_METADATA = "dcp", ".metadata"
"""The format of torch's distributed checkpoints, and the file that its folders have."""
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
        out = run / "exported" / f"{folder.name}{'-adapter' if options.adapter else '-dcp' if options.to == DCP else ''}"
    if out.is_file() and out.suffix != ".safetensors":
        raise RunFolderError(f"--out {out} is a file: give a folder, or one that ends in .safetensors for the weights alone.")
    if options.replayed and (options.adapter or options.to == DCP or out.suffix == ".safetensors"):
        raise UsageError("--replayed is for the model card, which is written with a folder of the whole model")
    replayed = _replayed(options.replayed) if options.replayed else ""
    if (options.public or options.yes) and not options.push:
        raise UsageError("--public and --yes are for --push, which uploads the folder")
    is_private = _check_push(options, out) if options.push else None
    if options.to is not None:
        _check_program(options, reader, out)
    if options.to == DCP:
        written = export_for_dcp(reader, out, key=key)
    elif options.to is not None:
        written = _export_with_program(reader, out, to=options.to, key=key, force=options.force, replayed=replayed)
    elif options.adapter:
        written = export_adapter(reader, out, key=key, force=options.force)
    else:
        written = export(reader, out, key=key, force=options.force, replayed=replayed)
    weights = [path for path in written if options.to == DCP or ".safetensors" in path.name]
    size_bytes, about = sum(path.stat().st_size for path in weights), f"{_WORDS[key]} after {reader.state['step']} steps"
    where = out if options.to == DCP else weights[0] if len(weights) == 1 else f"{weights[-1]} and {len(weights) - 1} parts"
    sys.stdout.write(f"{printable(str(where))}: the {about}, {size_bytes:,} bytes\n")
    if options.push:
        _push(options, out, written, f"The {about}", is_private=is_private)
    return 0


def _check_push(options: argparse.Namespace, out: Path) -> bool | None:
    """Return whether the model of the hub is private; None: it does not exist. Raises UsageError if --push is impossible."""
    environment = own_environment()
    if "RANK" in environment or read(environment).world_size > 1:
        raise UsageError("--push is for one process, and this is a rank of several: run `samerun export` after the training")
    if out.suffix == ".safetensors":
        raise UsageError(f"--push uploads a folder: leave --out {out} out, or give a folder")
    if not options.yes and not sys.stdin.isatty():
        raise UsageError("--push asks before it uploads, and stdin is not a terminal: give --yes")
    is_private = hub.is_private(options.push)
    if is_private is False and not options.public:
        raise UsageError(f"--push {options.push} is a public model: give --public, or another name")
    return is_private


def _push(options: argparse.Namespace, out: Path, files: Sequence[Path], message: str, *, is_private: bool | None) -> None:
    """Show what is uploaded and where, ask, and upload it. Raises UsageError if the answer is not yes, DataError."""
    names = [path.relative_to(out).as_posix() for path in files]
    lines = [f"  {path.stat().st_size:15,} bytes  {name}\n" for path, name in zip(files, names, strict=True)]
    kind = "private" if is_private or (is_private is None and not options.public) else "public"
    place = f"a new {kind} model" if is_private is None else f"a {kind} model, as a new commit that replaces its weights"
    sys.stdout.write(printable(f"{''.join(lines)}upload these {len(files)} files to {options.push}, {place}\n"))
    if not options.yes and input("Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UsageError(f"nothing was uploaded; {out} is complete, and `samerun export` with --force and --push asks again")
    sys.stdout.write(f"{hub.push(out, names, options.push, private=kind == 'private', message=message)}\n")


def export(reader: Reader, out: Path, *, key: str, force: bool = False, program: str = "", replayed: str = "") -> list[Path]:
    """Write the tensors `key` and the buffers of a checkpoint and return the paths of all files, an index of weights last.

    They go into the folder `out`, with the files that rebuild the model, or alone into the file `out` if it ends in
    .safetensors. `program` is the model card's text about a program next to them, `replayed` about replayed steps.

    Raises RunFolderError if a file already exists and is not to be replaced, CheckpointError if a disk refuses, DataError if a
    file that belongs next to them no longer exists.
    """
    alone = out.suffix == ".safetensors"
    folder, others = (out.parent, dict[str, bytes]()) if alone else (out, _other_files(reader, program, replayed))
    contents = reader.contents(key)
    if reader.state["recipe"].get("task", tasks.DEFAULT) in tasks.WITH_FOLDERS:
        from app.checkpoints import stored_weights  # with torch, which nothing else here needs

        contents = stored_weights.for_files(contents, *_task_and_model(reader))
    parts, index = ({out.name: contents}, dict[str, bytes]()) if alone else _parts(contents)
    weights = [folder / name for name in (*parts, *index)]
    older = set[Path]() if alone else set(folder.glob("model*.safetensors*"))
    _check_replacing([*older, *weights, *(folder / name for name in others)], force=force)
    for name, content in (others | parts | index).items():
        _put(folder / name, content)
    for path in older - set(weights):  # or they would be taken for the model
        with disk_errors(path, "removed"):
            path.unlink()
    return [*(folder / name for name in others), *weights]


def export_for_dcp(reader: Reader, out: Path, *, key: str) -> list[Path]:
    """Write the tensors `key` and the buffers into the folder `out`, for torch's `dcp.load`, and return its files.

    A tied tensor is in it by all of its names, as in the model's state_dict. Raises CheckpointError if a disk refuses.
    """
    from app.checkpoints import foreign_weights

    model = _task_and_model(reader)[1]
    contents, again = _contents(reader, key), _contents(reader, key)  # each can be read once
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if name in contents}
    other_names = {name: names.get(id(it)) for name, it in model.state_dict(keep_vars=True).items() if name not in contents}
    contents |= {name: again[same] for name, same in other_names.items() if same}
    with disk_errors(out, "written"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as aside:
            foreign_weights.write_dcp(Path(aside), contents)
            made = sorted(Path(aside).iterdir(), reverse=True)  # .metadata last: without it there is no checkpoint
            for older in sorted({*out.glob(DCP_METADATA), *out.glob("*.distcp")}):
                older.unlink()
            for path in made:
                path.replace(out / path.name)
            sync(out)
    return [out / path.name for path in made]


def _contents(reader: Reader, key: str) -> dict[str, Content]:
    """Return the tensors `key` and the buffers of a checkpoint by the names of the plain model."""
    contents = reader.contents(key)
    if (adapters := _adapters(reader)) is None:
        return contents
    from app.checkpoints import stored_weights  # adds up with torch, which nothing else here needs

    return stored_weights.merged(contents, adapters)


def _check_program(options: argparse.Namespace, reader: Reader, out: Path) -> None:
    """Raise RunFolderError if --to is not for this model, or something is there that is not to be replaced."""
    if options.adapter or out.suffix == ".safetensors":
        other = "--adapter" if options.adapter else f"--out {out}"
        raise RunFolderError(f"--to {options.to} writes the whole model into a folder: leave {other} out.")
    if options.to == DCP:
        _check_replacing([out / DCP_METADATA], force=options.force)
        return
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
        files = export(reader, out, key=key, force=force, program=usage, replayed=replayed)
        with disk_errors(out / made.name, "written"):
            made.replace(out / made.name)
            sync(out)
    sys.stdout.write(f"{out / made.name}: {about}\n")
    return [out / made.name, *files]


def export_adapter(reader: Reader, out: Path, *, key: str, force: bool = False) -> list[Path]:
    """Write the adapters of a checkpoint alone, into the folder `out`, as peft writes them; return the paths of both files.

    Raises RunFolderError if it has none, or something already exists, CheckpointError if a disk refuses.
    """
    adapters = _adapters(reader)
    if adapters is None:
        raise RunFolderError(f"{reader.folder} has no adapters: its run had no model.lora_rank. Leave --adapter out.")
    about, weights = out / "adapter_config.json", out / "adapter_model.safetensors"
    _check_replacing([about, weights], force=force)
    origin = reader.state["recipe"].get("train.init_from")
    base = {"base_model_name_or_path": origin}
    if model := hub.parsed(origin):
        base = {"base_model_name_or_path": model.name, "revision": model.commit}
    _put(about, (json.dumps({**adapters.about, **base}, indent=2) + "\n").encode())
    whole = reader.contents(key)
    _put(weights, {there: whole[name] for name, there in adapters.alone.items()})
    return [about, weights]


def _adapters(reader: Reader) -> Adapters | None:
    """Return how the weights of a checkpoint with adapters are written into files."""
    if reader.state["recipe"].get("task", tasks.DEFAULT) not in tasks.WITH_FOLDERS:
        return None
    task, model = _task_and_model(reader)
    return task.adapters(model)  # type: ignore[no-any-return]


def _task_and_model(reader: Reader) -> tuple[Any, Any]:
    """Return the task of a checkpoint's run, and its model without weights."""
    from app.init import filling

    task = _task(reader.state["recipe"])
    return task, filling.made(task, reader.state["model"]["facts"], seed=0)[0]


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
    card = tasks.card(task, facts, state["recipe"])
    files = {
        run_folder.MODEL_CONFIG: (json.dumps(state["model"], indent=2) + "\n").encode(),
        run_folder.RECIPE: recipe_file.flat_to_yaml(state["recipe"]).encode(),
        model_card.FILE: model_card.written(card, info),
        **card.files,
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
    parser.add_argument("--to", choices=(*PROGRAMS, DCP), help="also write a program that needs no code of ours: torch, "
                        "model.pt2 by torch.export; onnx, model.onnx (pip install -e \".[onnx]\"). Its outputs are compared "
                        "with the model's. Or write the weights alone: dcp, for torch's dcp.load")  # fmt: skip
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapter (model.lora_rank), as a folder "
        "that peft loads (default: the weights with the adapter merged into them)")  # fmt: skip
    parser.add_argument("--replayed", type=Path, metavar="FILE", help="output of `samerun verify --replay N --json`")
    parser.add_argument("--push", type=hub.name, metavar="OWNER/NAME", help="upload the folder to this model of the Hugging "
        "Face hub, after a question; a new model is private")  # fmt: skip
    parser.add_argument("--public", action="store_true", help="with --push: make a new model public")
    parser.add_argument("--yes", action="store_true", help="with --push: do not ask")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser
