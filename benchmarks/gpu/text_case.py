"""One process of the contests of `benchmarks.gpu.text`: trains a recipe's language model in one way, on the accelerator if any.

All train in bf16 with the fused AdamW and clipping on made-up tokens of the whole vocabulary, at the same sizes. The
hand-written loop has its rows on the device and needs no feed; the others look theirs up in memory. With `blocks` each computes
its layers again in the backward pass: Samerun by train.checkpoint_activations, the others as transformers does it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from app.tasks.causal_lm import configuration
from benchmarks.gpu.text import HAND, OURS, TRAINER
from benchmarks.language_case import CLIP, DECAY, FOREVER, LR, Work, samerun
from benchmarks.meter import Meter

_AGAIN = {"use_reentrant": False}


class Text(Work):
    """A recipe with these changes, on the tokens of a folder."""

    def load(self) -> LoadedRecipe:
        """Return the recipe, without what the programs do not have in common."""
        return recipe_file.load(self.task["recipe"], (*self.task["overrides"], *self.words()))

    def words(self) -> list[str]:
        """Return the values that all have."""
        return [
            f"data.path={self.task['folder']}", f"data.sequence_length={self.length}",
            f"train.global_batch_size={self.batch}", *(["train.checkpoint_activations=blocks"] if self.computes_again else []),
            f"train.steps={FOREVER}", "train.evaluate_every_epochs=0", "train.evaluate_every_steps=null", "optim.name=adamw",
            f"optim.lr={LR}", f"optim.weight_decay={DECAY}", f"optim.clip_norm={CLIP}", "optim.schedule=constant",
            "optim.warmup_steps=null", "optim.cosine_steps=null", "log.every_steps=50", "checkpoint.every_minutes=null",
        ]  # fmt: skip

    @property
    def computes_again(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return bool(self.task["checkpoint_activations"] == "blocks")

    def model(self) -> Any:
        """Return transformers' own network in float32, in training mode, on the default device, with its passes counted."""
        from transformers import AutoModelForCausalLM

        recipe = self.load().recipe.sections.model
        config = configuration.config_of(recipe, vocab_size=recipe.vocab_size, sequence_length=self.length)
        config.use_cache = False
        model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention).train()
        self.count(model)
        return model

    def rows(self) -> torch.Tensor:
        """Return rows of tokens, int64 [N, S + 1]."""
        tokens = torch.from_numpy(np.fromfile(Path(self.task["folder"], "train.bin"), np.uint16).astype(np.int64))
        return tokens.unfold(0, self.length + 1, self.length)


def hand_written(work: Text) -> None:
    """Nothing but torch and transformers' network."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with device:
        model = work.model()
    if work.computes_again:
        model.gradient_checkpointing_enable(_AGAIN)
    optimizer = work.optimizer(model, fused=True)
    rows = work.rows()
    batches = rows[: len(rows) // work.batch * work.batch].to(device).split(work.batch)
    while True:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(input_ids=batch[:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def trainer(work: Text) -> None:
    """The Trainer of transformers, with its default optimizer (fused AdamW); it shifts the labels itself."""
    from transformers import Trainer, TrainingArguments

    on_device = torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.task["folder"]), per_device_train_batch_size=work.batch, max_steps=FOREVER,
        learning_rate=LR, weight_decay=DECAY, max_grad_norm=CLIP, lr_scheduler_type="constant", dataloader_drop_last=True,
        dataloader_pin_memory=on_device, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        bf16=True, use_cpu=not on_device, gradient_checkpointing=work.computes_again, gradient_checkpointing_kwargs=_AGAIN,
    )  # fmt: skip
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in work.rows()]
    Trainer(work.model(), arguments, train_dataset=rows).train()


PROGRAMS = {HAND: hand_written, OURS: samerun, TRAINER: trainer}


def main(argv: list[str]) -> None:
    """Run the program of a task: the number of the file descriptor of its connection, its threads, and the task as JSON."""
    descriptor, threads, task = argv
    torch.set_num_threads(int(threads))
    told = json.loads(task)
    PROGRAMS[told["program"]](Text(told, Meter(Connection(int(descriptor)))))


if __name__ == "__main__":
    main(sys.argv[1:])
