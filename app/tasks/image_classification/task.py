"""Image classification: pictures with one label each, and the network that tells their classes apart.

Shapes: B samples in a batch, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.data.draws import Draws
from app.data.samples import Batch, Splits
from app.environment.topology import listed
from app.errors import DataError
from app.task import Form, Later, Loss, Scores, Split, Table, Task, Totals
from app.tasks.image_classification import models, predictions
from app.tasks.image_classification.data import images
from app.tasks.image_classification.data.augment import Preparation, check_channels
from app.tasks.image_classification.data.images import Data, Images
from app.tasks.image_classification.data.open import download_data, notes_on, open_staged, staged
from app.tasks.image_classification.sections import CONVNET, Sections


class ImageClassification(Task):
    """Tells to which of K classes a picture belongs."""

    monitor: tuple[str, Literal["max", "min"]] = ("accuracy", "max")
    """The best checkpoint is the one that is right most often."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self.channels_last = sections.model.name == CONVNET  # max-pooling on a CPU takes a fifth of its time so
        self._data: Data | None = None
        self._facts: Mapping[str, Any] = {}
        self._preparation: Preparation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_sections": self._sections}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_sections"])  # type: ignore[misc]

    # Data -------------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> ImageClassification:
        """Download what is missing and allowed, and copy the data to the node's disk if the recipe says so."""
        download_data(self._sections)
        return ImageClassification(staged(self._sections))

    def samples(self, split: Split) -> Images | None:
        """Open a split; all are opened at once, and checked against each other."""
        self._data = self._data or open_staged(self._sections)
        if split == "train" and split not in self._data:
            data = self._sections.data
            raise DataError(f"data.path={data.path} has no split data.train_split={data.train_split}: correct one of them")
        return self._data.get(split)

    def notes(self, data: Splits) -> list[str]:
        """Return a sentence for classes without a sample, and for files that are no pictures."""
        splits = {"train": data.train, "validation": data.validation, "test": data.test}
        return notes_on({split: images for split, images in splits.items() if images is not None})

    def adapt_samples(self, samples: Images, metadata: Mapping[str, Any]) -> Images:
        """Return the samples. Raises DataError unless they have the model's classes, channels and size."""
        data = self._sections.data
        source = f"data.source={data.source}, data.path={data.path}"
        if samples.channels != metadata["channels"] or (
            samples.image_size != tuple(metadata["image_size"]) and data.image_size is None
        ):
            now, then = (
                f"{facts['channels']} channels and {'x'.join(map(str, facts['image_size']))} pixels"
                for facts in (samples.facts, metadata)
            )
            raise DataError(
                f"the pictures of {source} have {now}, but the run was trained on {then}: set data.color and data.image_size "
                "to match"
            )
        if samples.classes != tuple(metadata["classes"]):
            differing = sorted({*samples.classes} ^ {*metadata["classes"]}) or list(samples.classes)
            raise DataError(
                f"the classes of {source} are not those that the run was trained on, in their order ({listed(differing, 5)} "
                "differ): give the data the same classes"
            )
        self._facts = metadata
        return samples

    def data_digests(self) -> dict[str, str]:
        """Return a digest of which samples are left out."""
        return images.digest(self._sections.data)

    # Model and loss ---------------------------------------------------------------------------------------------------

    def model(self, metadata: Mapping[str, Any]) -> nn.Module:
        """Return the recipe's network for pictures with this metadata: classes, channels, image_size."""
        self._facts = metadata
        self._preparation = None
        check_channels(self._sections.data, metadata["channels"])
        return models.build(
            self._sections.model,
            channels=metadata["channels"],
            image_size=tuple(metadata["image_size"]),
            num_classes=len(metadata["classes"]),
        )

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:
        """Return two pictures without content."""
        size = (2, metadata["channels"], *metadata["image_size"])
        numbers = torch.zeros(2, dtype=torch.int64, device="meta")
        return {"inputs": torch.empty(size, dtype=form.dtype, device="meta"), "targets": numbers, "samples": numbers}

    def preprocess(self, batch: Batch, rng: Draws | None, *, form: Form) -> Batch:
        """Return the batch with `inputs` [B, C, H, W] and `targets`: labels int64 [B], or shares of the classes [B, K]."""
        preparation = self._preparation or self._prepares(form)
        if rng is None:
            return {**batch, "inputs": preparation.evaluate(batch), "targets": batch["labels"]}
        inputs, targets = preparation.train(batch, rng)
        return {**batch, "inputs": inputs, "targets": targets}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean cross-entropy in nats, and with unmixed targets how many samples were classified right."""
        targets = batch["targets"]
        logits = model(batch["inputs"])
        mean = models.mean_loss(logits, targets, label_smoothing=self._sections.augment.label_smoothing)
        if targets.is_floating_point():
            return Loss(mean, targets.shape[0])
        answers = logits.detach().argmax(1)  # a CUDA graph writes the next logits over these
        return Loss(mean, targets.shape[0], {"accuracy": Later(_right, (answers, targets))})

    # Scores -----------------------------------------------------------------------------------------------------------

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return accuracy (over all and of each class), top-5 accuracy and loss; rows are label, prediction, probability."""
        labels, weights = batch["targets"], valid.double()
        logits = model(batch["inputs"]).double()
        num_classes = logits.shape[1]
        likeliest = logits.topk(min(5, num_classes), dim=1)
        best = likeliest.indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none")
        by_class = torch.zeros(2, num_classes, dtype=torch.float64, device=logits.device)
        for total, found in zip(by_class, (best[:, 0] * weights, weights), strict=True):
            total.index_add_(0, labels, found)
        count = weights.sum()
        sums = {
            "accuracy": (by_class[0].sum(), count),
            "top5_accuracy": ((best.any(dim=1) * weights).sum(), count),
            "loss": ((losses * weights).sum(), count),
            "class_accuracy": (by_class[0], by_class[1]),
        }
        probabilities = (likeliest.values[:, 0] - logits.logsumexp(dim=1)).exp()
        return Scores(sums, torch.stack([labels, likeliest.indices[:, 0], probabilities], dim=1))

    def reduce_metrics(self, sums: Totals, rows: Tensor | None) -> tuple[dict[str, float], dict[str, Table]]:  # noqa: ARG002
        """Return the scores, and the accuracy of each class."""
        scores = {name: (found / count).item() for name, (found, count) in sums.items() if found.ndim == 0}
        right, seen = (part.tolist() for part in sums["class_accuracy"])
        of_class = zip(self._facts["classes"], right, seen, strict=True)
        return scores, {"class_accuracy": {name: hits / count if count else None for name, hits, count in of_class}}

    # What people see --------------------------------------------------------------------------------------------------

    def preview(self, batch: Batch, limit: int) -> tuple[str, Any]:
        """Return the first pictures of a training batch side by side, each over its label."""
        assert self._preparation is not None, "no batch was prepared"
        pixels = self._preparation.pixels(batch["inputs"][:limit].detach()).cpu()
        texts = [predictions.text_of(target, self._facts["classes"]) for target in batch["targets"][:limit].detach().cpu()]
        return "augmented_batch", predictions.grid(pixels, texts)

    def write_outputs(self, folder: Path, samples: Images, rows: Tensor) -> None:
        """Write which classes were confused, and some pictures."""
        predictions.write(folder, samples, rows)

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the `top` most likely classes of each picture file, and their probabilities."""
        found, form = [], Form(next(model.parameters()).dtype)
        for file in inputs:
            image = predictions.image_of(file, self._facts, resize_size=self._sections.data.resize_size)
            none = torch.zeros(1, dtype=torch.int64)
            batch = self.preprocess({"images": image[None], "labels": none, "samples": none}, None, form=form)
            found.append(predictions.likeliest(model(batch["inputs"])[0], list(self._facts["classes"]), top=top))
        return found

    def _prepares(self, form: Form) -> Preparation:
        self._preparation = Preparation(
            self._sections.data,
            self._sections.augment,
            num_classes=len(self._facts["classes"]),
            channels=self._facts["channels"],
            dtype=form.dtype,
            channels_last=form.memory_format == torch.channels_last,
        )
        return self._preparation


def _right(answers: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return how many answers of each pass are right [P], and of how many, for classes [P, B] and labels [P, B]."""
    return (answers == labels).sum(-1), float(labels.shape[1])


task = ImageClassification
