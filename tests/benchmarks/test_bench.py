"""`python -m benchmarks` measures real programs, and a program that fails is named."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from processes import ONE_THREAD, Started

from app.errors import TrainingError
from benchmarks.__main__ import MODELS, write_images
from benchmarks.contest import HAND, ON_CPU, SAMERUN, Entry, Found, compete, shares, spread, start

pytestmark = pytest.mark.multiproc


def table(output: str, title: str) -> dict[str, list[str]]:
    lines = output[output.index(title) :].partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}


@pytest.mark.long
def test_programs_take_turns_with_images_and_text() -> None:
    small = ["--models", "linear", "llama", "--rounds", "2", "--steps", "2", "--samples", "1000"]
    output = Started([sys.executable, "-m", "benchmarks", *small], env=ONE_THREAD).wait().check().output
    linear, llama = (table(output, f"{model}, threads: 1; 2 rounds of 2 steps") for model in ("linear", "llama"))
    assert {HAND, "hand-written", SAMERUN, "accelerate"} <= linear.keys()
    assert {HAND, "hand-written", SAMERUN, "accelerate", "transformers"} <= llama.keys()
    for cells in (*linear.values(), *llama.values()):
        assert all(float(cell.split()[0]) > 0 for cell in cells)
    assert linear[HAND][1] == "1.000 (1.000 to 1.000)"
    assert llama[SAMERUN][2] == "1.000 (1.000 to 1.000)"
    assert "torch 2." in output


def entry(program: str, folder: Path) -> Entry:
    write_images(folder, 1000, (1, 28, 28))
    recipe, overrides = MODELS["linear"]
    task = {"program": program, "recipe": recipe, "overrides": (*overrides, f"data.path={folder}"), "linear": True}
    return Entry(task=task, variables=ON_CPU)


def test_a_program_that_ends_between_its_turns_is_named(tmp_path: Path) -> None:
    with start("the reference", entry(HAND, tmp_path / "data"), threads=1, log=tmp_path / "log") as contestant:
        contestant.answer()
        assert contestant.run(10)["cpu_s"] > 0
        psutil.Process(contestant.process.pid).kill()
        contestant.process.wait()
        with pytest.raises(TrainingError, match="the reference failed before all of it was measured"):
            contestant.run(10)


def test_a_program_that_fails_leaves_the_others(tmp_path: Path) -> None:
    good = entry(HAND, tmp_path / "data")
    broken = Entry(task={**good.task, "program": "none of them"}, variables={})
    found = compete({"good": good, "broken": broken}, steps=1, rounds=1, threads=1, folder=tmp_path, end_s=0.0)
    assert found.wall_us.keys() == {"good"}
    assert "KeyError" in found.failures["broken"]


def test_shares_are_those_of_the_same_round() -> None:
    # The machine is ten times as slow in the second round, for both.
    found = Found(cpu_us={"reference": [100.0, 1000.0, 100.0], "samerun": [125.0, 1250.0, 125.0]})
    assert spread(shares(found.cpu_us, "samerun", "reference"), ".1f") == "0.8 (0.8 to 0.8)"
