"""`samerun scale`: real runs, measured, reused and failed, and the figures that follow from them."""

from __future__ import annotations

import csv
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import REPOSITORY, Finished, Started, python_path, read, read_lines

from app.reports import scale
from app.reports.scale import Size
from launch.cases import RunCase


def run_scale(out: Path, *, processes: str, **environment: str) -> Finished:
    words = ["--steps", "4", "--warm-up-steps", "2", "--devices", processes, "--repeats", "1", "--out", str(out)]
    return Started([sys.executable, "-m", "launch.cli", "scale", *words], env=environment).wait()


def table(out: Path) -> list[dict[str, str]]:
    with (out / "scaling.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 and 2 real processes."""
    out = tmp_path_factory.mktemp("scale") / "digits"
    finished = run_scale(out, processes="1,2").check()
    assert f"{out}/scaling.csv\n{out}/scaling.pdf\n{out}/scaling.png\n" in finished.output
    return out


@pytest.mark.multiproc
@pytest.mark.slow
def test_every_figure_is_that_of_its_run_folder(swept: Path) -> None:
    rates = []
    for processes, row in zip((1, 2), table(swept), strict=True):
        run = swept / f"multi_gpu-1x{processes}-1"
        about = read(run / "run.json")
        assert about["world_size"] == int(row["devices"]) == processes
        assert about["command"][:4] == ["samerun", "scale", "--steps", "4"]  # as typed
        lines = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
        rates.append(4 * 64 / (lines[6]["training_s"] - lines[2]["training_s"]))
        assert float(row["samples_per_s"]) == pytest.approx(rates[-1])
        assert float(row["speedup"]) == pytest.approx(rates[-1] / rates[0])
        assert float(row["efficiency"]) == pytest.approx(rates[-1] / rates[0] / processes)


@pytest.mark.multiproc
@pytest.mark.slow
def test_finished_runs_are_reused_and_what_fails_is_a_row_with_its_reason(swept: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(swept, tmp_path / "copied"))
    first, second = (copied / f"multi_gpu-1x{processes}-1" for processes in (1, 2))
    (second / "result.json").unlink()
    before = (first / "run.json").read_bytes()
    stand_in = python_path(REPOSITORY / "tests" / "scripts" / "in_place")
    finished = run_scale(copied, processes="1,2,3", PYTHONPATH=stand_in, IN_PLACE="mistake 1")
    assert finished.returncode == 1
    assert (first / "run.json").read_bytes() == before
    _, two, three = table(copied)
    assert (two["runs"], three["runs"], three["efficiency"]) == ("0", "0", "")
    log = copied / "multi_gpu-1x2-1.log"
    assert two["problems"] == f"exit code 6: [rank 0 on {socket.gethostname()}] DataError: not there ({log})"
    assert two["problems"] in finished.output
    assert "which 3 processes cannot split" in three["problems"]


def write_run(folder: Path, *, rate: float, unit: str = "samples") -> RunCase:
    """A run folder with the lines of a training at a rate."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"unit": unit}))
    lines = [{"step": step, f"{unit}_seen": 64 * step, "training_s": 64 * step / rate} for step in (2, 4, 6)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return RunCase(folder.name, folder, [])


def test_mean_deviation_speed_up_and_efficiency(tmp_path: Path) -> None:
    rates = {Size("a", 1, 1): [], Size("a", 1, 2): [90.0, 110.0], Size("a", 2, 4): [300.0], Size("b", 1, 1): [50.0]}
    planned = [(Size("a", 1, 1), RunCase("lost", tmp_path / "lost", []))]
    for size, values in rates.items():
        planned += [(size, write_run(tmp_path / f"{size}-{rate}", rate=rate, unit="tokens")) for rate in values]
    unit, rows = scale._measured(planned, {"lost": "why"}, first=2, last=6)
    keys = ("runs", "tokens_per_s", "tokens_per_s_deviation", "speedup", "efficiency", "problems")
    expected: list[tuple[Any, ...]] = [
        (0, None, None, None, None, "why"),
        (2, 100.0, 200.0**0.5, 1.0, 1.0, ""),
        (1, 300.0, None, 3.0, 0.75, ""),
        (1, 50.0, None, 1.0, 1.0, ""),
    ]
    assert unit == "tokens"
    for row, values in zip(rows, expected, strict=True):
        assert [row[key] for key in keys] == pytest.approx(values)


def test_weak_scaling_grows_the_global_batch_with_the_devices(tmp_path: Path) -> None:
    options = scale._parser().parse_intermixed_args(["--weak", "--repeats", "1", "train.global_batch_size=48"])
    planned = scale._plan(options, tmp_path, each="--processes")
    assert [case.name for _, case in planned] == ["multi_gpu-1x1-weak-1", "multi_gpu-1x2-weak-1"]
    batches = [[word for word in case.argv if word.startswith("train.global_batch_size=")] for _, case in planned]
    assert batches == [["train.global_batch_size=48"], ["train.global_batch_size=96"]]
