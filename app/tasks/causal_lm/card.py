"""Model card of a language model. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.files import hub
from app.runs.model_card import CardFacts

_USE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
"""


def describe(facts: Mapping[str, Any], recipe: Mapping[str, Any]) -> CardFacts:
    """Return it, by the facts of the samples and the keys and values of the recipe."""
    tokenizer, length = facts["tokenizer"], facts["sequence_length"]
    sources = recipe.get("data.sources") or [{"path": path} for path in [recipe["data.path"]] if path]
    folders = ", ".join(f"`{Path(source['path']).name}`" for source in sources)
    model = hub.parsed(recipe["model.path"])
    kind = recipe["model.architecture"] or (model.name if model else Path(recipe["model.path"] or "").name)
    return CardFacts(
        title=f"A language model ({kind})",
        data=folders or "Moby Dick, the text that comes with Samerun",
        library="transformers",
        pipeline="text-generation",
        sample=f"rows of {length:,} tokens",
        more=f"Tokenizer: {tokenizer.get('name') or tokenizer['kind']}, {facts['vocab_size']:,} tokens.",
        use=_USE,
        also='`samerun generate THIS_FOLDER "text"` continues a text, and `samerun evaluate THIS_FOLDER` scores the model.\n',
    )
