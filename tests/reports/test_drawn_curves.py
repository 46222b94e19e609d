"""The curves of past runs: the right points, distinguishable without color, and a sentence for what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from another_task import PER_SAMPLE, language
from matplotlib.figure import Figure

from app.reports import curves, past_run


@pytest.fixture
def run(digits_run: Path) -> past_run.PastRun:
    return past_run.read(digits_run)


def test_points_are_where_they_belong(run: past_run.PastRun) -> None:
    found = curves.curve(run, "validation", "accuracy")
    assert (list(found.x), found.note) == ([1.0, 2.0], "")
    assert list(found.y) == [line["validation_accuracy"] for line in run.evaluations]
    tested = curves.curve(run, "test", "accuracy")
    assert (list(tested.x), list(tested.y)) == ([2.0], [run.result["test_accuracy"]])
    assert curves.curve(run, "training", "loss").x[0] == 5 * 64 / run.samples_per_epoch
    assert curves.curve(run, "training", "loss", x="samples").x[-1] == run.result["samples_seen"]
    seconds = curves.curve(run, "training", "loss", x="time").x
    assert 0 < seconds[0] < seconds[-1] == pytest.approx(run.metrics[-1]["time"] - run.events[0].launched)


def test_many_lines_are_drawn_as_means(run: past_run.PastRun) -> None:
    lines = [{**run.metrics[0], "step": step, "samples_seen": 64 * step, "loss": float(step)} for step in range(1, 2001)]
    axes = Figure().subplots()
    curves.draw(axes, [replace(run, metrics=lines)], "loss", x="samples", parts=["training"])
    places, losses = axes.lines[0].get_data()
    assert len(losses) == 500
    assert (places[0], places[-1]) == (64 * 2.5, 64 * 1998.5)
    assert list(losses) == [64**-1 * place for place in places]
    assert axes.get_yscale() == "log"


def test_runs_are_distinguishable_without_color(run: past_run.PastRun) -> None:
    runs = [replace(run, folder=Path(f"/runs/digits-{number}")) for number in range(8)]
    figure, _ = curves.page(runs)
    assert len({(line.get_linestyle(), line.get_marker()) for line in figure.axes[1].lines}) == 8
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"digits-{number}" for number in range(8)]
    figure, _ = curves.page(runs[:1])
    lines = figure.axes[0].lines
    assert [(line.get_label(), line.get_marker()) for line in lines] == [("training", "None"), ("validation", "o")]
    assert curves.labels([replace(run, folder=Path(name)) for name in ("/one/digits", "/two/digits")])[1] == "/two/digits"


def test_runs_of_two_tasks_share_the_loss_alone(run: past_run.PastRun, digits_run: Path, tmp_path: Path) -> None:
    figure, notes = curves.page([run, past_run.read(language(digits_run, tmp_path / "language"))])
    scores = {"training accuracy (%)": 1, "validation accuracy (%)": 1, "validation bits per byte": 1}
    assert {axes.get_ylabel(): len(axes.lines) for axes in figure.axes} == {"training loss": 2, "validation loss": 2, **scores}
    assert "language: no validation accuracy is recorded." in notes
    assert "digits: no validation bits per byte is recorded." in notes


def test_runs_that_count_tokens_are_drawn_by_tokens(run: past_run.PastRun, digits_run: Path, tmp_path: Path) -> None:
    other = past_run.read(language(digits_run, tmp_path / "language"))
    assert curves.columns_of([other]) == ("tokens", "time")
    assert curves.columns_of([run, run]) == ("epoch", "time")
    figure, notes = curves.page([other], xs=["tokens"])
    assert notes == []
    loss, bits = figure.axes
    assert (loss.get_ylabel(), bits.get_ylabel(), bits.get_xlabel()) == ("loss", "validation bits per byte", "tokens seen")
    assert list(loss.lines[0].get_xdata()) == [PER_SAMPLE * line["samples_seen"] for line in other.metrics]
    assert list(bits.lines[0].get_ydata()) == [1.5 * line["validation_loss"] for line in other.evaluations]
    assert "digits: lines without tokens seen are left out." in curves.page([other, run], xs=["tokens"])[1]
