"""Two optimizer steps of a transformers encoder of 30 million weights, as a training takes them, and what came of them.

Usage: encoder.py OUT LAYERS. Rank 0 writes to OUT, as JSON. LAYERS is `named` for the model as it is, which names its layers,
and `unnamed` for one that names none.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from app.optim import from_recipe
from app.optim.steps import Steps
from app.place.inherited import own_environment
from app.place.launched import read
from app.ranks import handshake
from app.ranks.runtime import Runtime
from app.recipe.batching import BatchPlan
from app.recipe.schema import OptimRecipe

SAMPLES, TOKENS, CLASSES, CLIP_NORM = 8, 32, 4, 1.0
# Plain steps, by which a gradient of a wrong size is seen; AdamW would hide it.
OPTIMIZER = OptimRecipe(name="sgd", lr=0.1, momentum=0.9)
# Without dropout: every rank would draw its own.
ENCODER = BertConfig(
    hidden_size=384,
    num_hidden_layers=10,
    num_attention_heads=6,
    intermediate_size=1536,
    num_labels=CLASSES,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Unnamed(torch.nn.Module):
    """The encoder in a module of one's own, without the names of its layers."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        for part in encoder.modules():
            if isinstance(part, PreTrainedModel):
                part._no_split_modules = None

    def forward(self, tokens: torch.Tensor) -> object:
        return self.encoder(tokens)


def main(out: Path, layers: str) -> None:
    launched = read(own_environment())
    plan = BatchPlan(global_batch_size=SAMPLES, world_size=launched.world_size, accumulation=1)
    runtime = Runtime(launched, plan, clip_norm=CLIP_NORM)
    runtime.seed(0)
    encoder = BertForSequenceClassification._from_config(ENCODER)
    tokens, labels = torch.randint(ENCODER.vocab_size, (SAMPLES, TOKENS)), torch.randint(CLASSES, (SAMPLES,))
    own = slice(launched.rank * plan.micro_batch, (launched.rank + 1) * plan.micro_batch)
    whole = encoder if layers == "named" else Unnamed(encoder)
    found: dict[str, object] = {
        "weights": sum(parameter.numel() for parameter in whole.parameters()),
        "digest": handshake.weights_digest(encoder),
    }

    model, optimizer = runtime.prepare(whole, from_recipe.build(OPTIMIZER, whole))
    handshake.check_prepared(runtime.accelerator, launched, model, CLIP_NORM)
    steps = Steps(runtime.accelerator, model, optimizer, clip_norm=CLIP_NORM)
    losses, norms = [], []
    for _ in range(2):  # the second shows what the first made of the weights
        with steps.micro_batch():
            loss = torch.nn.functional.cross_entropy(model(tokens[own]).logits, labels[own])
            steps.backward(loss)
        losses.append(sum(runtime.gather(loss.item())) / launched.world_size)
        norms.append(float(steps.take().grad_norm))

    found |= {"losses": losses, "norms": norms}
    found["units"] = Counter(type(part).__name__ for part in model.modules() if isinstance(part, FSDPModule))
    if runtime.is_main:
        out.write_text(json.dumps(found))
    del model, optimizer, steps, whole, encoder
    runtime.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
