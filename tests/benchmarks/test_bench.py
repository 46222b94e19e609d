"""`python -m benchmarks` measures real programs, and what it reports follows from what it measured."""

from __future__ import annotations

import csv
import os
import re
import statistics
import sys

import psutil
import pytest
from processes import ONE_THREAD, Started, read

import benchmarks.__main__
from app.errors import RecipeError, RunFolderError, SamerunError, TrainingError
from benchmarks import contestants
from benchmarks.figures import LINEAR, REFERENCE, Group, Spread, Turn, results
from benchmarks.gpu import photographs

ALL = {REFERENCE, "hand-written", "samerun"}


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_small_bench_gives_a_whole_report(tmp_path):
    small = ["--recipe", "digits", "--models", "linear", "--threads", "1", "--processes", "1", "--peers", "none"]
    measured = ["--rounds", "3", "--window", "0.01", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", *small, *measured, "train.global_batch_size=32"]
    output = Started(command, env=ONE_THREAD).wait().check().output
    report = read(tmp_path / "bench.json")
    ((group, programs),) = report["results"].items()
    assert group == "linear, 1 process of 1 thread"
    assert programs.keys() == ALL
    assert all(name in output for name in (group, "samerun", "own ms a step"))
    assert "global_batch_size=32" in report["command"]
    assert report["versions"]["torch"]
    with (tmp_path / "bench.csv").open() as file:
        windows = list(csv.DictReader(file))
    for name, found in programs.items():
        of_program = [float(window["cpu_us_per_step"]) for window in windows if window["program"] == name]
        assert len(of_program) == 3
        assert min(of_program) > 1.0
        assert of_program == pytest.approx(found["cpu_us_per_step_of_rounds"], abs=0.01)
        assert found["cpu_us_per_step"]["median"] == pytest.approx(statistics.median(of_program), abs=0.01)
        references = programs[REFERENCE]["cpu_us_per_step_of_rounds"]
        ratios = [reference / own for reference, own in zip(references, found["cpu_us_per_step_of_rounds"], strict=True)]
        assert found["share_of_reference"]["median"] == pytest.approx(statistics.median(ratios))


@pytest.mark.multiproc
@pytest.mark.long
def test_starts_and_whole_commands_are_measured_without_a_peer_that_fails(tmp_path):
    broken = tmp_path / "broken"
    (broken / "timm").mkdir(parents=True)
    (broken / "timm" / "__init__.py").write_text("raise ImportError('made for another torch')\n")
    (broken / "timm-1.0.dist-info").mkdir()
    (broken / "timm-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 1.0\n")
    environment = {**ONE_THREAD, "PYTHONPATH": os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")])}
    small = ["--recipe", "digits", "--models", "convnet", "--threads", "1", "--processes", "1", "--peers", "timm"]
    measured = ["--rounds", "1", "--window", "0.01", "--starts", "2", "--epoch", "--out", str(tmp_path)]
    output = Started([sys.executable, "-m", "benchmarks", *small, *measured], env=environment).wait().check().output
    assert "left out: timm failed before all of it was measured" in output
    assert "made for another torch" in output
    assert "to the first step" in output
    whole = read(tmp_path / "bench.json")["whole_runs"]
    starts, epochs = whole["first_step_cpu_s_of_starts"], whole["epoch_cpu_s"]
    assert starts.keys() == epochs.keys() == ALL
    assert all(len(seconds) == 2 for seconds in starts.values())
    # It is the same start, and no process imports torch in less than a tenth of a second.
    assert all(0.1 < min(starts[name]) < 1.5 * epochs[name] for name in ALL)


@pytest.mark.multiproc
def test_a_program_that_ends_between_its_turns_is_named(tmp_path):
    task = {"program": REFERENCE, "recipe": "digits", "model": LINEAR, "folder": str(tmp_path), "shape": [1, 8, 8, 10]}
    with contestants.start("the reference", {**task, "overrides": []}, threads=1, log=tmp_path / "log") as contestant:
        contestant.take_first_step()
        assert contestant.run(10).cpu_s > 0
        (process,) = (child for child in psutil.Process().children() if "benchmarks.bench_case" in child.cmdline())
        process.kill()
        process.wait()
        with pytest.raises(TrainingError, match="the reference failed before all of it was measured"):
            contestant.run(10)


def test_ratios_are_those_of_the_same_round():
    group = Group("linear", 1, 1)
    # The machine is ten times as slow in the second round, for both.
    times = {
        REFERENCE: (100.0, 1000.0, 100.0),
        "samerun": (125.0, 1250.0, 125.0),
        "samerun + augmentation": (200.0, 2000.0, 200.0),
    }
    times |= {"fabric": (250.0, 2500.0, 1250.0), "fabric + augmentation": (300.0, 3000.0, 300.0)}
    rows = [Turn(group, name, number, 10, us, us) for name, all_us in times.items() for number, us in enumerate(all_us)]
    limit, ours, augmented, peer, augmented_peer = results(rows)
    assert limit.ratio == Spread(1.0, 1.0, 1.0)
    assert ours.ratio == Spread(0.8, 0.8, 0.8)
    assert ours.own_us == Spread(25.0, 25.0, 137.5)
    assert (ours.times_ours.median, augmented.times_ours.median) == (1.0, 1.0)
    assert peer.times_ours == Spread(2.0, 2.0, 6.0)
    assert augmented_peer.times_ours == Spread(1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("words", "kind", "sentence"),
    [
        (["--peers", "accelerat"], RecipeError, "'accelerat': choose from accelerate, fabric"),
        (["--models", "resnet-18"], RecipeError, "model.name is 'resnet-18': no such model"),
        (["--recipe", "digts"], RecipeError, "did you mean digits?"),
        (["--out", "/dev/null/no"], RunFolderError, "/dev/null/no (--out) cannot be made"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], kind: type[SamerunError], sentence: str, tmp_path):
    with pytest.raises(kind, match=re.escape(sentence)):
        benchmarks.__main__.main(["--out", str(tmp_path), *words])


@pytest.mark.multiproc
@pytest.mark.parametrize("program", ["hand-written on a device", "samerun"])
def test_what_a_window_uses_was_made_while_it_was_measured(program, tmp_path):
    """Batches that workers had ready from the time in which others ran are used up before."""
    photographs.write(tmp_path / "files", 40, classes=10)
    overrides = ["train.global_batch_size=24", "data.image_size=16", "data.resize_size=16", f"data.path={tmp_path / 'files'}"]
    task = {"program": program, "recipe": "imagenet_resnet50", "overrides": overrides, "model": "convnet"}
    task |= {"folder": str(tmp_path / "files"), "shape": [3, 16, 16, 10], "augmented": True}
    with contestants.start(program, task, threads=1, log=tmp_path / "log") as contestant:
        contestant.take_first_step()
        windows = [contestant.run(6) for _ in range(3)]
    assert [window.left_over for window in windows] == [0, 0, 0]
    (tally,) = (tmp_path / "files").glob("made-*")
    assert tally.stat().st_size >= 3 * 6, "all batches come from workers, and they are counted"
