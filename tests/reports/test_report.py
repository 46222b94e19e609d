"""The page of a run, in a real browser: whole, on a phone, without a script. run_folder/test_bad_folders.py breaks folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from another_task import language
from browser import PROGRAM, Browser
from processes import read

from app.errors import RunFolderError
from app.optim.schedule import lr_at
from app.recipe.schema import OptimRecipe
from app.reports import past_run, report
from app.runs.run_folder import ProcessFailure
from launch.cli import main as samerun

LOOK = """({
    width: document.documentElement.scrollWidth,
    blank: [...document.images].filter(image => !image.complete || image.naturalWidth === 0).length,
    images: document.images.length + document.querySelectorAll('.plot svg').length,
    unnamed: document.querySelectorAll('img:not([alt]), .plot:not([aria-label])').length,
    values: document.querySelector('.plot span:last-of-type').title,
    ids: [...document.querySelectorAll('[id]')].map(element => element.id),
    tables: [...document.querySelectorAll('table')].filter(table => !table.caption).length,
    headings: [...document.querySelectorAll('h1, h2')].map(heading => heading.textContent),
    scripts: document.scripts.length,
    text: document.body.innerText,
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs a browser: run `make lab-packages`")
    opened = Browser()
    yield opened
    opened.close()


def looked_at(browser: Browser, path: Path, *, width: int = 390, scripts: bool = True, images: int = 9) -> dict[str, Any]:
    seen = browser.look(path, LOOK, width=width, scripts=scripts)
    assert seen.complaints == []
    assert seen.requests == []
    found: dict[str, Any] = seen.found
    assert found["images"] >= images
    assert found["width"] == width  # nothing is cut off at the side
    assert (found["blank"], found["unnamed"], found["tables"], found["scripts"]) == (0, 0, 0, 0)
    return found


def test_a_finished_run_has_all_of_it_in_one_file(browser: Browser, digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere.html"
    assert samerun(["report", str(digits_run), "--out", str(out)]) == 0
    assert out.stat().st_size < 1_000_000
    accuracy = read(digits_run / "result.json")["test_accuracy"]
    tested = ["Scores", "Predictions on the test split"]
    sections = ["Curves", "Where the time went", *tested, "One attempt", "What it ran on", "Recipe"]
    for width, scripts in ((390, True), (1280, True), (390, False)):
        found = looked_at(browser, out, width=width, scripts=scripts)
        assert found["headings"] == ["digits", *sections]
        words = (f"{100 * accuracy:.2f} %", "Goodput", "Confusion", "torch", "40 of 40", "finished after step 40")
        words += ("train.epochs\t2 (shipped: 20)", "Gradient norm")
        assert "training" in found["values"]
        assert "validation" in found["values"]
        assert len(set(found["ids"])) == len(found["ids"])
        assert [word for word in words if word not in found["text"]] == []


def test_the_page_of_another_task_has_its_own_scores_and_unit_and_shows_what_it_wrote(
    browser: Browser, digits_run: Path, tmp_path: Path
) -> None:
    folder = language(digits_run, tmp_path / "language")
    assert samerun(["report", str(folder)]) == 0
    for width in (390, 1280):
        found = looked_at(browser, folder / "report.html", width=width, images=4)
    assert found["headings"][0] == "<script>alert(1)</script>"
    assert found["headings"][1:5] == ["Curves", "Where the time went", "Scores", "What the model wrote"]
    words, result = " ".join(found["text"].split()), read(folder / "result.json")
    for told in (
        f"tokens/s {result['tokens_per_s']:,.0f} tokens seen {result['tokens_seen']:,}",
        f"test bits per byte {result['test_bits_per_byte']:.4f}",
        "test bias -0.2500",
        "Of the final weights, over 144 validation samples and 359 test samples",
        "Test book error: the 20 lowest of 29",
        "book 9 3.5000",
        "Test month accuracy name value May 50.00 %",
        "After step 40 Once Once 40 <b> and on and on",  # the latest is open, the others are not
    ):
        assert told in words, told
    assert "Twice 38 <b>" not in words
    assert "class" not in words
    html = (folder / "report.html").read_text()
    assert re.findall(r"<summary>After step (\d+)", html) == ["40", "2"]  # the last and the first
    assert "loss by tokens seen: training, validation." in html


def test_a_page_that_cannot_be_written_is_said(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert samerun(["report", str(digits_run), "--out", str(tmp_path / "no" / "page.html")]) == RunFolderError.exit_code
    assert "Write it elsewhere with --out FILE" in capsys.readouterr().err


def test_every_start_is_shown_with_how_it_ended_and_the_time_since(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    (first,) = run.starts
    later = replace(first, from_step=20, world_size=4, preset="fsdp2", job="17", time=first.time + 60, launched=first.time + 55)
    run = replace(run, result={}, outcome={}, events=[*run.events[:-1], later])
    for since_s, word in ((30.0, "starting"), (900.0, "silent")):
        html, complaints = report.render(run, first.time + 60 + since_s)
        assert complaints == []
        words = (f"{word}</span>", "killed or failed after step 40", "2 attempts", "lost work")
        words += ('data-name="preset">fsdp2</td>', 'data-name="job">17</td>')
        assert [word for word in words if word not in html] == []


def test_the_rate_of_every_step_is_drawn_and_a_failure_is_first(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    rates = {line["step"]: line["learning_rate"] for line in report._with_schedule(run).metrics}
    assert len(rates) == 40
    assert {line["step"]: line["learning_rate"] for line in run.metrics}.items() <= rates.items()
    other = {**run.recipe, "optim": {**run.recipe["optim"], "lr": 0.1}}
    assert report._with_schedule(replace(run, recipe=other)).metrics == run.metrics  # the logged rates are of another schedule
    optim = {**run.recipe["optim"], "schedule": "wsd", "decay_steps": 8}
    sizes = {"optim": OptimRecipe(**optim), "global_batch_size": 64, "steps_per_epoch": 20, "total_steps": 40}
    lines = [{**line, "learning_rate": lr_at(line["step"] - 1, **sizes)} for line in run.metrics]
    other = {**run.recipe, "optim": {**optim, "key_of_another_version": 1}}
    drawn = report._with_schedule(replace(run, recipe=other, metrics=lines)).metrics
    assert [line["learning_rate"] for line in drawn] == [lr_at(step, **sizes) for step in range(40)]
    failure = ProcessFailure(exit_code=8, rank=0, host="vm", error="TrainingError: it <diverged>", traceback="at line 7")
    html, _ = report.render(replace(run, outcome={}, events=run.events[:-1], result={}, failure=failure), failure.time)
    assert '<p class="failure">rank 0 on vm ended with exit code 8: TrainingError: it &lt;diverged&gt;</p>' in html
    assert "at line 7" in html
