"""A task of one's own whose model is drawn unit by unit: tiny models of transformers that learn a row of numbers by heart."""

from dataclasses import dataclass

import torch
from drawn_models import gpt2, init, llama

from app.task import Loss, Samples


@dataclass(frozen=True)
class Model:
    kind: str = "llama"


@dataclass(frozen=True)
class Sections:
    model: Model = Model()


class Text:
    def __init__(self, sections):
        self.kind = sections.model.kind

    def samples(self, split):
        places = torch.arange(64)[:, None] * 7 + torch.arange(12)[None]
        return None if split == "validation" else Samples.of({"tokens": (places * places + 3 * places) % 101})

    def model(self, metadata):
        return gpt2() if self.kind == "gpt2" else llama()

    def init_module(self, model, name, module):
        init(model, module)

    def loss(self, model, batch):
        tokens = batch["tokens"]
        return Loss(model(tokens, labels=tokens, use_cache=False).loss, len(tokens))


task = Text
