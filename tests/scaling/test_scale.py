"""`samerun scale`: what it fits, what it measures by real runs, and what it makes of folders that are not whole."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure
from processes import REPOSITORY, Started, read, read_lines

from app.errors import DataError, RecipeError, RunFolderError, TopologyError
from app.scaling import figures, fit, plot, scale_command, sweep
from app.scaling.advice import advise
from app.scaling.figures import Measured, Method, Row

PUBLISHED = {1: 20531.864, 4: 5355.923, 16: 1488.169, 32: 790.722, 64: 416.457}
PUBLISHED_128_S = 288.313
IN_PLACE = REPOSITORY / "tests" / "scripts" / "in_place"
SWEEP = ["--recipe", "digits", "--processes", "1,2", "--repeats", "1", "--steps", "4", "--warm-up-steps", "2"]


def at(devices):
    return np.array(float(devices))


# The fit -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("serial", {"1/n": 1000.0, "1": 4.0}),
        ("waiting", {"1/n": 1000.0, "log2(n)/n": 30.0}),
        ("tree", {"1/n": 1000.0, "log2(n)": 1.5}),
        ("ring", {"1/n": 1000.0, "n-1": 0.2}),
    ],
)
def test_an_exact_law_is_found_and_has_the_most_weight(name, terms):
    sizes = [1, 2, 4, 8, 16]
    values = {"1/n": lambda n: 1 / n, "1": lambda n: 1, "log2(n)/n": lambda n: math.log2(n) / n, "log2(n)": math.log2,
              "n-1": lambda n: n - 1}  # fmt: skip

    def seconds(n):
        return sum(seconds * values[term](n) for term, seconds in terms.items())

    found = fit.fit(sizes, [seconds(n) for n in sizes])
    law = next(law for law in found.laws if law.name == name)
    assert {term: value for term, value in law.coefficients_s.items() if value > 1e-6} == pytest.approx(terms)
    assert abs(law.miss) < 1e-9
    assert law.weight >= max(other.weight for other in found.laws) - 1e-9
    low, high = found.between(at(32))
    assert low * 0.999999 <= seconds(32) <= high * 1.000001
    assert float(found.seconds(at(32))) == pytest.approx(seconds(32), rel=0.1)


def test_the_published_times_foretell_the_next_size():
    found = fit.fit(list(PUBLISHED), list(PUBLISHED.values()))
    assert float(found.seconds(at(128))) == pytest.approx(PUBLISHED_128_S, rel=0.25)
    low, high = found.between(at(128))
    assert low < PUBLISHED_128_S < high
    assert high < 2 * low  # which says something
    for known, next_size in ((3, 32), (4, 64)):
        earlier = fit.fit(list(PUBLISHED)[:known], list(PUBLISHED.values())[:known])
        assert float(earlier.seconds(at(next_size))) == pytest.approx(PUBLISHED[next_size], rel=0.1)


def test_the_range_holds_the_truth_of_nearly_all_noisy_sweeps():
    rng, sizes, held = np.random.default_rng(0), [1, 2, 4, 8], 0
    for number in range(40):
        serial, other = rng.uniform(0, 0.5, 2) / 8
        grows = (np.log2, lambda n: n - 1, lambda n: np.log2(n) / n, np.sqrt)[number % 4]

        def seconds(n, serial=serial, other=other, grows=grows):
            return 1 / n + serial + other * grows(n) / grows(8)

        found = fit.fit(sizes, [seconds(n) * math.exp(0.04 * rng.standard_normal()) for n in sizes])
        low, high = found.between(at(16))
        held += low <= seconds(16) <= high
    assert held >= 36


def test_repeats_that_differ_make_the_range_wider():
    sizes, times = [1, 2, 4], [0.238, 0.194, 0.280]  # which only one law foretells

    def width(off):
        found = fit.fit(sizes * 2, [seconds * off for seconds in times] + [seconds / off for seconds in times])
        low, high = found.between(at(8))
        return float(high / low)

    assert width(1.0) < 1.1
    assert width(1.1) > 1.3


def test_two_sizes_tell_no_law():
    assert fit.fit([1, 2, 2], [1.0, 0.6, 0.5]) is None


# What follows --------------------------------------------------------------------------------------------------------------


def row(devices, *seconds, nodes=None, per_node=None):
    runs = [Measured(source=f"{devices}-{number}", seconds=value) for number, value in enumerate(seconds)]
    return Row(method="m", nodes=nodes, devices_per_node=per_node, devices=devices, runs=runs)


def test_an_efficiency_has_the_interval_of_its_repeats():
    method = Method("m", [row(1, 10.0, 10.2, 9.8), row(2, 6.0, 6.3, 5.7), row(4, 5.0)])
    share = method.efficiency(method.rows[1])
    # By hand: pooled deviation of the logarithms over 4 degrees of freedom, of which the t quantile is 2.776.
    logs = [np.log([10.0, 10.2, 9.8]), np.log([6.0, 6.3, 5.7])]
    deviation = math.sqrt(sum(float(np.var(some, ddof=1)) for some in logs) / 2)
    factor = math.exp(2.776 * deviation * math.sqrt(2 / 3))
    expected = np.mean(1 / np.array([6.0, 6.3, 5.7])) / np.mean(1 / np.array([10.0, 10.2, 9.8])) / 2
    assert (share.value, share.low, share.high) == pytest.approx((expected, expected / factor, expected * factor))
    assert Method("m", [row(1, 10.0), row(2, 6.0)]).efficiency(row(2, 6.0)).low is None


def test_the_largest_number_of_devices_that_is_efficient_enough_is_recommended():
    rows = [row(devices, seconds) for devices, seconds in PUBLISHED.items()]
    found = advise(Method("m", rows), wanted=0.8, is_legal=lambda devices: devices % 16 == 0)
    assert found.devices == 32
    assert "0.81 measured on 32" in found.why
    assert "0.77 measured on 64" in found.why
    found = advise(Method("m", rows[:4]), wanted=0.8, is_legal=lambda devices: True)
    assert 32 <= found.devices < 64  # beyond what was measured by the fit, and no further than twice that
    assert "by the fit on 64" in found.why
    assert found.units_per_s is None
    for one in rows[:4]:
        one.runs[:] = [replace(run, unit="tokens", units_per_s=4e6 / run.seconds) for run in one.runs]
    again = advise(Method("m", rows[:4]), wanted=0.8, is_legal=lambda devices: True)
    assert again.units_per_s == pytest.approx(4e6 / float(again.fit.seconds(at(found.devices))))
    found = advise(Method("m", [row(4, 4.0, nodes=1, per_node=4), row(8, 2.1, nodes=2, per_node=4)]), wanted=0.8,
                   is_legal=lambda devices: True)  # fmt: skip
    assert (found.devices, found.nodes, found.fit) == (8, 2, None)


def test_times_of_a_file_make_the_same_report(tmp_path, capsys):
    path = tmp_path / "published.csv"
    path.write_text("devices,seconds\n" + "".join(f"{n},{seconds}\n" for n, seconds in PUBLISHED.items()))
    assert scale_command.main(["--from", str(path), "--out", str(tmp_path / "out")], {}, say=print) == 0
    assert "published: 41 devices for an efficiency of at least 0.80" in capsys.readouterr().out
    foretold = read(tmp_path / "out" / "report.json")["methods"]["published"]["fit"]["foretold"]
    (seconds,) = (one["seconds"] for one in foretold if one["devices"] == 128)
    assert seconds["value"] == pytest.approx(PUBLISHED_128_S, rel=0.25)
    assert "| 128, foretold |" in (tmp_path / "out" / "report.md").read_text()
    path.write_text("devices,seconds\n1,10\n2,ten\n0,3\n")
    with pytest.raises(DataError, match=r"published.csv:3: .*ten[^$]*published.csv:4: "):
        figures.read_times(path)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({1: 100.0, 2: 53.0}, "m: too few sizes for a fit"),
        ({1: 100.0, 2: 90.0, 4: 40.0}, "m: too few sizes for a range of the fit"),
        ({1: 100.0, 2: 50.5, 4: 25.5, 8: 13.0}, "m, range of the fit"),
    ],
)
def test_a_range_that_would_be_over_everything_is_not_drawn(times: dict[int, float], said: str) -> None:
    found = advise(Method("m", [row(*pair) for pair in times.items()]), wanted=0.8, is_legal=lambda devices: True)
    speed, share = Figure().subplots(1, 2)
    plot._draw_speed(speed, found, plot._STYLES[0], shift=1.0, with_rates=False)
    plot._draw_share(share, found, plot._STYLES[0], shift=1.0)
    for axes in (speed, share):
        assert [label for label in axes.get_legend_handles_labels()[1] if "range" in label or "few" in label] == [said]


# Real runs -----------------------------------------------------------------------------------------------------------------


def scale(*arguments, environment=None):
    """Run `samerun scale` here; return its exit code and what it said."""
    said = []
    told = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    code = scale_command.main([*map(str, arguments)], environment or told, say=said.append)
    return code, said


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over 1 and 2 real processes."""
    folder = tmp_path_factory.mktemp("scale") / "digits"
    code, said = scale(*SWEEP, "--out", folder)
    assert code == 0, [path.read_text()[-2000:] for path in folder.glob("cases/*.log")]
    assert said == ["1/2 multi_gpu-1x1-1", "2/2 multi_gpu-1x2-1"]
    return folder


@pytest.fixture
def copied(swept, tmp_path):
    return Path(shutil.copytree(swept, tmp_path / "copied"))


@pytest.mark.multiproc
def test_every_figure_is_that_of_its_run_folder(swept):
    report = read(swept / "report.json")
    with (swept / "report.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [one["devices"] for one in report["rows"]] == [1, 2]
    for found, line in zip(report["rows"], table, strict=True):
        (run,) = found["runs"]
        assert read(swept / run["source"] / "run.json")["world_size"] == found["devices"]
        lines = {line["step"]: line for line in read_lines(swept / run["source"] / "metrics.jsonl")}
        assert list(lines) == [2, 4, 6]
        seconds = lines[6]["training_s"] - lines[2]["training_s"]
        assert run["samples_per_s"] == pytest.approx(4 * 64 / seconds)
        assert float(line["samples_per_s"]) == pytest.approx(4 * 64 / seconds)
        assert found["seconds"] == pytest.approx(1294 / run["samples_per_s"])
        assert found["device_hours"] == pytest.approx(found["devices"] * found["seconds"] / 3600)
        assert run["source"] in (swept / "report.md").read_text()
        waits = [lines[step]["data_wait_share"] for step in (4, 6)]
        assert min(waits) <= run["data_wait_share"] <= max(waits)
    assert report["rows"][1]["efficiency"] == pytest.approx(report["rows"][0]["seconds"] / report["rows"][1]["seconds"] / 2)
    assert (swept / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert (swept / "scaling.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.multiproc
def test_where_the_runs_count_tokens_so_does_the_report(copied, capsys):
    for place in copied.glob("cases/*/"):
        told = read(place / "run.json")
        (place / "run.json").write_text(json.dumps({**told, "unit": "tokens"}))
        lines = [{**line, "tokens_seen": 100 * line["samples_seen"]} for line in read_lines(place / "metrics.jsonl")]
        (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert scale("--from", copied)[0] == 0
    printed, report = capsys.readouterr().out, read(copied / "report.json")
    for row in report["rows"]:
        assert row["tokens_per_s"] == pytest.approx(100 * row["samples_per_s"])
        assert f"{row['tokens_per_s']:,.0f} tokens/s, an epoch in" in printed
    (recommended,) = (method["recommended"] for method in report["methods"].values())
    (rate,) = (row["tokens_per_s"] for row in report["rows"] if row["devices"] == recommended["devices"])
    assert recommended["units_per_s"] == pytest.approx(rate)
    assert f", about {rate:,.0f} tokens/s, for an efficiency of at least 0.80" in printed
    assert "| tokens/s |" in (copied / "report.md").read_text()
    with (copied / "report.csv").open() as file:
        assert {"samples_per_s", "tokens_per_s", "tokens_per_s_deviation"} <= next(csv.DictReader(file)).keys()


@pytest.mark.multiproc
def test_run_twice_it_reuses_what_is_done_and_refuses_another_sweep(copied):
    before = {path: path.read_bytes() for path in copied.glob("cases/*/run.json")}
    assert scale(*SWEEP, "--out", copied) == (0, [])
    assert {path: path.read_bytes() for path in copied.glob("cases/*/run.json")} == before
    assert len(before) == 2
    with pytest.raises(
        RunFolderError, match=r"another sweep: steps 4, now 5 \(--steps\); the recipe digits, now digits seed=1"
    ):
        scale(*SWEEP, "--steps", "5", "--out", copied, "seed=1")
    about = read(copied / "scale.json")
    (copied / "scale.json").write_text(json.dumps({**about, "machine": "another"}))
    with pytest.raises(RunFolderError, match="was measured on another, and this is"):
        scale(*SWEEP, "--repeats", "2", "--out", copied)
    with pytest.raises(RunFolderError, match="is not the folder of a sweep"):
        scale(*SWEEP, "--out", copied / "cases")
    with pytest.raises(RecipeError, match=r"train.steps .*use --steps"):
        scale(*SWEEP, "--out", copied, "train.steps=3")
    with pytest.raises(TopologyError, match="there is no allocation here"):
        scale(*SWEEP, "--nodes", "2", "--out", copied)


@pytest.mark.multiproc
def test_a_failed_case_is_a_row_that_says_why(copied):
    """And it fails again only when that is asked for."""
    broken = {"PYTHONPATH": f"{IN_PLACE}:{REPOSITORY}", "PATH": "/usr/bin:/bin", "IN_PLACE": "mistake 1"}
    more = [*SWEEP, "--repeats", "2", "--processes", "1,3", "--out", copied]
    code, said = scale(*more, environment=broken)
    assert (code, said[0]) == (1, "1/1 multi_gpu-1x1-2")
    one, three = read(copied / "report.json")["rows"]
    (why,) = one["problems"]
    assert "multi_gpu-1x1-2: exit code " in why
    assert "DataError: not there" in why
    assert Path(why[why.rindex("(") + 1 : -1]).read_text().count("not there") == 1
    assert (len(one["runs"]), three["runs"]) == (1, [])
    assert "which 3 processes cannot divide" in three["problems"][0]
    folder = sweep.read(copied)
    assert scale_command._missing(folder, retry=False) == []
    assert [str(case) for case in scale_command._missing(folder, retry=True)] == ["multi_gpu-1x1-2"]


def test_an_interrupted_sweep_ends_its_case_which_begins_anew(tmp_path):
    """With a run that only counts steps, for 5 s, in place of a training."""
    out = tmp_path / "out"
    command_line = [sys.executable, "-m", "launch.cli", "scale", *SWEEP, "--out", str(out)]
    started = Started(command_line, env={"PYTHONPATH": f"{IN_PLACE}:{REPOSITORY}"})
    steps, deadline_s = out / "cases" / "multi_gpu-1x1-1" / "steps", time.monotonic() + 60
    while not steps.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    sweeping, *others = started.processes()
    assert others
    sweeping.terminate()
    finished = started.wait()
    assert (finished.returncode, "the same command resumes" in finished.output) == (130, True), finished.output
    assert psutil.wait_procs(others, timeout=10)[1] == []
    assert int(steps.read_text()) < 99
    names = [str(case) for case in scale_command._missing(sweep.read(out), retry=False)]
    assert names == ["multi_gpu-1x1-1", "multi_gpu-1x2-1"]
    assert scale("--from", out)[0] == 1
    assert "multi_gpu-1x1-1: it has not run" in (out / "report.md").read_text()


BROKEN = [
    ("metrics.jsonl", lambda text: text[: len(text) // 2], "has no line of step 6"),
    ("metrics.jsonl", lambda text: text.replace('"training_s"', '"other"'), "is broken: KeyError('training_s')"),
    ("metrics.jsonl", None, "metrics.jsonl is missing"),
    ("run.json", lambda text: "{", "run.json cannot be read"),
    ("run.json", lambda text: text.replace('"world_size": 2', '"world_size": 4'), "processes 4, not 2"),
]


@pytest.mark.multiproc
def test_a_broken_run_folder_is_a_sentence_and_the_rest_is_there(copied):
    folder = sweep.read(copied)
    case = folder.sweep.cases[1]
    for name, change, words in BROKEN:
        path = folder.run_dir(case) / name
        text = path.read_text()
        path.unlink()
        if change:
            path.write_text(change(text))
        with pytest.raises(RunFolderError) as caught:
            figures.read_case(folder, case)
        assert words in str(caught.value)
        if change is None:
            assert scale("--from", copied, "--out", copied / "again")[0] == 1
        path.write_text(text)
    assert figures.read_case(folder, case)
    one, two = read(copied / "again" / "report.json")["rows"]
    assert "metrics.jsonl is missing" in two["problems"][0]
    assert (len(one["runs"]), two["runs"]) == (1, [])
    assert two["problems"][0] in (copied / "again" / "report.md").read_text()
    assert (copied / "again" / "scaling.png").exists()


# Jobs ----------------------------------------------------------------------------------------------------------------------


def test_each_case_is_a_job_of_its_own_and_is_collected_later(tmp_path, monkeypatch):
    programs, queue, submitted = tmp_path / "bin", tmp_path / "queue", tmp_path / "runs" / "submitted"
    programs.mkdir()
    ask = f"cat {queue} 2>/dev/null || {{ echo Invalid job id >&2; exit 1; }}"
    for name, lines in {"sbatch": "echo 22", "squeue": ask}.items():
        (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.chdir(tmp_path)
    options = "--time 00:10:00 --partition gpu --gpus-per-node a100:{processes}"
    jobs = [*SWEEP, "--nodes", "2", f"--submit={options}", "--out", "out"]
    queue.write_text("22 PENDING\n")
    assert scale(*jobs, environment=environment)[0] == 1
    scripts = {path.read_text() for path in submitted.glob("*.sh")}
    for devices in (1, 2):
        (text,) = (text for text in scripts if f"--run-dir out/cases/multi_gpu-2x{devices}-1 " in text)
        for line in (f"--gpus-per-node=a100:{devices}", "--time=00:10:00", "--partition=gpu", "--nodes=2"):
            assert f"#SBATCH {line}\n" in text
    report = Path("out", "report.md")
    assert "job 22 is not over" in report.read_text()
    # The job ends, and it was not a training.
    queue.unlink()
    log = Path(read(Path("out", "cases", "multi_gpu-2x1-1.json"))["log"])
    log.write_text("[node1] DataError: nothing there\nsrun: error: node1: task 0: Exited with exit code 6\n")
    scale(*jobs, environment=environment)
    assert {path.read_text() for path in submitted.glob("*.sh")} == scripts
    assert len(scripts) == 2
    assert "multi_gpu-2x1-1: job 22 is over without a result: [node1] DataError: nothing there" in report.read_text()


def test_weak_scaling_grows_the_global_batch_with_the_processes(tmp_path):
    options = scale_command._parser().parse_intermixed_args([*SWEEP, "--weak", "train.global_batch_size=48"])
    folder = sweep.open_for(tmp_path / "weak", scale_command._asked(options), {})
    size = folder.sweep.sizes[1]
    assert "train.global_batch_size=96" in folder.own_overrides(size)
    assert [str(case) for case in folder.sweep.cases] == ["multi_gpu-1x1-weak-1", "multi_gpu-1x2-weak-1"]
    assert folder.is_legal(7)
