"""Writes a task's samples, batches and losses on one topology to files. `quick` starts it on several and compares.

    accelerate launch ... -m app.tools.rules --recipe RECIPE --out FOLDER [key=value ...]

Takes the recipe's steps as a run does, without a run folder. Each rank writes what it has seen to FOLDER/RANK.json
(`app.tools.seen`). One process that takes whole global batches looks at the rules that one process can see, too
(`app.tools.own_rules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.errors import SamerunError, leave_with
from app.guard.lifeline import end_workers
from app.options.command_line import Parser
from app.place.inherited import own_environment
from app.place.launched import Launched, read
from app.recipe import recipe_file
from app.recipe.batching import BatchPlan
from app.recipe.recipe_file import LoadedRecipe


def main(argv: list[str] | None = None) -> None:
    """Examine the recipe's task; ends the process with the error's exit code if it cannot be trained."""
    parser = Parser(prog="python -m app.tools.rules")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    launched = Launched()
    try:
        arguments = parser.parse_all(argv)
        launched = read(own_environment())
        _examine(launched, recipe_file.load(arguments.recipe, arguments.overrides), arguments.out)
    except SamerunError as error:
        leave_with(error, launched.rank)
    finally:
        end_workers()


def _examine(launched: Launched, loaded: LoadedRecipe, out: Path) -> None:
    from app import building, session, tasks
    from app.checkpoints.shards import unwrapped
    from app.data.samples import Batch
    from app.feed import Feed
    from app.initial import filling
    from app.optim import from_recipe
    from app.optim.steps import Steps
    from app.optim.unused import FirstGradients
    from app.ranks import handshake, random_layers
    from app.ranks.runtime import Runtime
    from app.tools import own_rules
    from app.tools.seen import Seen

    recipe = loaded.recipe
    plan = BatchPlan.of(recipe, launched.data_ranks, tensor_parallel=launched.tensor_parallel)
    runtime = Runtime(launched, plan, clip_norm=recipe.optim.clip_norm)
    handshake.check_group(runtime.accelerator, launched, plan)
    task, data = building.open_data(runtime, recipe)
    parts = session.agree(runtime, loaded, task, data)
    depends = random_layers.topology_dependence(parts.model)
    seen = Seen(out / f"{launched.rank}.json", sources=tasks.digest(recipe.task), depends=depends)
    form = building.form_of(runtime, recipe, task)
    if plan.passes == 1:
        seen.broken += own_rules.broken(recipe, task, data.train, parts.model, form=form, device=runtime.device)
        seen.write()  # what follows may fail of it
    model, optimizer = filling.prepare(runtime, task, parts.model, from_recipe.build(recipe.optim, parts.model, parts.rule))
    first = FirstGradients(unwrapped(model), runtime.together)
    steps = Steps(runtime.accelerator, model, optimizer, clip_norm=recipe.optim.clip_norm, before_first=first.check)

    def watched(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            if isinstance(batch, dict):
                seen.fetched(batch)
            yield batch

    def see(_step: int, _number: int, batch: Batch) -> None:
        seen.made_ready(batch)

    feed = Feed(
        runtime,
        recipe,
        task,
        data.train,
        watched(building.training_batches(runtime, recipe, data.train, parts.length, 0)),
        form=form,
        dropout=parts.dropout,
        see=see,
        lap=lambda _: None,
        say=lambda _: None,
    )
    rate = building.learning_rate_of(recipe, parts.length)
    model.train()
    with feed:
        for step in range(parts.length.total_steps):
            for batch, weight in feed.of_step(step):
                numbers = batch["samples"].tolist()
                with steps.micro_batch():
                    loss = task.loss(model, batch)
                    steps.backward(loss.mean, weight)
                seen.passed(step, numbers, loss)
            seen.stepped(steps.take(rate(step)).grad_norm, feed.total)
    seen.write()
    del first, steps
    runtime.close(model, optimizer)


if __name__ == "__main__":
    main()
