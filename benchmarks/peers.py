"""The peers: the same work, as the documentation of each shows how to do it, in as few lines as that takes.

All are fed by torchvision's data set through torch's DataLoader, in their own process, and none logs, saves or shows progress:
whatever could be switched off for speed is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.work import Work


def accelerate(work: Work) -> None:
    """Accelerate, after its examples (examples/cv_example.py of huggingface/accelerate)."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(), work.model()
    model, optimizer, train, test = accelerator.prepare(model, work.optimizer(model), *work.loaders())
    for _ in work.epochs():
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for images, labels in test:
            accelerator.gather_for_metrics((model(images).argmax(1), labels))


def fabric(work: Work) -> None:
    """Lightning Fabric, after lightning.ai/docs/fabric, "Convert PyTorch code to Fabric"."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = work.model()
    train, test = fabric.setup_dataloaders(*work.loaders())
    network, optimizer = fabric.setup(model, work.optimizer(model))
    for _ in work.epochs():
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images), labels)
            fabric.backward(loss)
            optimizer.step()
    _score(network, test)


def lightning(work: Work) -> None:
    """Lightning's Trainer, after lightning.ai/docs/pytorch, "Lightning in 15 minutes", without its logging."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self)

    train, test = work.loaders()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=work.task.epochs or -1,
        num_sanity_val_steps=0,
        limit_val_batches=None if work.task.epochs else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), train, test)


def transformers(work: Work) -> None:
    """The Trainer of transformers, after huggingface.co/docs/transformers/trainer, with its default optimizer (fused AdamW)."""
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(logits := self.model(images), labels), "logits": logits}

    def collate(rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        images, labels = zip(*rows, strict=True)
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}

    optim = work.loaded.recipe.optim
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=work.task.folder),
        per_device_train_batch_size=work.batch,
        per_device_eval_batch_size=work.batch,
        num_train_epochs=work.task.epochs or 10**6,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    train, test = (work.dataset(training=training) for training in (True, False))
    trainer = Trainer(Classifier(), arguments, data_collator=collate, train_dataset=train, eval_dataset=test)
    trainer.train()
    trainer.evaluate()


def timm(work: Work) -> None:
    """timm's train.py (huggingface/pytorch-image-models), reduced to what it does in a step."""
    from timm.data import create_loader
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter

    model, optim = work.model(), work.loaded.recipe.optim
    mean, std = work.statistics
    train, test = (
        create_loader(
            work.dataset(training=training),
            input_size=(work.channels, work.height, work.width),
            batch_size=work.batch,
            is_training=training,
            no_aug=True,
            mean=mean,
            std=std,
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
            device=torch.device("cpu"),
        )
        for training in (True, False)
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=optim.lr, weight_decay=optim.weight_decay)
    loss_of, losses = nn.CrossEntropyLoss(), AverageMeter()
    for _ in work.epochs():
        model.train()
        for images, labels in train:
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.update(loss.item(), images.size(0))
    _score(model, test)


def torchvision(work: Work) -> None:
    """torchvision's references/classification/train.py, reduced to what it does in a step."""
    model, (train, test) = work.model(), work.loaders()
    optimizer, loss_of = work.optimizer(model), nn.CrossEntropyLoss()
    totals = dict.fromkeys(("loss", "acc1", "acc5"), 0.0)
    for _ in work.epochs():
        model.train()
        for images, labels in train:
            output = model(images)
            loss = loss_of(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.inference_mode():
                hits = output.topk(5, 1).indices.t() == labels[None]
                totals["acc1"] += hits[:1].flatten().sum(dtype=torch.float32).item()
                totals["acc5"] += hits.flatten().sum(dtype=torch.float32).item()
                totals["loss"] += loss.item()
    _score(model, test)


PEERS: dict[str, tuple[Callable[[Work], None], str]] = {
    "accelerate": (accelerate, "accelerate"),
    "fabric": (fabric, "lightning"),
    "lightning": (lightning, "lightning"),
    "transformers": (transformers, "transformers"),
    "timm": (timm, "timm"),
    "torchvision": (torchvision, "torchvision"),
}
"""Each peer's program and the package that it needs."""


def _score(model: nn.Module, test: Iterable[Any]) -> int:
    model.eval()
    with torch.no_grad():
        return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
