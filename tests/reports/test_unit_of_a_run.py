"""A run whose task counts tokens: drawn by them, and told in them, wherever a run is looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from another_task import PER_SAMPLE, language

from app.reports import past_run, plots
from app.reports.comparison import compare
from launch.cli import main as samerun


@pytest.fixture
def folder(digits_run: Path, tmp_path: Path) -> Path:
    return language(digits_run, tmp_path / "language")


def test_it_is_drawn_by_tokens_and_by_bits_per_byte(folder: Path, digits_run: Path) -> None:
    runs = [past_run.read(folder)]
    assert plots.columns_of(runs) == ("tokens", "time")  # its epochs are all of one size: they would say the same
    figure, notes = plots.page(runs, xs=["tokens"])
    assert notes == []
    loss, bits = figure.axes
    assert (loss.get_ylabel(), bits.get_ylabel(), bits.get_xlabel()) == ("loss", "validation bits per byte", "tokens seen")
    assert list(loss.lines[0].get_xdata()) == [PER_SAMPLE * line["samples_seen"] for line in runs[0].metrics]
    assert list(bits.lines[0].get_ydata()) == [1.5 * line["validation_loss"] for line in runs[0].evaluations]
    both = [*runs, past_run.read(digits_run)]
    assert plots.columns_of(both) == plots.XS
    _, notes = plots.page(both, xs=["tokens"], only=["loss"])
    assert notes == ["digits: lines do not say how many tokens were seen."]


def test_curves_take_the_unit_for_an_axis(folder: Path, digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert samerun(["curves", str(folder), "--x", "tokens, time", "--out", str(folder / "drawn")]) == 0
    assert (folder / "drawn/curves.png").exists()
    assert samerun(["curves", str(digits_run), "--x", "epoch,tokens", "--out", str(folder / "drawn")]) == 2
    assert "--x: 'tokens': expected some of epoch,samples,time, with commas between them" in capsys.readouterr().err


def test_it_is_followed_and_compared_in_tokens(
    folder: Path, digits_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = past_run.read(folder).metrics[-1]
    monkeypatch.setenv("COLUMNS", "100")
    samerun(["watch", "--once", str(folder)])
    told = capsys.readouterr().out
    assert re.search(rf"tokens/s .* {last['tokens_per_s']:,.0f} ", told)
    assert re.search(rf"tokens +{last['tokens_seen']:,} seen", told)
    assert "samples/s" not in told
    samerun(["watch", str(folder)])
    assert f"  {last['tokens_per_s']:,.0f} tokens/s  waiting for data" in capsys.readouterr().out
    results = compare(past_run.read(folder), past_run.read(folder), tolerance=1e-4).results
    assert results["tokens_seen"] == (last["tokens_seen"],) * 2
    assert "samples_per_s" not in results
    assert len(set(results["tokens_per_s"])) == 1
    assert samerun(["compare", "--json", str(folder), str(digits_run)]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["tokens_per_s"][1] == "absent"
