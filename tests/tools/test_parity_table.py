"""Comparing runs: what counts as the same, and that nothing passes for want of something to compare."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import Started
from rich.console import Console

from app.errors import PresetError, RecipeError, RunFolderError
from app.recipe.schema import Recipe, TrainRecipe
from app.record.loss_curves import LossCurve, Variant, compare, read_curve, relative_differences
from app.tasks.image_classification.sections import AugmentRecipe, Sections
from app.tools import parity
from app.tools.parity import Outcome, choose_cases, curves_table, summary_table
from launch import cli

CASE = Variant("multi_gpu", 2, 1)


def curve(losses, rates=None, samples=None):
    steps = len(losses)
    rates = rates or [0.1 * (step + 1) for step in range(steps)]
    samples = samples or [(2 * step, 2 * step + 1) for step in range(steps)]
    return LossCurve(tuple(losses), tuple(rates), tuple(map(tuple, samples)))


REFERENCE = curve([2.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("found", "largest", "at_step", "rates_at", "samples_at", "same"),
    [
        (curve([2.0, 1.0, 0.5]), 0, 1, None, None, True),
        (curve([2.0, 1.0 + 9e-6, 0.5]), 9e-6, 2, None, None, True),
        (curve([2.0, 1.0, 0.5 * (1 + 2e-5)]), 2e-5, 3, None, None, False),
        (curve([2.0, math.nan, 0.5]), math.inf, 2, None, None, False),
        (curve([2.0, 1.0, math.inf]), math.inf, 3, None, None, False),
        (curve([2.0, 1.0, 0.5], rates=[0.1, 0.2, math.nextafter(0.1 * 3, 1)]), 0, 1, 3, None, False),
        (curve([2.0, 1.0, 0.5], samples=[(0, 1), (3, 2), (4, 5)]), 0, 1, None, 2, False),
        (curve([2.0, 1.0, 0.5], samples=[(0, 1), (2, 3), (4,)]), 0, 1, None, 3, False),
    ],
    ids=["equal", "within", "beyond", "nan", "inf", "one ulp of learning rate", "order of samples", "a sample less"],
)
def test_compare(found, largest, at_step, rates_at, samples_at, same):
    comparison = compare(REFERENCE, found)
    assert comparison.largest_difference == pytest.approx(largest, rel=1e-6)
    assert (comparison.at_step, comparison.learning_rates_differ_at, comparison.samples_differ_at) == (
        at_step,
        rates_at,
        samples_at,
    )
    assert comparison.is_same(1e-5) is same


def test_two_runs_that_are_not_finite_are_not_the_same():
    broken = curve([2.0, math.nan, 0.5])
    assert math.isinf(compare(broken, broken).largest_difference)
    assert not compare(broken, broken).is_same(1e-5)


def test_a_loss_of_zero_is_compared():
    assert relative_differences([0.0, 0.0], [0.0, 1e-12]) == [0.0, math.inf]


LOSSES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30)


@given(LOSSES, st.data())
def test_differences_are_numpys(losses, data):
    others = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(losses), max_size=len(losses)))
    expected = np.abs(np.array(others) - np.array(losses)) / np.array(losses)
    found = compare(curve(losses), curve(others))
    np.testing.assert_allclose(relative_differences(losses, others), expected, rtol=1e-12)
    assert found.at_step == int(np.argmax(expected)) + 1


def test_curves_of_different_length_are_not_compared():
    with pytest.raises(ValueError, match="shorter"):
        compare(REFERENCE, curve([2.0, 1.0]))


# Reading ---------------------------------------------------------------------------------------------------------------------


def write_run(folder, *, steps=3, world_size=2, accumulation=1, preset="multi_gpu", **files):
    """A run folder as a run writes it; `files` replaces texts."""
    lines = [
        {"step": k, "samples_seen": 2 * k, "epoch": 0, "loss": 2.0 / k, "learning_rate": 0.1 * k} for k in range(1, steps + 1)
    ]
    texts = {
        "run.json": json.dumps({"world_size": world_size, "accumulation": accumulation, "preset": preset}),
        "result.json": json.dumps({"steps": steps}),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "samples.jsonl": "".join(json.dumps({"step": k, "samples": [2 * k, 2 * k + 1]}) + "\n" for k in range(1, steps + 1)),
    }
    for name, text in texts.items():
        replaced = files.get(name.partition(".")[0], text)
        if replaced is not None:
            (folder / name).write_text(replaced)
    return folder


def test_a_run_is_read(tmp_path):
    found = read_curve(write_run(tmp_path), CASE, steps=3)
    assert found.losses == (2.0, 1.0, 2.0 / 3)
    assert found.learning_rates == (0.1, 0.2, 0.1 * 3)
    assert found.samples == ((2, 3), (4, 5), (6, 7))


def line(step, **more):
    return json.dumps({"step": step, "loss": 1.0, "learning_rate": 0.1, **more}) + "\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 1}, "'processes': 1"),
        ({"accumulation": 2}, "'accumulation': 2"),
        ({"preset": "fsdp2"}, "fsdp2"),
        ({"preset": None}, "None"),
        ({"steps": 2}, "2 steps, where 3"),
        ({"run": None}, "run.json is missing"),
        ({"result": None}, "result.json is missing"),
        ({"result": "{"}, "result.json cannot be read"),
        ({"metrics": None}, "metrics.jsonl is missing"),
        ({"metrics": ""}, "metrics.jsonl has the steps"),
        ({"metrics": line(1) + line(2)}, "1, 2, where 1 to 3"),
        ({"metrics": line(1) + line(3) + line(2)}, "1, 3, 2"),
        ({"metrics": line(1) + line(2) + line(2) + line(3)}, "1, 2, 2, 3"),
        ({"metrics": line(1) + line(2, loss=None) + line(3)}, "1, 3, where"),
        ({"metrics": line(1) + line(2) + '{"step": 3}\n'}, "broken: a line has no 'loss'"),
        ({"metrics": line(1) + line(2) + line(3)[:9]}, "line 3: it is cut"),
        ({"samples": None}, "samples.jsonl is missing"),
        ({"samples": '{"step": 1, "samples": [1]}\n'}, "samples.jsonl has the steps 1, where"),
        ({"samples": "".join(f'{{"step": {k}, "samples": []}}\n' for k in (1, 2, 3))}, "samples.jsonl has the steps"),
    ],
)
def test_a_run_that_is_not_whole_is_not_read(tmp_path, changes, words):
    with pytest.raises(RunFolderError) as caught:
        read_curve(write_run(tmp_path, **changes), CASE, steps=3)
    assert words in str(caught.value)


def test_zero_steps_are_never_compared(tmp_path):
    with pytest.raises(RunFolderError):
        read_curve(write_run(tmp_path, steps=0), CASE, steps=0)


# Cases -----------------------------------------------------------------------------------------------------------------------


def test_combinations_that_cannot_be_are_named():
    recipe = Recipe(train=TrainRecipe(global_batch_size=12))
    cases, skipped = choose_cases(recipe, presets=["cpu", "multi_gpu"], processes=[1, 2, 5], accumulations=[1, 4])
    assert list(map(str, cases)) == ["cpu-1x1", "cpu-1x4", "multi_gpu-1x1", "multi_gpu-1x4", "multi_gpu-2x1"]
    assert len(skipped) == 12 - len(cases)
    assert "cpu-2x1: preset cpu starts one process" in skipped
    assert any("multi_gpu-2x4: 12 samples" in sentence for sentence in skipped)


def test_mixing_pairs_skips_odd_micro_batches():
    recipe = Recipe(train=TrainRecipe(global_batch_size=12), sections=Sections(augment=AugmentRecipe(mixup=0.2)))
    cases, skipped = choose_cases(recipe, presets=["multi_gpu"], processes=[2, 4], accumulations=[1])
    assert list(map(str, cases)) == ["multi_gpu-2x1"]
    assert "is no multiple of 2, and augment.mixup" in skipped[0]


@given(st.integers(1, 96), st.booleans())
def test_every_case_divides_the_batch_as_it_says(size, mixes):
    size *= 2
    recipe = Recipe(
        train=TrainRecipe(global_batch_size=size), sections=Sections(augment=AugmentRecipe(mixup=0.2 if mixes else 0.0))
    )
    cases, skipped = choose_cases(recipe, presets=["multi_gpu"], processes=range(6), accumulations=range(4))
    assert len(cases) + len(skipped) == 24
    for case in cases:
        assert size % (case.processes * case.accumulation) == 0
        assert not (mixes and size // (case.processes * case.accumulation) % 2)


def test_ranks_that_compute_together_are_one_case_of_the_whole_batch(tmp_path):
    path, sizes = tmp_path / "parts.yaml", "parallelism_config: {parallelism_config_tp_size: 2}"
    path.write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2}}\n{sizes}\n")
    recipe = Recipe(train=TrainRecipe(global_batch_size=2))
    cases, skipped = choose_cases(recipe, presets=[str(path)], processes=[2, 3, 4, 8], accumulations=[1])
    assert [case.processes for case in cases] == [2, 4]
    assert ["which does not divide the 3 processes" in skipped[0], "cannot be divided by 4" in skipped[1]] == [True, True]


def test_an_unknown_preset_stops_before_anything_runs():
    with pytest.raises(PresetError, match="fsdp2"):
        choose_cases(Recipe(), presets=["fsdp"], processes=[1], accumulations=[1])


# Tables and exit code --------------------------------------------------------------------------------------------------------


def printed(table):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def outcomes(*curves):
    cases = [Variant("cpu", 1, 1), Variant("multi_gpu", 2, 1), Variant("fsdp2", 2, 2), Variant("deepspeed_zero3", 2, 1)]
    return [
        Outcome(case=case, elapsed_s=1.5, curve=found, failure="" if found else "exit code 3")
        for case, found in zip(cases, curves, strict=False)
    ]


def test_the_tables_show_what_differs():
    reference, *others = outcomes(REFERENCE, REFERENCE, curve([2.0, 1.1, 0.5], samples=[(0, 1), (2, 3), (5, 4)]), None)
    rows = printed(curves_table(reference, others, tolerance=1e-5)).splitlines()
    assert sum("1.1000000!" in row for row in rows) == 1
    assert sum("!" in row for row in rows) == 2  # the title explains the mark
    assert sum("failed" in row for row in rows) == 3
    summary = [row.split() for row in printed(summary_table(reference, others, tolerance=1e-5)).splitlines()]
    verdicts = {row[1]: row[-2] for row in summary if len(row) > 2 and "x" in row[1]}
    assert verdicts == {"multi_gpu-2x1": "same", "fsdp2-2x2": "different", "deepspeed_zero3-2x1": "failed"}


def test_in_a_pipe_the_widest_summary_is_whole(capsys):
    case = Variant("deepspeed_zero3_offload", 16, 4)
    other = curve([9.0, 1.1, 0.5], samples=[(1, 0), (3, 2), (5, 4)])
    reference = Outcome(case=Variant("cpu", 1, 1), elapsed_s=1.5, curve=REFERENCE)
    outcome = Outcome(case=case, elapsed_s=12345.6, curve=other)
    assert parity.report(parity.console_of(columns=1), reference, [outcome], tolerance=1e-5) == 1
    shown = capsys.readouterr().out
    assert all(words in shown for words in (str(case), "differ at 1", "12345.6", "different", "samples", "learning"))
    assert "…" not in shown


@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (25, 25), (26, 25), (1000, 25)])
def test_a_long_run_is_shown_from_its_first_to_its_last_step(steps, rows):
    reference, other = outcomes(*[curve([1.0 + step for step in range(steps)])] * 2)
    table = curves_table(reference, [other], tolerance=1e-5)
    shown = [int(cell) for cell in table.columns[0].cells]
    assert (len(shown), shown[0], shown[-1]) == (rows, 1, steps)
    assert shown == sorted(set(shown))


@pytest.mark.parametrize(
    ("curves", "code"),
    [
        ((REFERENCE, REFERENCE), 0),
        ((REFERENCE, curve([2.0, 1.1, 0.5])), 1),
        ((REFERENCE, REFERENCE, None), 1),
        ((None,), 1),
    ],
    ids=["same", "different", "a failed case", "no reference"],
)
def test_exit_code(curves, code):
    reference, *others = outcomes(*curves)
    assert parity.report(Console(quiet=True), reference, others, tolerance=1e-5) == code


@pytest.mark.parametrize(
    ("floor", "reason"),
    [
        (curve([2.0, 1.0, 0.5 * (1 + 4e-5)]), "the floor explains multi_gpu-2x1: "),
        (curve([2.0, 1.0, 0.5 * (1 + 2e-6)]), "the floor explains multi_gpu-2x1: "),
        (curve([2.0, 1.0, 0.5 * (1 + 1e-7)]), "the floor does not explain multi_gpu-2x1, "),
        (None, "is unknown"),
    ],
    ids=["as far", "within ten times", "far less", "failed"],
)
def test_a_difference_is_told_from_the_floor(capsys, floor, reason):
    """Other samples are never explained by it, and the verdict stays what it is."""
    near, far = curve([2.0, 1.0, 0.5 * (1 + 1.5e-5)]), curve([2.0, 1.0, 0.5], samples=[(0, 1), (2, 3), (5, 4)])
    reference, *others = outcomes(REFERENCE, near, far, REFERENCE)
    own = Outcome(case=Variant("cpu", 1, 2), elapsed_s=1.0, curve=floor, failure="" if floor else "exit code 3")
    assert parity.report(parity.console_of(columns=3), reference, others, tolerance=1e-5, floor=own) == 1
    shown = capsys.readouterr().out.replace("\n", " ")
    assert reason in shown
    assert ("does not explain fsdp2-2x2: something" in shown or "multi_gpu-2x1, fsdp2-2x2: something" in shown) == bool(floor)
    assert "deepspeed_zero3-2x1:" not in shown.partition("floor:")[2]


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1", "tiny"])
def test_a_tolerance_that_tells_nothing_is_refused(capsys, tolerance):
    assert cli.main(["parity", "--tolerance", tolerance]) == 2
    assert f"'{tolerance}': expected a number, 0 or more" in capsys.readouterr().err


@pytest.mark.multiproc
def test_ctrl_c_ends_it_without_a_traceback_and_with_what_it_started():
    started = Started([sys.executable, "-m", "launch.cli", "parity"])
    parity = started.processes()[0]
    while len(started.processes()) == 1:
        time.sleep(0.1)
    group = [process for process in psutil.process_iter() if os.getpgid(process.pid) == parity.pid]
    os.killpg(parity.pid, signal.SIGINT)
    finished = started.wait()
    assert finished.returncode == 130
    assert finished.output.endswith("samerun: interrupted\n")
    assert "Traceback" not in finished.output
    assert psutil.wait_procs(group, timeout=30)[1] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.steps=3"], "use --steps"),
        (["train.max_micro_batch=8", "log.samples=false"], "use --accumulation"),
        (["--presets", "cpu", "--processes", "2"], "there is no case to compare"),
        (["--processes", "7"], "there is no case to compare"),
    ],
)
def test_a_comparison_of_nothing_is_refused(capsys, arguments, words):
    assert cli.main(["parity", *arguments]) == RecipeError.exit_code
    assert words in capsys.readouterr().err
