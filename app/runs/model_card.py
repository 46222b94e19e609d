"""The model card beside exported weights: README.md in the hub's format (https://huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.files import hub

FILE = "README.md"
LOADED_BY_US = """\
from pathlib import Path
from app.checkpoints import stored_weights  # where Samerun is installed

task, model, facts = stored_weights.load(Path("THIS_FOLDER"))
"""
"""Three lines that load any exported model, in evaluation mode on the CPU."""


@dataclass(frozen=True)
class CardFacts:
    """Facts that only a task knows about its model: its module `card` returns them, without torch."""

    title: str
    data: str
    """The training data in words, no path."""
    library: str = "samerun"
    pipeline: str | None = None
    """The hub's name for what the model does."""
    dataset: str | None = None
    """The data's name on the hub, if it is from there."""
    sample: str = "samples"
    """Name of the samples, in the plural."""
    more: str = ""
    """Sentences on the training beside that."""
    use: str = LOADED_BY_US
    also: str = ""
    """Further notes for a user, as Markdown."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that describe the model to other libraries, by name."""


def written(card: CardFacts, weights: Mapping[str, Any]) -> bytes:
    """Return the card. `weights` has `recipe` (its keys and values), `steps`, `scores` by name, and `run` (run.json, or {}).

    It may have `program`: how a program beside the weights is loaded, as Markdown.
    """
    recipe, steps = weights["recipe"], weights["steps"]
    batch = recipe["train.global_batch_size"]
    origin = recipe["train.init_from"] or ""  # of a path the last part, not where it is on the machine that trained
    origin = Path(origin).name if origin.startswith(("/", "~", "$", "..")) else origin
    begun = f", from the weights of `{origin}`" if origin else ""
    rows = "".join(f"| {name.replace('_', ' ')} | {value:.4f} |\n" for name, value in weights["scores"].items())
    return f"""\
---
{_front(card, weights)}
---

# {card.title}

Trained with Samerun on {card.data}{begun}: {steps:,} steps of {batch:,} {card.sample}.{f" {card.more}" if card.more else ""}

{f"| score | |{chr(10)}|---|---|{chr(10)}{rows}" if rows else "It was not scored."}
## Use

```python
{card.use}```

{weights.get("program", "")}
{card.also}
## Training

{_training(weights)}
`recipe.yaml` has every key of the recipe, and the paths of the machine that trained.

## Share

```bash
hf upload USER/NAME THIS_FOLDER  # or samerun export RUN --push USER/NAME
```
""".encode()


def _front(card: CardFacts, weights: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData  # here: the first step need not wait for it

    # The hub refuses a base model that is not one of its own names, such as a folder.
    base = hub.parsed(weights["recipe"]["train.init_from"])
    data = ModelCardData(
        library_name=card.library,
        license="unknown",
        base_model=base.name if base else None,
        pipeline_tag=card.pipeline,
        tags=["samerun"],
        datasets=[card.dataset] if card.dataset else None,
    )
    return data.to_yaml(original_order=["library_name", "license", "base_model", "pipeline_tag", "tags", "datasets"])


def _training(weights: Mapping[str, Any]) -> str:
    """Return a table of how it was trained, of what is known."""
    recipe, run = weights["recipe"], weights["run"]
    rows = {
        "recipe": run.get("recipe"),
        "global batch": recipe["train.global_batch_size"],
        "steps": weights["steps"],
        "replayed": weights.get("replayed"),
        "seed": recipe["seed"],
        "preset": run.get("preset"),
        "processes": run.get("world_size"),
        "precision": run.get("mixed_precision"),
        "commit": run.get("commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()) or None,
    }
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value is not None)
