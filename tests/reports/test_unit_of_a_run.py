"""A run whose task counts tokens is drawn, followed and compared in tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from another_task import PER_SAMPLE, language

from app.reports import past_run, plots
from launch.cli import main as samerun


def test_curves_are_drawn_by_tokens_and_by_bits_per_byte(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = past_run.read(language(digits_run, tmp_path / "language")), past_run.read(digits_run)
    assert plots.columns_of([run]) == ("tokens", "time")  # epochs of the same size would show the same
    figure, notes = plots.page([run], xs=["tokens"])
    assert notes == []
    loss, bits = figure.axes
    assert (loss.get_ylabel(), bits.get_ylabel(), bits.get_xlabel()) == ("loss", "validation bits per byte", "tokens seen")
    assert list(loss.lines[0].get_xdata()) == [PER_SAMPLE * line["samples_seen"] for line in run.metrics]
    assert list(bits.lines[0].get_ydata()) == [1.5 * line["validation_loss"] for line in run.evaluations]
    assert plots.columns_of([run, other]) == plots.XS
    _, notes = plots.page([run, other], xs=["tokens"], only=["loss"])
    assert notes == ["digits: lines without tokens seen are left out."]
    assert samerun(["curves", str(run.folder), "--x", "tokens, time", "--each", "--out", str(tmp_path / "drawn")]) == 0
    assert {"curves.png", "loss_language.pdf"} <= {path.name for path in (tmp_path / "drawn").iterdir()}
    assert samerun(["curves", str(digits_run), "--x", "epoch,tokens"]) == 2
    assert "--x: 'tokens': expected some of epoch,samples,time, with commas between them" in capsys.readouterr().err


def test_it_is_followed_and_compared_in_tokens(digits_run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    folder = language(digits_run, tmp_path / "language")
    last = past_run.read(folder).metrics[-1]
    monkeypatch.setenv("COLUMNS", "100")
    samerun(["watch", "--once", str(folder)])
    shown = capsys.readouterr().out
    assert re.search(rf"tokens/s .* {last['tokens_per_s']:,.0f} ", shown)
    assert re.search(rf"tokens +{last['tokens_seen']:,} seen", shown)
    assert "samples/s" not in shown
    samerun(["watch", str(folder)])
    assert f"  {last['tokens_per_s']:,.0f} tokens/s  waiting for data" in capsys.readouterr().out
    assert samerun(["compare", "--json", str(folder), str(digits_run)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert (results["tokens_seen"], results["tokens_per_s"][1]) == ([last["tokens_seen"], "absent"], "absent")
