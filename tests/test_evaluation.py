"""Evaluation against what is written out by hand, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.distributed.runtime import Runtime
from app.environment.launched import Launched
from app.errors import DataError
from app.evaluation import evaluate, number
from app.recipe.schema import BatchPlan
from app.task import Form
from app.tasks.image_classification.sections import Sections
from app.tasks.image_classification.task import ImageClassification

CLASSES = 7


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, data_ranks=1, accumulation=1))


def task() -> ImageClassification:
    made = ImageClassification(Sections())
    made.model({"classes": list(map(str, range(CLASSES))), "channels": 1, "image_size": [4, 4]})
    return made


def batches(images: torch.Tensor, labels: torch.Tensor, size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of `size`, the last one padded with samples numbered -1 that must not count."""
    padding = -len(labels) % size
    numbers = torch.cat([torch.arange(len(labels)), torch.full((padding,), -1)])
    indices = numbers.clamp(min=0)
    parts = zip(images[indices].split(size), labels[indices].split(size), numbers.split(size), strict=True)
    return [{"images": image, "labels": label, "samples": number} for image, label, number in parts]


def test_huge_scores_are_short() -> None:
    values = (0.00091, 2.5, 6.578625514e27, float("inf"))
    assert list(map(number, values)) == ["0.0009", "2.5000", "6.5786e+27", "inf"]


@pytest.mark.parametrize("size", [1, 4, 10, 64])
def test_scores_are_those_written_out_by_hand(runtime: Runtime, size: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (23, 1, 3, 3), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES - 1, (23,))  # the last class has no samples
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, CLASSES))
    found = evaluate(runtime, task(), model, batches(images, labels, size), split="test", size=23, form=Form())

    inputs = ((images.double() / 255 - 0.5) / 0.25).reshape(23, 9).numpy()
    logits = inputs @ model[1].weight.detach().double().numpy().T + model[1].bias.detach().double().numpy()
    truth = labels.numpy()
    ranks = (logits > logits[np.arange(23), truth][:, None]).sum(axis=1)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(23), truth]
    assert found.samples == 23
    assert found.scores["accuracy"] == pytest.approx((ranks == 0).mean())
    assert found.scores["top5_accuracy"] == pytest.approx((ranks < 5).mean())
    assert found.scores["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found.as_metrics() == {f"test_{name}": score for name, score in found.scores.items()}
    (of_class,) = found.tables.values()
    for label in range(CLASSES - 1):
        assert of_class[str(label)] == pytest.approx((ranks[truth == label] == 0).mean())
    assert of_class[str(CLASSES - 1)] is None
    assert found.rows is not None
    assert found.rows[:, 0].tolist() == truth.tolist()  # in the order of the samples
    assert found.rows[:, 1].tolist() == logits.argmax(axis=1).tolist()


def test_five_classes_have_no_top5_accuracy() -> None:
    batch = {"inputs": torch.eye(5), "targets": torch.arange(5)}
    assert list(task().metrics(lambda inputs: inputs, batch, torch.ones(5)).sums) == ["accuracy", "loss", "class_accuracy"]


def test_a_sample_too_few_or_too_many_is_noticed(runtime: Runtime) -> None:
    images, labels = torch.zeros(5, 1, 3, 3, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, CLASSES))
    for size in (4, 6):
        with pytest.raises(DataError, match=f"counted 5 samples instead of {size}"):
            evaluate(runtime, task(), model, batches(images, labels, 2), split="test", size=size, form=Form())
