"""The curves of past runs: the right points, distinguishable without color, and a sentence for what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from another_task import PER_SAMPLE, language, rainfall
from matplotlib.figure import Figure

from app.reports import curves, past_run
from app.reports.past_run import value_text
from launch import cli


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


def test_test_scores_are_drawn_without_validation(run: past_run.PastRun) -> None:
    def parts(keys: set[str]) -> list[curves.Part]:
        lines = [{key: value for key, value in line.items() if key not in keys} for line in run.evaluations]
        return curves.parts_of([replace(run, evaluations=lines)], "loss")

    assert parts(set()) == parts({"test_loss"}) == parts({"validation_loss", "test_loss"}) == ["training", "validation"]
    assert parts({"validation_loss"}) == ["training", "test"]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "ledger.jsonl", "evaluations.jsonl"])
def test_a_missing_file_is_a_note_and_the_rest_is_drawn(digits_run: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(digits_run, tmp_path / "copied"))
    (folder / name).unlink()
    run = past_run.read(folder)
    figure, notes = curves.page([run], xs=curves.XS)
    assert notes
    assert sum(len(axes.lines) for axes in figure.axes) >= 2
    epochs = curves.curve(run, "training" if name == "evaluations.jsonl" else "validation", "loss").x
    assert list(epochs[-1:]) in ([2.0], [1.0])  # where an epoch's size is not known, the line's epoch: the second


def test_many_lines_are_drawn_as_means(run: past_run.PastRun) -> None:
    lines = [{**run.metrics[0], "step": step, "samples_seen": 64 * step, "loss": float(step)} for step in range(1, 2001)]
    axes = Figure().subplots()
    curves.draw(axes, [replace(run, metrics=lines)], "loss", x="samples", parts=["training"])
    places, losses = axes.lines[0].get_data()
    assert len(losses) == 500
    assert (places[0], places[-1]) == (64 * 2.5, 64 * 1998.5)
    assert list(losses) == [64**-1 * place for place in places]
    assert axes.get_yscale() == "log"


def test_a_single_point_is_visible_and_no_point_is_outside_its_panel(run: past_run.PastRun) -> None:
    short = replace(run, folder=Path("/short"), metrics=run.metrics[:1])
    axes = Figure().subplots()
    curves.draw(axes, [short], "loss")
    assert axes.lines[0].get_marker() == "."
    figure, _ = curves.page([run, short], xs=["epoch", "time"])
    figure.draw_without_rendering()
    for panel in figure.axes:
        left, right = panel.get_xlim()
        assert left == 0.0
        assert all(right >= max(line.get_xdata(), default=0.0) for line in panel.lines)


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
    figure, notes = curves.page([run, past_run.read(rainfall(digits_run, tmp_path / "rain"))])
    scores = {"training accuracy (%)": 1, "validation accuracy (%)": 1, "validation rmse": 1}
    assert {axes.get_ylabel(): len(axes.lines) for axes in figure.axes} == {"training loss": 2, "validation loss": 2, **scores}
    assert notes == [
        "rain: no training accuracy is recorded.",
        "rain: no validation accuracy is recorded.",
        "digits: no validation rmse is recorded.",
    ]


def test_runs_that_count_tokens_are_drawn_by_tokens(
    run: past_run.PastRun, digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = past_run.read(language(digits_run, tmp_path / "language"))
    assert curves.columns_of([other]) == ("tokens", "time")  # epochs of the same size would show the same
    assert curves.columns_of([run, run]) == ("epoch", "time")
    smaller = replace(run, about={**run.about, "global_batch_size": 1000})
    assert curves.columns_of([other, run]) == curves.columns_of([run, smaller]) == curves.XS
    figure, notes = curves.page([other], xs=["tokens"])
    assert notes == []
    loss, bits = figure.axes
    assert (loss.get_ylabel(), bits.get_ylabel(), bits.get_xlabel()) == ("loss", "validation bits per byte", "tokens seen")
    assert list(loss.lines[0].get_xdata()) == [PER_SAMPLE * line["samples_seen"] for line in other.metrics]
    assert list(bits.lines[0].get_ydata()) == [1.5 * line["validation_loss"] for line in other.evaluations]
    assert "digits: lines without tokens seen are left out." in curves.page([other, run], xs=["tokens"])[1]
    assert cli.main(["curves", str(digits_run), "--x", "epoch,tokens"]) == 2
    assert "--x: 'tokens': expected some of epoch,samples,time, with commas between them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("test_accuracy", 0.98886, "98.89 %"),
        ("test_accuracy", 98.886, "98.8860"),
        ("test_iou", 0.98886, "0.9889"),
        ("test_loss", 0.0, "0.0000"),
        ("test_loss", 0.00012345, "0.0001234"),
        ("test_perplexity", 123456.7, "1.235e+05"),
    ],
)
def test_a_score_is_a_number_and_an_accuracy_a_share(key: str, value: float, expected: str) -> None:
    assert value_text(key, value) == expected
    assert value_text("class_accuracy", 0.5, [0.5, 1.5]) == "0.5000"
