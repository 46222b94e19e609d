"""Text classification: is a docstring from numpy or torch? An encoder of transformers, built from a config and not pretrained,
reads its bytes. Dropout is off: inside attention it cannot be the same on any number of processes.
"""

from dataclasses import dataclass
from inspect import getdoc

import numpy
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from samerun import Loss, Samples, Scores

LIBRARIES = (numpy, torch)
LENGTH = 128  # bytes that are read of each text


@dataclass(frozen=True)
class Model:
    width: int = 64
    layers: int = 2
    heads: int = 4


@dataclass(frozen=True)
class Sections:
    model: Model = Model()


class Text:
    monitor = ("accuracy", "max")

    def __init__(self, sections):
        self.sizes = sections.model

    def samples(self, split):
        label_of = {getdoc(getattr(it, name)): label for label, it in enumerate(LIBRARIES) for name in it.__all__}
        texts = sorted(text for text in label_of if text and len(text) >= LENGTH)
        chosen = [text for at, text in enumerate(texts) if {3: "validation", 4: "test"}.get(at % 5, "train") == split]
        tokens = torch.tensor([list(text.encode()[:LENGTH]) for text in chosen])
        return Samples.of({"tokens": tokens, "labels": torch.tensor([label_of[text] for text in chosen])})

    def model(self, metadata):
        sizes = {"hidden_size": self.sizes.width, "intermediate_size": 4 * self.sizes.width, "vocab_size": 256}
        depth = {"num_hidden_layers": self.sizes.layers, "num_attention_heads": self.sizes.heads}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(num_labels=len(LIBRARIES), max_position_embeddings=LENGTH, **sizes, **depth, **no_dropout)
        return BertForSequenceClassification(config)

    def loss(self, model, batch):
        return Loss(cross_entropy(model(batch["tokens"]).logits, batch["labels"]))

    def metrics(self, model, batch, valid):
        right = model(batch["tokens"]).logits.argmax(1) == batch["labels"]
        return Scores.of({"accuracy": right}, valid)


task = Text
