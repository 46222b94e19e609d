"""One process of `python -m benchmarks.language`: trains a tiny Llama of transformers in one way, measured.

All have the same initial weights and rows, AdamW at a constant rate with clipping, and the next token's loss. What each needs
beyond that it has as its documentation shows it, without logging, saving and progress bars.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from app.recipe import recipe_file
from app.recipe.recipe_file import LoadedRecipe
from app.tasks.causal_lm.data.embedded import open_embedded
from benchmarks.figures import OURS, REFERENCE
from benchmarks.meter import Meter

LR, DECAY, CLIP, FOREVER = 1e-3, 0.0, 1.0, 10**7


class Work:
    """What a program needs."""

    def __init__(self, task: dict[str, Any], meter: Meter) -> None:
        self.task, self._meter = task, meter
        self.batch, self.length = int(task["batch"]), int(task["length"])

    def words(self) -> list[str]:
        """Return the recipe's values, as `app.train` takes them."""
        given = self.task["network"]
        model = [f"model.{key}={value}" for key, value in given.items()]
        return [
            *model, "model.architecture=llama", f"data.sequence_length={self.length}", f"train.global_batch_size={self.batch}",
            f"train.steps={FOREVER}", "train.evaluate_every_epochs=0", "train.evaluate_every_steps=null", "optim.name=adamw",
            f"optim.lr={LR}", f"optim.weight_decay={DECAY}", f"optim.clip_norm={CLIP}", "optim.schedule=constant",
            "optim.warmup_steps=null", "log.every_steps=50", "checkpoint.every_minutes=null", "model.tie_embeddings=false",
        ]  # fmt: skip

    def load(self) -> LoadedRecipe:
        """Return the recipe with these values."""
        return recipe_file.load("lm_tiny", self.words())

    def model(self) -> Any:
        """Return transformers' own network, on the CPU, in training mode, with its forward passes counted."""
        from transformers import LlamaConfig, LlamaForCausalLM

        given = self.task["network"]
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=given["hidden_size"],
                num_hidden_layers=given["layers"],
                num_attention_heads=given["heads"],
                num_key_value_heads=given["heads"],
                intermediate_size=given["intermediate_size"],
                vocab_size=given["vocab_size"],
                max_position_embeddings=self.length,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).train()
        self.count(model)
        return model

    def count(self, model: nn.Module) -> None:
        """Measure the steps of what is called in each."""
        self._meter.watch(model)

    def rows(self) -> torch.Tensor:
        """Return the rows of the embedded text, int64 [N, S + 1]."""
        tokens = torch.from_numpy(open_embedded("train").tokens.astype("int64"))
        return tokens[: (len(tokens) - 1) // self.length * self.length + 1].unfold(0, self.length + 1, self.length)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches, int64 [B, S + 1], looked up in memory, epoch after epoch."""
        rows = self.rows()
        while True:
            order = torch.randperm(len(rows))
            for at in range(0, len(rows) - self.batch + 1, self.batch):
                yield rows[order[at : at + self.batch]]

    def optimizer(self, model: nn.Module, *, fused: bool | None) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=fused)


def hand_written(work: Work, *, fused: bool | None = None) -> None:
    """Nothing but torch and transformers' network."""
    model = work.model()
    optimizer = work.optimizer(model, fused=fused)
    for rows in work.batches():
        logits = model(input_ids=rows[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def samerun(work: Work) -> None:
    """Train as `app.train` does, by its parts."""
    from app import building, ending, opening, session
    from app.guard.watchdog import Watchdog
    from app.loop import train
    from app.place.launched import read
    from app.ranks.runtime import Runtime
    from app.recipe.batching import BatchPlan

    launched, loaded = read(os.environ), work.load()
    recipe = loaded.recipe
    runtime = Runtime(launched, BatchPlan.of(recipe, launched.world_size), clip_norm=recipe.optim.clip_norm)
    task, data = building.open_data(runtime, recipe)
    parts = session.agree(runtime, loaded, task, data)
    place = runtime.from_main(tempfile.mkdtemp(prefix="run-", dir=work.task["folder"]))
    opened = opening.open_run_folder(runtime, loaded, task, data, place, trackers=(), origin=None, look_again=None)
    training = session.prepare(runtime, loaded, task, data, parts, opened)
    work.count(training.model)
    with training.control:
        with training.metrics.timed(), Watchdog(runtime, opened.claim, timeout_s=24 * 3600):
            ended = train(training)
        ending.finish(training, data, opened, ended)


def transformers(work: Work) -> None:
    """The Trainer of transformers, with its default optimizer (fused AdamW)."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.task["folder"]), per_device_train_batch_size=work.batch, max_steps=FOREVER,
        learning_rate=LR, weight_decay=DECAY, max_grad_norm=CLIP, lr_scheduler_type="constant", dataloader_drop_last=True,
        dataloader_pin_memory=False, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in work.rows()]  # it shifts them itself
    Trainer(work.model(), arguments, train_dataset=rows).train()


def lightning(work: Work) -> None:
    """Lightning's Trainer."""
    import lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, rows: Any, _index: int) -> torch.Tensor:
            logits = self.model(input_ids=rows[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self, fused=None)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, num_sanity_val_steps=0, limit_val_batches=0, logger=False,
        gradient_clip_val=CLIP, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows: Any = work.rows()
    trainer.fit(Module(), DataLoader(rows, work.batch, shuffle=True, drop_last=True))


def litgpt(work: Work) -> None:
    """LitGPT's way (litgpt/pretrain.py): Fabric, its clipping, and a loss that is kept for the log; our network."""
    import lightning
    from torch.utils.data import DataLoader

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(work.model())
    optimizer = fabric.setup_optimizers(work.optimizer(model, fused=True))
    rows: Any = work.rows()
    loader = fabric.setup_dataloaders(DataLoader(rows, work.batch, shuffle=True, drop_last=True))
    running = torch.zeros(())
    while True:
        for batch in loader:
            with fabric.no_backward_sync(model, enabled=False):
                logits = model(input_ids=batch[:, :-1].contiguous()).logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].contiguous().flatten())
                fabric.backward(loss)
            running += loss.detach()
            fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()


PROGRAMS: dict[str, tuple[Callable[[Work], None], str]] = {
    REFERENCE: (lambda work: hand_written(work, fused=True), "torch"),
    "hand-written": (hand_written, "torch"),
    OURS: (samerun, "torch"),
    "transformers": (transformers, "transformers"),
    "lightning": (lightning, "lightning"),
    "litgpt's way": (litgpt, "lightning"),
}
"""Each program and the package that it needs."""


def main(argv: list[str]) -> None:
    """Run the program of a task: the number of the file descriptor of its connection, its threads, and the task as JSON."""
    descriptor, threads, task = argv
    torch.set_num_threads(int(threads))
    told = json.loads(task)
    PROGRAMS[told["program"]][0](Work(told, Meter(Connection(int(descriptor)))))


if __name__ == "__main__":
    main(sys.argv[1:])
