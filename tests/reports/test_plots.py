"""The curves of past runs: the right points, told apart without colour, and a sentence for what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from another_task import rainfall
from matplotlib.figure import Figure

from app.reports import past_run, plots
from app.reports.past_run import value_text


@pytest.fixture
def copied(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "copied"))


def test_points_stand_where_they_belong(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    found = plots.curve(run, "validation", "accuracy")
    assert (list(found.x), list(found.notes)) == ([1.0, 2.0], [])
    assert list(found.y) == [line["validation_accuracy"] for line in run.evaluations]
    tested = plots.curve(run, "test", "accuracy")
    assert (list(tested.x), list(tested.y)) == ([2.0], [run.result["test_accuracy"]])
    training = plots.curve(run, "training", "loss")
    assert training.x[0] == 5 * 64 / run.samples_per_epoch
    assert plots.curve(run, "training", "loss", x="samples").x[-1] == run.result["samples_seen"]
    seconds = plots.curve(run, "training", "loss", x="time").x
    assert 0 < seconds[0] < seconds[-1]
    assert seconds[-1] == pytest.approx(run.metrics[-1]["time"] - run.events[0].launched)


def test_test_scores_stand_where_there_are_none_of_validation(digits_run: Path) -> None:
    run = past_run.read(digits_run)

    def parts(keys: set[str]) -> list[plots.Part]:
        lines = [{key: value for key, value in line.items() if key not in keys} for line in run.evaluations]
        return plots.parts_of([replace(run, evaluations=lines)], "loss")

    assert parts(set()) == parts({"test_loss"}) == parts({"validation_loss", "test_loss"}) == ["training", "validation"]
    assert parts({"validation_loss"}) == ["training", "test"]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "ledger.jsonl", "evaluations.jsonl"])
def test_what_is_missing_is_said_and_the_rest_is_drawn(copied: Path, name: str) -> None:
    (copied / name).unlink()
    run = past_run.read(copied)
    figure, notes = plots.page([run], xs=plots.XS)
    assert notes
    assert sum(len(axes.lines) for axes in figure.axes) >= 2
    epochs = plots.curve(run, "training" if name == "evaluations.jsonl" else "validation", "loss").x
    assert list(epochs[-1:]) in ([2.0], [1.0])  # where an epoch's size is not known, the line's epoch: the second


def test_many_lines_are_drawn_as_means(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    lines = [{**run.metrics[0], "step": step, "samples_seen": 64 * step, "loss": float(step)} for step in range(1, 2001)]
    axes = Figure().subplots()
    plots.draw(axes, [replace(run, metrics=lines)], "loss", x="samples", parts=["training"])
    places, losses = axes.lines[0].get_data()
    assert len(losses) == 500
    assert (places[0], places[-1]) == (64 * 2.5, 64 * 1998.5)
    assert list(losses) == [64**-1 * place for place in places]


def test_runs_are_not_drawn_twice_against_what_says_the_same(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    assert plots.columns_of([run, run]) == ("epoch", "time")
    smaller = replace(run, about={**run.about, "global_batch_size": 1000})
    assert plots.columns_of([run, smaller]) == plots.XS, "epochs of other sizes"


def test_a_single_point_is_seen_and_no_point_is_outside_its_panel(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    short = replace(run, metrics=run.metrics[:1])
    axes = Figure().subplots()
    plots.draw(axes, [short], "loss")
    assert axes.lines[0].get_marker() == "."
    figure, _ = plots.page([run, short], xs=["epoch", "time"])
    figure.draw_without_rendering()
    for panel in figure.axes:
        left, right = panel.get_xlim()
        assert left == 0.0
        assert all(right >= max(line.get_xdata(), default=0.0) for line in panel.lines)


@pytest.mark.parametrize(("least", "labels"), [(0.05, 5), (0.0005, 4)])
def test_a_logarithmic_axis_has_few_labels(digits_run: Path, least: float, labels: int) -> None:
    run = past_run.read(digits_run)
    lines = [{**run.metrics[0], "samples_seen": 64 * step, "loss": least ** (step / 10)} for step in range(11)]
    figure = Figure()
    axes = figure.subplots()
    plots.draw(axes, [replace(run, metrics=lines)], "loss", x="samples", parts=["training"])
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    assert sum(low <= label.get_position()[1] <= high for label in axes.get_yticklabels()) == labels


def test_runs_are_told_apart_without_colour(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    runs = [replace(run, folder=Path(f"/runs/digits-{number}")) for number in range(8)]
    figure, _ = plots.page(runs)
    looks = {(line.get_linestyle(), line.get_marker()) for line in figure.axes[1].lines}
    assert len(looks) == 8
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list("01234567")
    figure, _ = plots.page(runs[:1])
    lines = figure.axes[0].lines
    assert [(line.get_label(), line.get_marker()) for line in lines] == [("training", "None"), ("validation", "o")]


def test_runs_of_two_tasks_share_the_loss_alone(digits_run: Path, tmp_path: Path) -> None:
    runs = [past_run.read(digits_run), past_run.read(rainfall(digits_run, tmp_path / "rain"))]
    figure, notes = plots.page(runs)
    found = {axes.get_ylabel(): len(axes.lines) for axes in figure.axes}
    assert found == {
        "training loss": 2,
        "validation loss": 2,
        "training accuracy (%)": 1,
        "validation accuracy (%)": 1,
        "validation rmse": 1,
    }
    assert notes == [
        "rain: no training accuracy is recorded.",
        "rain: no validation accuracy is recorded.",
        "digits: no validation rmse is recorded.",
    ]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("test_accuracy", 0.98886, "98.89 %"),
        ("test_accuracy", 98.886, "98.8860"),
        ("test_iou", 0.98886, "0.9889"),
        ("test_loss", 0.0, "0.0000"),
        ("test_loss", 0.00012345, "0.0001234"),
        ("test_perplexity", 123456.7, "1.235e+05"),
        ("test_r2", -0.5, "-0.5000"),
    ],
)
def test_a_score_is_a_number_and_an_accuracy_a_share(key: str, value: float, expected: str) -> None:
    assert value_text(key, value) == expected
    assert value_text("class_accuracy", 0.5, [0.5, 1.5]) == "0.5000"


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["r/digits-1x8-adamw", "r/digits-4x2-adamw"], ["1x8", "4x2"]),
        (["r/run", "r/run-2"], ["run", "run-2"]),
        (["one/digits", "two/digits"], ["one", "two"]),
        (["r/lr=1e-3", "r/lr=3e-3"], ["lr=1e-3", "lr=3e-3"]),
        (["r/digits"], ["digits"]),
        (["r/same", "r/same"], ["same (1)", "same (2)"]),
    ],
)
def test_names_are_shortened_to_what_differs(digits_run: Path, folders: list[str], expected: list[str]) -> None:
    run = past_run.read(digits_run)
    assert plots.labels([replace(run, folder=Path(folder)) for folder in folders]) == expected
