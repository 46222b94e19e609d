"""`samerun compare`: what differs between two runs, and what must be so for them to be called the same one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from processes import REPOSITORY, train

from app.reports import past_run
from app.reports.compare import DECIDING_STEPS, compare
from app.runs import ledger
from launch import cli


def without_figures(text: str) -> list[str]:
    return [re.sub(r"[-+]?\d[\d.,e+-]*", "#", word) for word in text.split()]


@pytest.mark.multiproc
def test_the_demonstration_ends_alike_on_one_process_and_on_two(tmp_path: Path, capsys) -> None:
    for name, preset, processes in (("one", "cpu", None), ("two", "multi_gpu", 2)):
        train(preset, tmp_path / name, "--recipe", "digits", processes=processes).check()
    one, two = (past_run.read(tmp_path / name).result for name in ("one", "two"))
    assert one["test_accuracy"] == two["test_accuracy"] >= 0.98
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    printed = capsys.readouterr().out
    blocks = (REPOSITORY / "README.md").read_text().split("```")[1::2]
    (shown,) = (block for block in blocks if "The same run: " in block)
    table, _, verdict = shown.partition("The same run: ")
    for line in table.splitlines()[1:]:  # the first is the language of the block
        assert " ".join(without_figures(line.replace("...", ""))) in " ".join(without_figures(printed))
    assert without_figures(printed)[-len(verdict.split()) :] == without_figures(verdict)


def test_the_order_of_parameter_groups_counts(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    groups = {"a*": {"lr_factor": 2.0}, "*": {"lr_factor": 3.0}}  # the first match counts
    one, other = (
        replace(run, recipe={**run.recipe, "optim": {**run.recipe["optim"], "groups": dict(items)}})
        for items in (groups.items(), reversed(groups.items()))
    )
    assert compare(one, one).is_same
    assert compare(one, other).learnt == ["optim.groups"]


def test_what_differs_is_named(digits_run: Path, tmp_path: Path, capsys) -> None:
    copied = Path(shutil.copytree(digits_run, tmp_path / "copied"))
    recipe = (copied / "recipe.yaml").read_text()
    (copied / "recipe.yaml").write_text(recipe.replace("lr: 0.005", "lr: 0.25"))
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "loss": line["loss"] * (1.5 if line["step"] > 20 else 1.0)} for line in lines]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["compare", str(digits_run), str(copied), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["same_run"], found["recipe"]) == (False, {"optim.lr": [0.005, 0.25]})
    assert (found["losses"]["first_beyond"], found["losses"]["largest"]) == (25, pytest.approx(0.5))
    assert cli.main(["compare", str(digits_run), str(copied)]) == 1
    printed = capsys.readouterr().out
    verdict = " ".join(printed.split())
    assert "the recipes differ in optim.lr; same samples and learning rates in all 40 shared steps" in verdict
    assert "losses differ by more than 0.0001 from step 25 (largest relative difference 5.0e-01, " in verdict
    result = json.loads((digits_run / "result.json").read_text())
    for text in ("optim.lr", "0.25", "test_accuracy", f"{result['samples_per_s']:.6g}", "copied"):
        assert text in printed


@pytest.mark.parametrize(("factor", "tolerance", "same"), [(1 + 2e-6, 1e-5, True), (1 + 2e-5, 1e-5, False), (0.0, 1e9, False)])
def test_the_tolerance_decides(digits_run: Path, factor: float, tolerance: float, same: bool) -> None:
    run = past_run.read(digits_run)
    other = replace(run, metrics=[{**line, "loss": factor * line["loss"]} for line in run.metrics])
    assert compare(other, run, tolerance=tolerance).is_same == same  # a difference to 0 has no share of it


def test_losses_that_drift_apart_after_a_hundred_steps_are_of_the_same_run(digits_run: Path) -> None:
    run = past_run.read(digits_run)

    def long(*, differs_from: int) -> past_run.PastRun:
        lines = [{**run.metrics[0], "step": step, "loss": 1.0 + (step >= differs_from)} for step in range(10, 200, 10)]
        return replace(run, metrics=lines)

    late, early = (compare(long(differs_from=999), long(differs_from=step), tolerance=1e-4) for step in (110, 100))
    assert (late.is_same, late.losses.deciding_up_to_step, late.losses.first_beyond) == (True, DECIDING_STEPS, 110)
    assert late.losses.same_up_to_step == 100
    assert str(late).startswith("The same run up to step 100: same training settings; ")
    assert (early.is_same, early.losses.first_beyond) == (False, 100)


@pytest.mark.parametrize(
    ("norms", "apart_from", "reason"),
    [
        (
            20,
            1,
            "A known reason: 20 batch normalization layers computed statistics per micro-batch, and micro_batch is 64",
        ),
        (0, 19, "Up to step 18 the difference is at most 5e-08. Rounding can cause such a drift"),
        (0, 5, None),
    ],
)
def test_a_known_reason_is_named(digits_run: Path, norms: int, apart_from: int, reason: str | None) -> None:
    run = past_run.read(digits_run)
    one, other = (
        replace(
            run,
            about={**run.about, "micro_batch": size, "batch_norms": norms},
            metrics=[{**run.metrics[0], "step": step, "loss": 1.0 + (change if step < apart_from else 1e5 * change)}
                     for step in range(1, 41)],
        )
        for size, change in ((64, 0.0), (32, 5e-8))
    )  # fmt: skip
    verdict = str(compare(one, other))
    assert verdict.startswith("Not the same run: same training settings; ")
    assert reason in verdict if reason else "Rounding" not in verdict


def test_other_samples_or_learning_rates_are_another_run(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    (number, steps), *_ = [(at, event) for at, event in enumerate(run.events) if isinstance(event, ledger.StepSpan)]
    others = replace(steps, digests=(*steps.digests[:2], "0" * 16, *steps.digests[3:]))
    fed = compare(run, replace(run, events=[*run.events[:number], others, *run.events[number + 1 :]]), tolerance=1.0)
    assert (fed.is_same, fed.compared_steps, fed.samples_differ_at) == (False, 40, 3)
    assert "step 3 is the first with different samples" in str(fed)
    slower = [{**line, "learning_rate": line["learning_rate"] * (1 + (line["step"] > 15))} for line in run.metrics]
    rates = compare(run, replace(run, metrics=slower), tolerance=1.0)
    assert (rates.is_same, rates.rates_differ_at) == (False, 20)


def test_only_lines_that_cover_the_same_steps_are_compared(digits_run: Path) -> None:
    run = past_run.read(digits_run)
    sparse = replace(run, metrics=run.metrics[1::2])
    assert compare(run, sparse, tolerance=0.0).losses.compared_lines == 0
    (start, *others) = run.events
    assert isinstance(start, ledger.Start)
    # The run was killed, and went on from step 7: its next line, that of step 10, covers steps 8 to 10.
    kept = [event for event in others if ledger.last_step(event) <= 5]
    resumed = replace(run, events=[start, *kept, replace(start, from_step=7)])
    found = compare(run, resumed, tolerance=0.0).losses
    assert (found.compared_lines, found.first_beyond) == (len(run.metrics) - 1, None)
    assert compare(resumed, resumed, tolerance=0.0).losses.compared_lines == len(run.metrics)
