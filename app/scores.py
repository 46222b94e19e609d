"""Exact evaluation: every sample counts exactly once, on any number of processes.

The ranks get equal shares because padding fills them up; padded samples have weight 0, and what is added up over the ranks
are counts and sums, never means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from app.data.augment import Preparation
from app.data.loader import Batch, Failure, batches_of
from app.errors import DataError
from app.ranks.runtime import Runtime


@dataclass(frozen=True)
class Evaluation:
    """What a model scores on a data set."""

    samples: int
    """Samples counted."""
    accuracy: float
    """Share of the samples whose most likely class is right, 0..1."""
    top5_accuracy: float
    """Share of the samples whose class is among the five most likely, 0..1."""
    loss: float
    """Mean cross-entropy of a sample, in nats."""
    class_accuracy: tuple[float | None, ...]
    """Accuracy on the samples of each class; None for a class without samples."""
    own: torch.Tensor = field(compare=False, repr=False)
    """float64 [4, samples of this rank]: index (-1 is padding), label, predicted class, and its probability 0..1."""

    def as_metrics(self) -> dict[str, float]:
        """Return the scores by the names they have in the run folder."""
        return {"test_accuracy": self.accuracy, "test_top5_accuracy": self.top5_accuracy, "test_loss": self.loss}


@torch.no_grad()
def evaluate(
    runtime: Runtime,
    model: torch.nn.Module,
    loader: Iterable[Batch | Failure],
    preparation: Preparation,
    *,
    size: int,
    num_classes: int,
) -> Evaluation:
    """Return the scores of `model` on the `size` samples of a prepared `loader`; all ranks call it and get the same.

    Raises DataError if not every sample was counted exactly once.
    """
    was_training = model.training
    runtime.average_buffers(model)
    model.eval()
    # Counts per class: seen, right, right among five; and in the last row the loss. Exact in float64 up to 2**53 samples.
    totals = torch.zeros(4, num_classes, dtype=torch.float64, device=runtime.device)
    own: list[torch.Tensor] = []
    for batch in batches_of(loader):
        runtime.alive()
        labels, weights = batch["labels"], (batch["samples"] >= 0).double()
        logits = model(preparation.evaluate(batch)).double()
        likeliest = logits.topk(min(5, num_classes), dim=1)
        best = likeliest.indices == labels[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none")
        for total, score in zip(totals, (torch.ones_like(losses), best[:, 0], best.any(dim=1), losses), strict=True):
            total.index_add_(0, labels, score * weights)
        probabilities = (likeliest.values[:, 0] - logits.logsumexp(dim=1)).exp()
        own.append(torch.stack([batch["samples"], labels, likeliest.indices[:, 0], probabilities]))
    model.train(was_training)
    return _scores(runtime.accelerator.reduce(totals, "sum"), size, torch.cat(own, dim=1))


def _scores(totals: torch.Tensor, size: int, own: torch.Tensor) -> Evaluation:
    seen, right, right_of_five, loss = totals.tolist()
    counted = int(sum(seen))
    if counted != size:
        raise DataError(f"the evaluation counted {counted} samples of a data set of {size}: the loader lost or repeated some.")
    return Evaluation(
        samples=counted,
        accuracy=sum(right) / counted,
        top5_accuracy=sum(right_of_five) / counted,
        loss=sum(loss) / counted,
        class_accuracy=tuple(hits / count if count else None for hits, count in zip(right, seen, strict=True)),
        own=own,
    )
