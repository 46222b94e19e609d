"""Score a finished run again: `python -m app.evaluate RUN [--split train] [--json] [key=value ...]`.

With more processes, `accelerate launch ... -m app.evaluate RUN`: the counts are the same. The run's own recipe says which
data; `data.*` overrides point it elsewhere. Classes of other data are matched with the run's by their names.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from app.checkpoints.model_file import ModelConfig
from app.data.source import Source
from app.errors import DataError, SamerunError, leave_with
from app.place.inherited import own_environment
from app.place.launched import Launched, read
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from app.recipe.schema import Recipe
from app.record import run_folder
from app.scores import Evaluation


def main(argv: list[str] | None = None) -> None:
    """Print the scores of a finished run; ends the process with the error's exit code if that fails."""
    parser = argparse.ArgumentParser(prog="python -m app.evaluate", description="Score a finished run again.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--split", choices=("test", "train"), default="test", help="which split to score (default: test)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values that replace those of the run")
    arguments = parser.parse_intermixed_args(argv)
    launched = Launched()
    try:
        launched = read(own_environment())
        classes, scores = _score(launched, arguments)
    except SamerunError as error:
        leave_with(error, launched.rank)
    if launched.rank == 0:
        plain = {name: value for name, value in vars(scores).items() if name != "own"}
        sys.stdout.write(json.dumps(plain) + "\n" if arguments.json else _table(classes, scores))


def _score(launched: Launched, arguments: argparse.Namespace) -> tuple[tuple[str, ...], Evaluation]:
    import torch

    from app import building
    from app.checkpoints import model_file
    from app.data.relabelled import relabelled
    from app.ranks.runtime import Runtime

    model, config = model_file.load(arguments.run)
    recipe = recipe_file.load(str(arguments.run / run_folder.RECIPE), arguments.overrides).recipe
    share = max(1, recipe.train.global_batch_size // launched.world_size)
    micro_batch = min(share, recipe.train.max_micro_batch or share)
    plan = BatchPlan(global_batch_size=micro_batch * launched.world_size, world_size=launched.world_size, accumulation=1)
    runtime = Runtime(launched, plan, tf32=recipe.train.tf32, deterministic=recipe.train.deterministic)
    source = getattr(building.open_data(runtime, recipe), arguments.split)
    _check_pictures(source, config, recipe)
    source = relabelled(source, config.classes)
    preparation = building.build_preparation(runtime, recipe, source)
    model = model.to(device=runtime.device, dtype=runtime.input_dtype(getattr(torch, recipe.train.dtype)))
    scores = building.evaluation_of(runtime, model, source, preparation)()
    runtime.close()
    return config.classes, scores


def _check_pictures(source: Source, config: ModelConfig, recipe: Recipe) -> None:
    """Raise DataError for pictures that the model was not made for; with data.image_size another size is what was asked for."""
    sizes = f"{source.channels} channels and {source.image_size[0]}x{source.image_size[1]} pixels"
    trained = f"{config.channels} channels and {config.image_size[0]}x{config.image_size[1]} pixels"
    if source.channels != config.channels or (source.image_size != config.image_size and recipe.data.image_size is None):
        raise DataError(
            f"the pictures of data.source={recipe.data.source}, data.path={recipe.data.path} have {sizes}, and the run was "
            f"trained on {trained}: data.color and data.image_size bring them there"
        )


def _table(classes: tuple[str, ...], scores: Evaluation) -> str:
    lines = [
        f"samples         {scores.samples:,}",
        f"accuracy        {scores.accuracy:.4f}",
        f"top-5 accuracy  {scores.top5_accuracy:.4f}",
        f"loss            {scores.loss:.4f}",
        "",
        "accuracy by class",
    ]
    width = max(len(name) for name in classes)
    for name, accuracy in zip(classes, scores.class_accuracy, strict=True):
        lines.append(f"  {name:{width}}  " + ("no samples" if accuracy is None else f"{accuracy:.4f}"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
