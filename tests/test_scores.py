"""Evaluation and the average of the weights against what is written out by hand, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.checkpoints.average import WeightAverage
from app.data.augment import Preparation
from app.errors import DataError
from app.optim import from_recipe
from app.place.launched import Launched
from app.ranks.runtime import Runtime
from app.recipe.batching import BatchPlan
from app.recipe.schema import OptimRecipe
from app.scores import evaluate
from app.tasks.image_classification.sections import AugmentRecipe, DataRecipe

CLASSES = 7


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(Launched(use_cpu=True), BatchPlan(global_batch_size=8, world_size=1, accumulation=1))


def batches(images: torch.Tensor, labels: torch.Tensor, size: int) -> list[dict[str, torch.Tensor]]:
    """Batches of `size`, the last one padded with samples numbered -1 that must not count."""
    padding = -len(labels) % size
    numbers = torch.cat([torch.arange(len(labels)), torch.full((padding,), -1)])
    indices = numbers.clamp(min=0)
    parts = zip(images[indices].split(size), labels[indices].split(size), numbers.split(size), strict=True)
    return [{"images": image, "labels": label, "samples": number} for image, label, number in parts]


@pytest.mark.parametrize("size", [1, 4, 10, 64])
def test_scores_are_those_written_out_by_hand(runtime: Runtime, size: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (23, 1, 3, 3), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES - 1, (23,))  # the last class has no samples
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, CLASSES))
    preparation = Preparation(DataRecipe(), AugmentRecipe(), seed=0, num_classes=CLASSES, channels=1)
    found = evaluate(runtime, model, batches(images, labels, size), preparation, size=23, num_classes=CLASSES)

    inputs = ((images.double() / 255 - 0.5) / 0.25).reshape(23, 9).numpy()
    logits = inputs @ model[1].weight.detach().double().numpy().T + model[1].bias.detach().double().numpy()
    truth = labels.numpy()
    ranks = (logits > logits[np.arange(23), truth][:, None]).sum(axis=1)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(23), truth]
    assert found.samples == 23
    assert found.accuracy == pytest.approx((ranks == 0).mean())
    assert found.top5_accuracy == pytest.approx((ranks < 5).mean())
    assert found.loss == pytest.approx(losses.mean(), rel=1e-5)
    for label in range(CLASSES - 1):
        assert found.class_accuracy[label] == pytest.approx((ranks[truth == label] == 0).mean())
    assert found.class_accuracy[CLASSES - 1] is None


def test_a_sample_too_few_or_too_many_is_noticed(runtime: Runtime) -> None:
    images, labels = torch.zeros(5, 1, 3, 3, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, CLASSES))
    preparation = Preparation(DataRecipe(), AugmentRecipe(), seed=0, num_classes=CLASSES, channels=1)
    for size in (4, 6):
        with pytest.raises(DataError, match=f"counted 5 samples of a data set of {size}"):
            evaluate(runtime, model, batches(images, labels, 2), preparation, size=size, num_classes=CLASSES)


def test_the_average_is_the_one_written_out_by_hand(runtime: Runtime) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    expected = {name: weights.detach().double().clone() for name, weights in module.named_parameters()}
    model, optimizer = runtime.prepare(module, from_recipe.build(OptimRecipe(lr=0.1), module))
    average = WeightAverage(runtime.accelerator, model, optimizer, decay=0.75)
    for _ in range(5):
        runtime.accelerator.backward(model(torch.randn(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        for name, weights in module.named_parameters():
            expected[name] = 0.75 * expected[name] + 0.25 * weights.detach().double()
    own = {name: weights.detach().clone() for name, weights in module.named_parameters()}
    with average.applied():
        for name, weights in module.named_parameters():
            torch.testing.assert_close(weights.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
            assert not torch.equal(weights, own[name])
    for name, weights in module.named_parameters():
        assert torch.equal(weights, own[name])
