"""Image classification: images with one label each, and the network that tells their classes apart.

Shapes: B samples in a batch, C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F

from app.data.data_files import reading
from app.data.draws import Draws
from app.data.samples import Batch, Splits
from app.environment.topology import listed
from app.errors import DataError, RecipeError
from app.task import Form, Loss, Scores, Split, Table, Task, Totals
from app.tasks.image_classification import models, predictions, timm_models
from app.tasks.image_classification.data import images
from app.tasks.image_classification.data.augment import Preparation
from app.tasks.image_classification.data.decoding import Framing, as_pillow, decode, resize
from app.tasks.image_classification.data.images import Data, Images
from app.tasks.image_classification.data.open import download_data, notes_on, open_staged, staged
from app.tasks.image_classification.sections import CONVNET, ModelRecipe, Sections


class ImageClassification(Task):
    """Predicts to which of K classes an image belongs."""

    monitor: tuple[str, Literal["max", "min"]] = ("accuracy", "max")
    """The best checkpoint is the one that is right most often."""

    def __init__(self, sections: Sections) -> None:
        self._sections = sections
        self.channels_last = sections.model.name == CONVNET  # max-pooling on a CPU takes a fifth of its time so
        self.blocks = (block,) if (block := models.block_class(sections.model.name)) else None
        self._data: Data | None = None
        self._facts: Mapping[str, Any] = {}
        self._preparation: Preparation | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageClassification, (self._sections,)

    def model_defaults(self, left_out: Collection[str], init_from: str | None) -> tuple[Mapping[str, Any], str]:
        """Return values of the model for keys of a recipe that leaves out some, and their origin. Raises RecipeError."""
        return timm_models.preprocessing(self._sections.model.name, self._sections.data, left_out, init_from)

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

    def metadata_without_data(self) -> None:
        """Raise DataError if data.path is not set: the recipe alone does not define the number of classes."""
        data = self._sections.data
        if data.path is None:
            raise DataError(
                f"without the images of data.source={data.source} the number of classes is unknown: give data.path, or "
                f"plan for K classes by data.source=fakedata data.fake_classes=K data.image_size={data.image_size or 'SIDE'}"
            )

    def notes(self, data: Splits) -> list[str]:
        """Return a sentence for keys without effect, for classes without a sample, and for files that are no images."""
        model, splits = self._sections.model, {"train": data.train, "validation": data.validation, "test": data.test}
        default = vars(ModelRecipe(name=model.name))
        unused = [f"model.{key}" for key in default if model.name != CONVNET and vars(model)[key] != default[key]]
        notes = [f"{model.name} does not use {', '.join(unused)}"] * bool(unused)
        return notes + notes_on({split: images for split, images in splits.items() if images is not None})

    def adapt_samples(self, samples: Images, metadata: Mapping[str, Any]) -> Images:
        """Return the samples. Raises DataError unless they have the model's classes, channels and size."""
        data = self._sections.data
        source = f"data.source={data.source}, data.path={data.path}"
        channels, size = metadata["channels"], tuple(metadata["image_size"])
        if samples.channels != channels or (samples.image_size != size and data.image_size is None):
            raise DataError(
                f"the images of {source} have {samples.channels} channels and {samples.image_size} pixels (height, width), but "
                f"the run was trained on {channels} and {size}: set data.color and data.image_size to match"
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
        """Return the recipe's network for images with this metadata: classes, channels, image_size."""
        self._facts = metadata
        self._preparation = None
        channels = metadata["channels"]
        for key, values in (("data.mean", self._sections.data.mean), ("data.std", self._sections.data.std)):
            if len(values) not in (1, channels):
                raise RecipeError(f"{key} has {len(values)} values, and images {channels} channel(s): give one or {channels}")
        size, classes = tuple(metadata["image_size"]), metadata["classes"]
        return models.build(self._sections.model, channels=channels, image_size=size, num_classes=len(classes))

    def example(self, metadata: Mapping[str, Any], form: Form) -> Batch:
        """Return two images without content."""
        size = (2, metadata["channels"], *metadata["image_size"])
        numbers = torch.zeros(2, dtype=torch.int64, device="meta")
        return {"inputs": torch.empty(size, dtype=form.dtype, device="meta"), "targets": numbers, "samples": numbers}

    def preprocess(self, batch: Batch, rng: Draws | None, *, form: Form) -> Batch:
        """Return the batch with `inputs` [B, C, H, W] and `targets`: labels int64 [B], or shares of the classes [B, K]."""
        if self._preparation is None:
            self._preparation = Preparation(
                self._sections.data,
                self._sections.augment,
                num_classes=len(self._facts["classes"]),
                channels=self._facts["channels"],
                dtype=form.dtype,
                channels_last=form.memory_format == torch.channels_last,
            )
        if rng is None:
            return {**batch, "inputs": self._preparation.evaluate(batch), "targets": batch["labels"]}
        inputs, targets = self._preparation.train(batch, rng)
        return {**batch, "inputs": inputs, "targets": targets}

    def loss(self, model: Callable[..., Any], batch: Batch) -> Loss:
        """Return the mean cross-entropy in nats, and with unmixed targets how many samples were classified right."""
        targets = batch["targets"]
        logits = model(batch["inputs"])
        mean = models.mean_loss(logits, targets, label_smoothing=self._sections.augment.label_smoothing)
        if targets.is_floating_point():
            return Loss(mean, targets.shape[0])
        return Loss(mean, targets.shape[0], {"accuracy": ((logits.detach().argmax(1) == targets).sum(), targets.shape[0])})

    # Scores -----------------------------------------------------------------------------------------------------------

    def metrics(self, model: Callable[..., Any], batch: Batch, valid: Tensor) -> Scores:
        """Return accuracy (over all and of each class), top-5 accuracy of more than 5 classes, and loss.

        Rows are label, prediction, probability.
        """
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
            **({"top5_accuracy": ((best.any(dim=1) * weights).sum(), count)} if num_classes > 5 else {}),
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
        """Return the first images of a training batch side by side, each over its label."""
        assert self._preparation is not None, "no batch was prepared"
        pixels = self._preparation.pixels(batch["inputs"][:limit].detach()).cpu()
        texts = [_target_text(target, self._facts["classes"]) for target in batch["targets"][:limit].detach().cpu()]
        return "augmented_batch", _grid(pixels, texts)

    def write_outputs(self, folder: Path, samples: Images, rows: Tensor) -> None:
        """Write which classes were confused, and some images."""
        predictions.write(folder, samples, rows)

    def predict(self, model: nn.Module, inputs: Sequence[Path], *, top: int) -> list[tuple[str, dict[str, Any]]]:
        """Return the `top` most likely classes of each image file, and their probabilities. Raises DataError."""
        found, form, classes = [], Form(next(model.parameters()).dtype), self._facts["classes"]
        height, width = self._facts["image_size"]
        framing = replace(Framing.of(self._sections, training=False), image_size=height)
        for file in inputs:
            with reading(file):
                content = file.read_bytes()
            image = decode(content, channels=self._facts["channels"], name=str(file))
            image = framing.fixed(image) if height == width else resize(image, (height, width), framing.interpolation)
            none = torch.zeros(1, dtype=torch.int64)
            batch = self.preprocess({"images": image[None], "labels": none, "samples": none}, None, form=form)
            probabilities, best = model(batch["inputs"])[0].softmax(dim=0).topk(min(top, len(classes)))
            names, shares = [classes[index] for index in best.tolist()], probabilities.tolist()
            words = "  ".join(f"{name} {share:.3f}" for name, share in zip(names, shares, strict=True))
            found.append((words, {"classes": names, "probabilities": shares}))
        return found


_TILE_SIDE, _MARGIN, _LINE = 96, 4, 14
"""Size of a sample in a grid, space between samples, and height of a line of text in Pillow's own font, in pixels."""


def _grid(pixels: Tensor, texts: Sequence[str]) -> np.ndarray:
    """Return an image, uint8 [H, W, 3]: samples, uint8 [n, C, H, W], side by side, each over its text."""
    columns = math.ceil(math.sqrt(len(texts)))
    rows = math.ceil(len(texts) / columns)
    width, height = _TILE_SIDE + _MARGIN, _TILE_SIDE + _LINE + _MARGIN
    whole = Image.new("RGB", (columns * width + _MARGIN, rows * height + _MARGIN), "white")
    for position, (sample, text) in enumerate(zip(pixels, texts, strict=True)):
        tile = Image.new("RGB", (_TILE_SIDE, _TILE_SIDE + _LINE), "white")  # which cuts off a long text
        tile.paste(ImageOps.contain(as_pillow(sample).convert("RGB"), (_TILE_SIDE, _TILE_SIDE), Image.Resampling.NEAREST))
        ImageDraw.Draw(tile).text((0, _TILE_SIDE), text, fill="black")
        row, column = divmod(position, columns)
        whole.paste(tile, (_MARGIN + column * width, _MARGIN + row * height))
    return np.asarray(whole)


def _target_text(target: Tensor, classes: Sequence[str]) -> str:
    """Return the class of a sample, or the two that it is mixed from with their shares."""
    if target.ndim == 0:
        return classes[int(target)]
    shares, numbers = target.topk(2)
    names = [classes[int(number)] for number in numbers]
    if shares[1] < 0.005:
        return names[0]
    return " + ".join(f"{name} {share:.0%}" for name, share in zip(names, shares.tolist(), strict=True))


task = ImageClassification
