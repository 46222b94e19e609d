"""A training whose model sees its own answers: `sees_answer.py labels|mask`, and then what `app.train` takes."""

from __future__ import annotations

import sys
from typing import Any

from app import train
from app.tasks.causal_lm import task


class Labels(task.CausalLM):
    """Forgets to shift the labels: each token is to be told from itself."""

    def preprocess(self, *arguments: Any, form: Any) -> Any:
        batch = super().preprocess(*arguments, form=form)
        return {**batch, "labels": batch["input_ids"]}


class Mask(task.CausalLM):
    """Forgets the causal mask: each token is predicted from those after it, too."""

    def model(self, metadata: Any) -> Any:
        model = super().model(metadata)
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        return model


task.task = {"labels": Labels, "mask": Mask}[sys.argv.pop(1)]
train.main()
