"""Evaluates a finished run: `samerun evaluate RUN [--split validation] [--best] [--json] [key=value ...]`.

RUN may be what `samerun export` wrote, or any folder of transformers with a language model: then `--recipe`, or `data.*`,
names the text.

With more processes, `accelerate launch ... -m app.evaluate RUN`: the counts are the same. Under a preset that shards the model
each reads its share, if the task draws its weights (`init_module`). The run's own recipe names the data; `data.*` overrides
name other data. Classes of other data are matched with the run's by their names.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import options
from app.environment.launched import Launched, read
from app.environment.slurm_variables import own_environment
from app.errors import CheckpointError, DataError, SamerunError, UsageError, exits_refused, leave_with, printable
from app.options import Parser
from app.recipe import recipe_file, task_file
from app.recipe.schema import BatchPlan, Recipe
from app.runs import run_folder

if TYPE_CHECKING:
    import torch

    from app.distributed.runtime import Runtime
    from app.evaluation import Evaluation

_FOLDER_TASK, _FOLDER_RECIPE = "causal_lm", "lm_tiny"
"""The task whose models are folders of another library, and the recipe of its data if none is given."""
_USED = (
    "train.dtype", "train.tf32", "train.deterministic", "train.max_micro_batch", "train.global_batch_size",
    "train.validation_fraction", "train.max_validation_samples",
)  # fmt: skip
_IGNORED = ("model", "augment", "train", "optim", "log", "checkpoint", "profile")
"""Keys that have an effect here, and sections that have no other."""


def main(argv: list[str] | None = None) -> None:
    """Print the scores of a finished run; ends the process with the error's exit code if that fails."""
    parser = Parser("evaluate", "Evaluate a finished run or an exported model.")
    parser.add_argument("run", type=run_folder.existing, metavar="RUN", help="run, exported model or transformers folder")
    parser.add_argument("--recipe", metavar="NAME|PATH", help="for a transformers folder: the recipe with the text to score")
    parser.add_argument("--split", choices=("train", "validation", "test"), help="split to score (default: test, or validation "
        "if there is no test split)")  # fmt: skip
    options.add_best(parser)
    options.add_full_traceback(parser)
    options.add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="recipe values that override the run's: "
        "data.*")  # fmt: skip
    launched = Launched()
    try:
        arguments = parser.parse_all(argv)
        keys = [word.partition("=")[0].strip() for word in arguments.overrides]
        if ignored := [key for key in keys if key.partition(".")[0] in _IGNORED and key not in _USED]:
            raise UsageError(f"{', '.join(ignored)}: it has no effect here; give data.* or one of {', '.join(_USED)}")
        launched = read(own_environment())
        with exits_refused():
            scores = _score(launched, arguments)
    except SamerunError as error:
        leave_with(error, launched.rank)
    if launched.rank == 0:
        plain = {"split": scores.split, "samples": scores.samples, **scores.scores, **scores.tables}
        sys.stdout.write(json.dumps(plain) + "\n" if arguments.json else printable(_table(scores)))


def _score(launched: Launched, arguments: argparse.Namespace) -> Evaluation:
    import torch

    from app import building
    from app.checkpoints import step_folders, stored_weights
    from app.data.samples import mapped
    from app.distributed.runtime import Runtime
    from app.init import filling

    is_foreign = (arguments.run / "config.json").exists() and not (arguments.run / run_folder.MODEL_CONFIG).exists()
    is_ours = arguments.best or not is_foreign
    recipe = _recipe(arguments, is_ours=is_ours)
    ranks = launched.data_ranks
    share = max(1, recipe.train.global_batch_size // ranks)
    is_auto = recipe.train.max_micro_batch == "auto"
    limit = run_folder.last_micro_batch(arguments.run) if is_auto else recipe.train.micro_batch_limit
    micro_batch = min(share, limit or share)
    plan = BatchPlan(global_batch_size=micro_batch * ranks, data_ranks=ranks, accumulation=1)
    train, workers = recipe.train, arguments.workers
    runtime = Runtime(launched, plan, tf32=train.tf32, deterministic=train.deterministic, workers=workers)
    task, data = building.open_data(runtime, recipe, to_train=False)
    split = arguments.split or next(reversed(data.scored), "train")
    dtype = runtime.input_dtype(getattr(torch, recipe.train.dtype))
    with runtime.together():
        known = [*(["train"] if data.train is not None else []), *data.scored]
        if split not in known:
            raise DataError(f"the data has no {split} split: give --split {' or '.join(known)}")
        samples = data.train if split == "train" else building.scored_samples(recipe, data, split)
        if is_ours:
            place = step_folders.choose_best(arguments.run) if arguments.best else arguments.run
            built = functools.partial(filling.to_read_into, runtime, dtype)
            _, model, facts = stored_weights.load(place, recipe.task if task_file.is_own(recipe.task) else None, built=built)
            samples = mapped(samples, lambda opened: task.adapt_samples(opened, facts))
        else:
            model = _load_folder(runtime, dtype, task, arguments.run, samples.facts)
    model = filling.to_evaluate(runtime, model, dtype)
    form = building.form_of(runtime, recipe, task)
    scores = building.evaluation_of(runtime, task, model, samples, split=split, form=form)()
    runtime.close()
    return scores


def _load_folder(runtime: Runtime, dtype: torch.dtype, task: Any, folder: Path, facts: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model of a folder of transformers.

    Where the preset shards it, a rank reads its share, unless the files have other names than the model: only transformers
    knows these.
    """
    from app.checkpoints import stored_weights
    from app.init import filling

    task.check_folder(folder, facts)
    file = stored_weights.in_folder(folder)
    if file is not None and filling.can_shard(runtime):
        model = filling.to_read_into(runtime, dtype, task, facts)
        stored = stored_weights.joined(stored_weights.open_stored(file), task, model)
        try:
            stored_weights.fitting(model, stored)
        except CheckpointError:
            return task.load_folder(folder, facts)  # type: ignore[no-any-return]
        stored_weights.fill(model, stored)
        return model.eval()
    return task.load_folder(folder, facts)  # type: ignore[no-any-return]


def _recipe(arguments: argparse.Namespace, *, is_ours: bool) -> Recipe:
    """Return the recipe with the data: the run's own, or for a folder of transformers another one without its network."""
    if is_ours:
        if arguments.recipe is not None:
            raise UsageError(f"--recipe is for a transformers folder: {arguments.run} has its own recipe")
        if not arguments.best:
            run_folder.read_json(arguments.run / run_folder.MODEL_CONFIG)  # raises for a run that is not finished
        return recipe_file.load(str(arguments.run / run_folder.RECIPE), arguments.overrides).recipe
    kinds = recipe_file.kinds(_FOLDER_TASK)
    values = {key: "null" for key, kind in kinds.items() if key.startswith("model.") and kind.optional}
    values |= {"task": _FOLDER_TASK, "model.path": str(arguments.run), "model.dropout": "0"}
    values |= {} if arguments.recipe else {"data.sequence_length": "null"}
    words = recipe_file.replaced([f"{key}={value}" for key, value in values.items()], arguments.overrides)
    return recipe_file.load(arguments.recipe or _FOLDER_RECIPE, words).recipe


def _table(scores: Evaluation) -> str:
    rows = [("split", scores.split), ("samples", f"{scores.samples:,}")]
    rows += [(name.replace("_", " "), f"{score:.4f}") for name, score in scores.scores.items()]
    for name, table in scores.tables.items():
        rows += [("", ""), (name.replace("_", " "), "")]
        rows += [(f"  {row}", "no samples" if score is None else f"{score:.4f}") for row, score in table.items()]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:{width}}  {value}".rstrip() + "\n" for name, value in rows)


if __name__ == "__main__":
    main()
