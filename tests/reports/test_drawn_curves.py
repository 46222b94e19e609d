"""The curves of past runs: the right points, distinguishable without color, and a sentence for what is missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
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
    # A mean over the steps since the last line is in their middle.
    assert curves.curve(run, "training", "loss").x[0] == 5 * 64 / run.samples_per_epoch / 2
    assert curves.curve(run, "training", "grad_norm", x="samples").x[-1] == run.result["samples_seen"]
    assert curves.curve(run, "training", "loss", x="tokens").note == "digits: lines without tokens seen are left out."


def test_time_is_that_of_training_over_all_starts(run: past_run.PastRun) -> None:
    seconds = [line["training_s"] for line in run.metrics]
    assert list(curves.curve(run, "training", "grad_norm", x="time").x) == pytest.approx(seconds)
    assert curves.curve(run, "validation", "loss", x="time").x[-1] == pytest.approx(seconds[-1])
    again = replace(run.starts[0], from_step=40, time=run.metrics[-1]["time"] + 100)
    later = {**run.metrics[-1], "step": 45, "training_s": 7.0, "time": again.time + 10}
    resumed = replace(run, events=[*run.events, again], metrics=[*run.metrics, later])
    assert resumed.training_s[45] == pytest.approx(seconds[-1] + 7.0)


def test_many_lines_are_drawn_as_means(run: past_run.PastRun) -> None:
    lines = [{**run.metrics[0], "step": step, "samples_seen": 64 * step, "loss": float(step)} for step in range(1, 2001)]
    axes = Figure().subplots()
    curves.draw(axes, [replace(run, metrics=lines)], "loss", x="samples", parts=["training"])
    places, losses = axes.lines[0].get_data()
    assert len(losses) == 500
    assert (places[0], places[-1]) == (64 * 2.0, 64 * 1998.0)
    assert list(losses) == [64**-1 * place + 0.5 for place in places]
    assert axes.get_yscale() == "log"


def test_runs_are_distinguishable_without_color(run: past_run.PastRun) -> None:
    runs = [replace(run, folder=Path(f"/runs/digits-{number}")) for number in range(8)]
    figure, _ = curves.page(runs)
    assert len({(line.get_linestyle(), line.get_marker()) for line in figure.axes[1].lines}) == 8
    assert [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()] == [f"digits-{number}" for number in range(8)]
    figure, _ = curves.page(runs[:1])
    lines = figure.axes[0].lines
    assert [(line.get_label(), line.get_marker()) for line in lines] == [("training", "None"), ("validation", "o")]
    assert [line.get_color() for line in lines] == [curves.PART_COLORS["training"], curves.PART_COLORS["validation"]]
    assert curves.labels([replace(run, folder=Path(name)) for name in ("/one/digits", "/two/digits")])[1] == "/two/digits"


def test_runs_of_two_tasks_share_no_axis(run: past_run.PastRun, digits_run: Path, tmp_path: Path) -> None:
    other = past_run.read(language(digits_run, tmp_path / "language"))
    figure, notes = curves.page([run, other])
    assert notes == []
    digits, text = figure.subfigs
    assert [axes.get_ylabel() for axes in digits.axes if axes.get_ylabel()] == ["loss", "accuracy (%)"]
    assert [axes.get_xlabel() for axes in digits.axes[2:]] == ["epoch", "training time (s)"]
    loss, _, bits, _ = text.axes
    assert (loss.get_ylabel(), bits.get_ylabel(), bits.get_xlabel()) == ("loss", "validation bits per byte", "tokens seen")
    seen = [PER_SAMPLE * line["samples_seen"] for line in other.metrics]
    assert list(loss.lines[0].get_xdata()) == [(begin + end) / 2 for begin, end in pairwise([0, *seen])]
    assert list(bits.lines[0].get_ydata()) == [1.5 * line["validation_loss"] for line in other.evaluations]
