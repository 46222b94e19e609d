"""One program of a contest: trains in one way, with its steps counted and measured. Started by `benchmarks.contest` alone.

    python -m benchmarks.case CONNECTION THREADS TASK

CONNECTION is the number of a file descriptor, and TASK is JSON: `program`; `recipe` and `overrides`, whose data.path is a
folder where the process may also write; `photographs` if it has JPEG files, which worker processes decode; `linear` for a model
of one matrix; `channels_last`, and `compiled`, the backend that compiles blocks of text, for the hand-written loop (for Samerun
recipe and environment decide about these).

The peers do the same work as their documentation shows it, in as few lines as that takes. They load data in their own process,
and nothing is logged, saved or shown.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

from app.data import loader
from app.data.loader import num_workers
from app.environment import host
from app.files import other_libraries
from app.recipe import recipe_file
from app.tasks.causal_lm import configuration
from app.tasks.image_classification import models
from benchmarks.contest import HAND, SAMERUN

_FOREVER = 10**9
_LOOK_EVERY_S, _RESTING_CPU_S = 0.5, 0.025
"""Workers that wait look around every few seconds; one that decodes takes all of a core."""


class Meter:
    """Measures windows of steps, and waits between them until it is the program's turn again.

    Where worker processes make the batches, a window's answer comes when they rest: else they would take the cores of the next
    program. The next window begins with `lead_in` steps that are not measured, which use up what the workers had prepared.
    """

    def __init__(self, connection: Connection) -> None:
        self._turns, self.lead_in = self._windows(connection), 0

    def count(self) -> None:
        """Count a step that begins."""
        next(self._turns)

    def watch(self, model: nn.Module) -> None:
        """Count the forward passes in training mode of the module that is called in each step."""

        def counted(called: nn.Module, _inputs: Any) -> None:
            if called.training:
                self.count()

        model.register_forward_pre_hook(counted)

    def _windows(self, connection: Connection) -> Iterator[None]:
        yield
        connection.send({})  # after the first step
        while True:
            try:
                steps = connection.recv()
            except (EOFError, ConnectionError):
                os._exit(1)  # the command is gone; libraries that own the loop would catch an exception
            for _ in range(self.lead_in):
                yield
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            workers_s, wall_s, cpu_s = _workers_cpu_s(), _synchronized_s(), time.process_time()
            for _ in range(steps):
                yield
            wall_s, cpu_s = _synchronized_s() - wall_s, time.process_time() - cpu_s
            window = {"wall_s": wall_s, "cpu_s": cpu_s + _workers_cpu_s() - workers_s, **_memory()}
            if self.lead_in:
                _await_rest()
            connection.send(window)


def _synchronized_s() -> float:
    """Return the time when an accelerator, if any, has done all that it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def _memory() -> dict[str, float]:
    """Return the most bytes that torch's allocator gave out in the window, and that it held; on a CPU those of the process."""
    if torch.cuda.is_available():
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return dict.fromkeys(("allocated", "reserved"), float(psutil.Process().memory_info().rss))


def _workers_cpu_s() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def _await_rest() -> None:
    before_s, now_s = -1.0, _workers_cpu_s()
    while now_s - before_s > _RESTING_CPU_S:
        time.sleep(_LOOK_EVERY_S)
        before_s, now_s = now_s, _workers_cpu_s()


class Work:
    """Common part of the programs of images and of text.

    Each kind has `build` (the model), `loss` (of a batch), `batches` (on the device, as fast as that goes) and `dataset` (for a
    DataLoader).
    """

    build: Callable[[], Any]
    dataset: Callable[[], Any]

    def __init__(self, task: dict[str, Any], meter: Meter) -> None:
        self.task, self.meter = task, meter
        self.overrides = [*task["overrides"], f"train.steps={_FOREVER}"]
        self.recipe = recipe_file.load(task["recipe"], self.overrides).recipe
        self.folder = Path(self.recipe.sections.data.path)
        self.batch, self.clip_norm = self.recipe.train.global_batch_size, self.recipe.optim.clip_norm
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    def model(self) -> Any:
        """Return the model with its steps counted."""
        torch.manual_seed(0)
        model = self.build()
        self.meter.watch(model)
        return model

    def loader(self) -> DataLoader:
        """Return torch's loader, in this process: that takes the least CPU time."""
        return DataLoader(self.dataset(), self.batch, shuffle=True, drop_last=True)

    def optimizer(self, model: nn.Module, *, fused: bool | None = None) -> Any:
        """Return the recipe's optimizer as torch makes it, or with its fused kernel."""
        optim = self.recipe.optim
        kind: Any = torch.optim.AdamW
        own: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
        if optim.name == "sgd":
            kind, own = torch.optim.SGD, {"momentum": optim.momentum, "nesterov": optim.nesterov}
        return kind(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, fused=fused, **own)


class Images(Work):
    """Classification of images: an array in a file, torchvision's MNIST for the peers, or photographs."""

    def __init__(self, task: dict[str, Any], meter: Meter) -> None:
        super().__init__(task, meter)
        if task.get("photographs"):
            self.workers = num_workers(None, host.usable(1), self.device)
            # torch's DataLoader asks each worker for two batches at a time; of Samerun's, more are on their way to the device.
            meter.lead_in = 2 * self.workers + loader.PLACES + 1
            side = self.recipe.sections.data.image_size
            self.shape, self.classes = (3, side, side), len(list((self.folder / "train").iterdir()))
        else:
            self.images, labels = (np.load(self.folder / f"train/{name}.npy", mmap_mode="r") for name in ("images", "labels"))
            self.labels = torch.from_numpy(labels.copy())
            self.shape, self.classes = self.images.shape[1:], int(labels.max()) + 1

    def build(self) -> nn.Module:
        """Return the recipe's network, or one matrix."""
        if self.task.get("linear"):
            return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(self.shape)), self.classes))
        channels, *size = self.shape
        return models.build(self.recipe.sections.model, channels=channels, image_size=tuple(size), num_classes=self.classes)

    def loss(self, model: Callable[..., Any], batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def batches(self) -> Iterator[Any]:
        """Yield batches on the device, epoch after epoch."""
        layout = torch.channels_last if self.task.get("channels_last") else torch.contiguous_format
        data = self.recipe.sections.data
        mean, std = (torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (data.mean, data.std))

        def normalized(pixels: torch.Tensor) -> torch.Tensor:
            moved = pixels.to(self.device, non_blocking=True).to(torch.float32, memory_format=layout)
            return moved.div_(255).sub_(mean).div_(std)

        if self.task.get("photographs"):
            for pixels, labels in self._photographs():
                yield normalized(pixels), labels.to(self.device, non_blocking=True)
        on_device = self.device.type != "cpu"
        images = normalized(torch.from_numpy(self.images[: self.batch if on_device else None].copy()))
        labels = self.labels[: len(images)].to(self.device)
        if on_device:  # the same batch again: no feed is faster
            yield from itertools.repeat((images, labels))
        while True:
            for picked in torch.randperm(len(images))[: len(images) // self.batch * self.batch].split(self.batch):
                yield images[picked], labels[picked]

    def _photographs(self) -> DataLoader:
        """Return random crops, flipped, as torchvision's references make them in workers, epoch after epoch without a pause."""
        from torchvision import datasets
        from torchvision.transforms import v2

        area = self.recipe.sections.augment.resized_crop_min_area or 1.0
        changes = [v2.RandomResizedCrop(self.shape[1:], (area, 1.0)), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        photographs = datasets.ImageFolder(self.folder / "train", v2.Compose(changes))
        more: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.device.type == "cuda"}
        return DataLoader(photographs, self.batch, sampler=RandomSampler(photographs, num_samples=_FOREVER), **more)

    def dataset(self) -> Any:
        """Return the samples for a DataLoader."""
        from torchvision import transforms

        data = self.recipe.sections.data
        change = transforms.Compose([transforms.ToTensor(), transforms.Normalize(data.mean, data.std)])
        work = self

        class Grey(Dataset):  # as torchvision's MNIST
            def __len__(self) -> int:
                return len(work.images)

            def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
                return change(Image.fromarray(work.images[index, 0])), int(work.labels[index])

        return Grey()


class Text(Work):
    """A language model of transformers, on the tokens of a token folder."""

    def build(self) -> Any:
        """Return the recipe's network on the default device."""
        from transformers import AutoModelForCausalLM

        recipe, length = self.recipe.sections.model, self.recipe.sections.data.sequence_length
        config = configuration.network_config(recipe, vocab_size=recipe.vocab_size, sequence_length=length)
        config.use_cache = False
        model = other_libraries.untrained(AutoModelForCausalLM, config, attn_implementation=recipe.attention).train()
        if self.recipe.train.checkpoint_activations == "blocks":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def compile_blocks(self, model: Any, backend: str) -> None:
        """Compile each block in place."""
        for block in model.modules():
            if type(block).__name__ in model._no_split_modules:
                block.compile(backend=backend)

    def loss(self, model: Callable[..., Any], batch: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        logits = model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def batches(self) -> Iterator[Any]:
        """Yield batches on the device, epoch after epoch."""
        rows = self.dataset().to(self.device)
        return itertools.cycle(rows[: len(rows) // self.batch * self.batch].split(self.batch))

    def dataset(self) -> Any:
        """Return the samples for a DataLoader."""
        tokens = torch.from_numpy(np.fromfile(self.folder / "train.bin", np.uint16).astype(np.int64))
        length = self.recipe.sections.data.sequence_length
        return tokens.unfold(0, length + 1, length)


def hand_written(work: Any, *, fused: bool | None = None) -> None:
    """Nothing but torch; `fused` is the optimizer's option, None its default."""
    torch.manual_seed(0)
    with work.device:
        model = work.build()
    if work.task.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    if backend := work.task.get("compiled"):
        work.compile_blocks(model, backend)
    work.meter.watch(model)
    optimizer = work.optimizer(model, fused=fused)
    is_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    for batch in work.batches():
        with torch.autocast(work.device.type, torch.bfloat16, enabled=is_bf16):
            loss = work.loss(model, batch)
        loss.backward()
        if work.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def samerun(work: Any) -> None:
    """Train as `app.train` does, with all that it starts. No recipe has the linear model."""
    from app import loop, train

    if work.task.get("linear"):
        models.build = lambda *_, **__: work.build()
    take = loop._take_step

    def counted(*arguments: Any) -> Any:
        work.meter.count()
        return take(*arguments)

    loop._take_step = counted  # type: ignore[assignment]
    run_dir = Path(tempfile.mkdtemp(dir=work.folder), "run")
    # The turns of the others are no hang.
    words = ["--run-dir", str(run_dir), "--trackers", "none", "--hang-timeout", "86400"]
    train.main(["--recipe", work.task["recipe"], *words, *work.overrides])


def accelerate(work: Any) -> None:
    """Accelerate, after its examples (examples/cv_example.py of huggingface/accelerate)."""
    from accelerate import Accelerator

    accelerator, plain = Accelerator(), work.model()
    model, optimizer, loader = accelerator.prepare(plain, work.optimizer(plain), work.loader())
    while True:
        for batch in loader:
            accelerator.backward(work.loss(model, batch))
            if work.clip_norm:
                accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
            optimizer.step()
            optimizer.zero_grad()


def lightning(work: Any) -> None:
    """Lightning's Trainer, after lightning.ai/docs/pytorch, "Lightning in 15 minutes", without its logging."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, batch: Any, _index: int) -> Any:
            return work.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return work.optimizer(self)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, gradient_clip_val=work.clip_norm, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), work.loader())


def transformers(work: Any) -> None:
    """The Trainer of transformers, after huggingface.co/docs/transformers/trainer, with its default optimizer (fused AdamW)."""
    from transformers import Trainer, TrainingArguments

    optim, on_device = work.recipe.optim, work.device.type != "cpu"
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.folder), per_device_train_batch_size=work.batch, max_steps=_FOREVER,
        learning_rate=optim.lr, weight_decay=optim.weight_decay, max_grad_norm=work.clip_norm or 0.0,
        lr_scheduler_type="constant", dataloader_drop_last=True, dataloader_pin_memory=on_device,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not on_device,
        bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",
    )  # fmt: skip
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in work.dataset()]  # it shifts the labels itself
    Trainer(work.model(), arguments, train_dataset=rows).train()


PROGRAMS: dict[str, Callable[[Any], None]] = {
    HAND: functools.partial(hand_written, fused=True), "hand-written": hand_written, SAMERUN: samerun,
    "accelerate": accelerate, "lightning": lightning, "transformers": transformers,
}  # fmt: skip


def main(argv: list[str]) -> None:
    """Run the program of a task."""
    descriptor, threads, text = argv
    torch.set_num_threads(int(threads))
    task, meter = json.loads(text), Meter(Connection(int(descriptor)))
    is_text = recipe_file.load(task["recipe"], task["overrides"]).recipe.task == "causal_lm"
    PROGRAMS[task["program"]]((Text if is_text else Images)(task, meter))


if __name__ == "__main__":
    main(sys.argv[1:])
