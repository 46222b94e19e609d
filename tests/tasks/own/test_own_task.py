"""What a user's task may leave out, and what it is told where it breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app.data.draws import Draws
from app.errors import DataError, RecipeError, TrainingError, short_traceback
from app.task import Form, Loss, NeedsData, Samples, Scores, overrides
from app.tasks.own.own_task import OwnTask

X = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Least:
    def samples(self, split: str) -> Any:
        return None if split == "validation" else Samples.of({"x": X, "y": X.sum(1)})

    def model(self, metadata: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 1), nn.Flatten(0))

    def loss(self, model: Any, batch: Any) -> Loss:
        return Loss(F.mse_loss(model(batch["x"]).double(), batch["y"]), len(batch["x"]))


def batch_of(numbers: list[int]) -> dict[str, Any]:
    array = np.array(numbers)
    return {"x": X[array], "y": X[array].sum(1), "samples": torch.tensor(numbers), "numbers": array}


def complete(kind: type = Least) -> OwnTask:
    return OwnTask(kind(), name="my_task.py")


def with_(**methods: Any) -> OwnTask:
    return complete(type("Mine", (Least,), methods))


def test_the_least_task_has_all_that_the_application_asks_for() -> None:
    task = complete()
    assert (task.monitor, task.channels_last, task.group_size) == (("loss", "min"), False, 1)
    assert task.samples("validation") is None
    with pytest.raises(DataError, match=r'Mine.samples\("train"\) in my_task.py returned None'):
        with_(samples=lambda self, split: None).samples("train")
    samples = task.samples("train")
    assert samples is not None
    assert (samples.facts, samples.workers, len(samples.fingerprint)) == ({}, False, 16)
    model = task.model(samples.facts)
    assert task.head(model) == "2"
    assert not any(overrides(task, name) for name in ("count", "preview", "write_outputs", "monitor"))
    assert task.adapt_samples(samples, {}) is samples
    with pytest.raises(DataError, match=r'metadata \{\}, and the model was built for \{"classes": 3\}'):
        task.adapt_samples(samples, {"classes": 3})
    with pytest.raises(RecipeError, match=r"the task cannot predict from a file: give it a method predict"):
        task.predict(model, [], top=1)


def test_real_numbers_are_cast_where_the_model_is_called_and_targets_never() -> None:
    seen = []

    def loss(self: Any, model: Any, batch: Any) -> Loss:
        seen.append(model({"pair": (batch["x"], batch["samples"])}, scale=batch["x"]))
        return Loss(batch["y"].mean().requires_grad_(), 2)

    task, batch = with_(loss=loss), batch_of([0, 1])
    ready = task.preprocess(batch, Draws(0, batch["samples"]), form=Form(torch.bfloat16))
    task.loss(lambda *args, **kwargs: (args, kwargs), ready)
    (given,), named = seen[0]
    assert [part.dtype for part in given["pair"]] == [torch.bfloat16, torch.int64]
    assert (named["scale"].dtype, ready["y"].dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize("numbers", [[0, 1, 2], [3, 4, -1], [-1, -1, -1]])
def test_without_a_score_the_loss_is_one_and_padding_has_no_part_in_it(numbers: list[int]) -> None:
    class Sums(Least):
        def loss(self, model: Any, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.mean, loss.count, {"largest": (batch["x"].amax(1).sum(), len(batch["x"]))})  # type: ignore[dict-item]

    task, batch = complete(Sums), batch_of(numbers)
    model = task.model({})
    with torch.no_grad():
        scores = task.metrics(model, task.preprocess(batch, None, form=Form()), batch["samples"] >= 0)
        real = [number for number in numbers if number >= 0]
        errors = (model(X[real].float()).double() - X[real].sum(1)).square().sum() if real else torch.zeros(())
    total, count = scores.sums["loss"]
    assert (count.item(), scores.sums["largest"][1].item()) == (len(real), len(real))
    assert total.item() == pytest.approx(errors.item())
    if real:
        assert task.reduce_metrics(scores.sums, None)[0] == pytest.approx(
            {"loss": errors.item() / len(real), "largest": X[real].amax(1).mean().item()}
        )


def least_squares(self: Any, model: Any, batch: Any) -> Loss:
    return Loss(F.l1_loss(model(batch["x"][:, :3]), batch["y"]))


def penalized(self: Any, model: Any, batch: Any) -> Loss:
    found = model(inputs := batch["x"].requires_grad_())
    (slopes,) = torch.autograd.grad(found.sum(), inputs, create_graph=True)
    return Loss(F.l1_loss(found, batch["y"]) + slopes.square().mean())


@pytest.mark.parametrize(
    ("methods", "frames", "last"),
    [
        (
            {"loss": least_squares},
            ["least_squares", "forward"],
            "Mine.loss in my_task.py failed on a training batch (x float64 [2, 4], y float64 [2]), in the layer 0: "
            "Linear(in_features=4, out_features=3, bias=True)",
        ),
        (
            {"loss": penalized},
            ["penalized", "_engine_run_backward"],
            "Mine.loss in my_task.py failed on an evaluation batch (x float64 [2, 4], y float64 [2])",
        ),
        (
            {"metrics": lambda self, model, batch, valid: batch["z"]},
            ["<lambda>"],
            "Mine.metrics in my_task.py failed on an evaluation batch (x float64 [2, 4], y float64 [2])",
        ),
        ({"samples": lambda self, split: {}[split]}, ["<lambda>"], "Mine.samples in my_task.py failed for 'train'"),
    ],
)
def test_an_error_in_the_users_code_has_a_short_traceback_and_a_sentence(
    methods: dict[str, Any], frames: list[str], last: str
) -> None:
    task, batch = with_(**methods), batch_of([0, 1])
    with pytest.raises((RuntimeError, KeyError)) as raised:  # noqa: PT012
        task.samples("train")
        task.loss(task.model({}), batch)
        task.try_metrics(task.model({}), batch, Form())
    test, *lines = short_traceback(raised.value).split("  File ")[1:]
    assert "in test_an_error_in" in test
    assert [line.splitlines()[0].rpartition(" in ")[2] for line in lines] == frames
    assert lines[-1].endswith(f"\n{last}\n")
    assert short_traceback(DataError("ours")) == "app.errors.DataError: ours\n"


def test_scores_of_a_task_are_made_whole() -> None:
    def score(self: Any, model: Any, batch: Any, valid: Tensor) -> Scores:
        found = model(batch["x"])
        return Scores({"near": ((found > 0) & valid, valid), "n": (valid.sum(), 1)}, rows=found)

    task, batch = with_(metrics=score, monitor=("n", "max")), batch_of([0, 1, -1])
    with torch.no_grad():
        scores = task.metrics(task.model({}), task.preprocess(batch, None, form=Form()), batch["samples"] >= 0)
    assert all(part.dtype == torch.float64 for pair in scores.sums.values() for part in pair)
    assert scores.rows is not None
    assert (scores.rows.shape, scores.rows.dtype) == ((3, 1), torch.float64)
    named, tables = task.reduce_metrics(scores.sums, scores.rows)
    assert (named, list(tables), tables["near"]["2"]) == ({"n": 2.0}, ["near"], None)
    reduced = with_(reduce_metrics=lambda self, sums, rows: {"loss": torch.tensor(2.0)}).reduce_metrics({}, None)
    assert reduced == ({"loss": 2.0}, {})


def test_values_of_samples_are_scores_and_a_loss_without_a_count_is_one_of_samples() -> None:
    valid = torch.tensor([True, True, False])
    right, error = torch.tensor([True, False, True]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [torch.nan, 5.0]])
    sums = Scores.of({"right": right, "error": error}, valid).sums
    assert {name: [part.tolist() for part in pair] for name, pair in sums.items()} == {
        "right": [1.0, 2.0],
        "error": [[4.0, 6.0], [2.0, 2.0]],
    }
    with pytest.raises(TrainingError, match=r"Scores.of was given 'mean' as a tensor \[\]: give one value for each of the 3"):
        Scores.of({"mean": right.float().mean()}, valid)
    task, batch = with_(loss=lambda self, model, batch: Loss(model(batch["x"]).mean())), batch_of([0, 1, 2])
    assert task.loss(task.model({}), task.preprocess(batch, None, form=Form())).count == 3


def test_a_batch_without_data_comes_from_the_samples() -> None:
    task = complete()
    with pytest.raises(NeedsData):
        task.example({}, Form())
    task.samples("train")
    example = task.example({}, Form())
    assert (example["x"].shape, example["x"].is_meta, len(example["samples"])) == ((2, 4), True, 2)
    assert task.loss(task.model({}).to("meta"), example).mean.is_meta

    def on_the_host(self: Any, model: Any, batch: Any) -> Loss:
        return Loss(model(batch["x"]).mean() * float(batch["y"].sum()), 2)

    with pytest.raises(NeedsData):
        with_(loss=on_the_host).loss(task.model({}).to("meta"), example)


RULE = "under FSDP2 and ZeRO their weights are sharded. Move everything that has weights"
BROKEN_LOSSES = {
    "not called": (
        lambda model, x: Loss(x.mean().requires_grad_(), 2),
        f"Mine.loss called the model 0 times for one batch: .*{RULE}",
    ),
    "called twice": (lambda model, x: Loss((model(x) + model(x)).mean(), 2), "called the model 2 times for one"),
    "a submodule": (lambda model, x: Loss(model[0](x).mean(), 2), r"Mine.loss uses model\[0\]"),
    "a tensor": (lambda model, x: model(x).mean(), r"Mine.loss returned a Tensor \[\] of float32, but must return Loss\(mean"),
    "no scalar": (lambda model, x: Loss(model(x), 2), r"mean of Mine.loss is a Tensor \[2\] of float32, but .* take .mean\(\)"),
    "detached": (lambda model, x: Loss(model(x).mean().detach(), 2), "the mean of Mine.loss is .* number with a gradient"),
    "no count": (lambda model, x: Loss(model(x).mean(), x), r"the count of Mine.loss is a Tensor \[2, 4\]"),
    "no pair": (lambda model, x: Loss(model(x).mean(), 2, {"a": x}), r"returned 'a' as a Tensor \[2, 4\] .*\(sum, count\)"),
}


@pytest.mark.parametrize("case", BROKEN_LOSSES)
def test_a_loss_that_breaks_a_rule_is_told_which(case: str) -> None:
    compute, text = BROKEN_LOSSES[case]
    task, batch = with_(loss=lambda self, model, batch: compute(model, batch["x"])), batch_of([0, 1])
    with pytest.raises(TrainingError, match=text):
        task.loss(task.model({}), task.preprocess(batch, Draws(0, batch["samples"]), form=Form()))


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"loss": None}, r"Mine in my_task.py has no method loss\(self, model, batch\): a task needs samples"),
        ({"loss": lambda self, batch: None}, r"Mine.loss in my_task.py is called as loss\(model, batch\): write"),
        ({"count_unit": "to kens"}, r"count_unit of Mine in my_task.py is 'to kens': give the plural of what Loss.count"),
        ({"monitor": "loss"}, r"monitor of Mine in my_task.py is 'loss': give a score, and \"min\""),
    ],
    ids=["no loss", "other arguments", "no unit", "no monitor"],
)
def test_a_task_that_cannot_be_called_is_refused_at_once(methods: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        with_(**methods)


BATCH = batch_of([0, 1])
VALID = BATCH["samples"] >= 0
MONITOR = r"monitor of Mine is \('loss', 'min'\), but its scores are rmse: set monitor = \(\"rmse\", \"max\"\) in my_task.py"


def scoring(compute: Any) -> OwnTask:
    return with_(metrics=lambda self, model, batch, valid: compute(model(batch["x"]), valid))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "preprocess": (
        lambda: with_(preprocess=lambda self, batch, rng: None).preprocess(BATCH, None, form=Form()),
        "Mine.preprocess returned None, but must return the batch, a dict",
    ),
    "model": (
        lambda: with_(model=lambda self, metadata: nn.ReLU()).model({}),
        "Mine.model returned a ReLU, not a torch.nn.Module with parameters",
    ),
    "lazy": (lambda: with_(model=lambda self, metadata: nn.LazyLinear(1)).model({}), "weight of Mine.model has no shape yet"),
    "metrics": (lambda: scoring(lambda found, valid: {}).metrics(len, BATCH, VALID), "returned a dict, but must return Scores"),
    "rows": (
        lambda: scoring(lambda found, valid: Scores({}, torch.zeros(4))).metrics(len, BATCH, VALID),
        r"Its rows, if any, are a tensor \[2, R\]",
    ),
    "monitor": (lambda: with_(reduce_metrics=lambda self, sums, rows: {"rmse": 1.0}).reduce_metrics({}, None), MONITOR),
    "padding": (
        lambda: tried(lambda found, valid: {"loss": (found.sum(), len(found))}),
        "Mine.metrics counts padding: .* the sum and count of 'loss' are .* and 2.0, but must",
    ),
}


def tried(compute: Any) -> None:
    task = scoring(lambda found, valid: Scores(compute(found, valid)))
    task.try_metrics(task.model({}), BATCH, Form())


@pytest.mark.parametrize("case", WRONG)
def test_what_methods_return_is_checked(case: str) -> None:
    call, text = WRONG[case]
    with pytest.raises(TrainingError, match=text):
        call()
