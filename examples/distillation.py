"""Distillation: a small network learns from a large one, which is frozen and part of the model that `loss` calls."""

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from safetensors.torch import load_file
from torch import nn, tensor
from torch.nn.functional import cross_entropy, kl_div

from samerun import Loss, Samples


@dataclass(frozen=True)
class Model:
    width: int = 256
    teacher: str | None = None
    "Weights of a teacher of width 256: model.safetensors of its run. None: no teacher."


@dataclass(frozen=True)
class Sections:
    model: Model = Model()


class Network(nn.Module):
    def __init__(self, width, teacher=None):
        super().__init__()
        self.layers, self.teacher = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10)), teacher

    def forward(self, inputs):
        return self.layers(inputs), self.teacher and self.teacher(inputs)[0]


class Distillation:
    def __init__(self, sections):
        self.width, self.teacher = sections.model.width, sections.model.teacher

    def samples(self, split):
        digits = np.load(files("app.tasks.image_classification.data") / "digits.npz")
        chosen = {"train": slice(1000), "validation": slice(1000, 1400), "test": slice(1400, None)}[split]
        inputs = tensor(digits["images"][chosen] / 16).float().flatten(1)
        return Samples.of({"inputs": inputs, "labels": tensor(digits["labels"][chosen]).long()})

    def model(self, metadata):
        if self.teacher is None:
            return Network(self.width)
        teacher = Network(Model.width).requires_grad_(False)
        teacher.load_state_dict(load_file(self.teacher))
        return Network(self.width, teacher)

    def loss(self, model, batch):
        answers, taught = model(batch["inputs"])
        loss, right = cross_entropy(answers, batch["labels"]), answers.argmax(1) == batch["labels"]
        if taught is not None:
            loss = loss + kl_div(answers.log_softmax(1), taught.log_softmax(1), log_target=True, reduction="batchmean")
        return Loss(loss, len(right), {"accuracy": (right.sum(), len(right))})


task = Distillation
