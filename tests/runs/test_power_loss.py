"""A run folder that lost power: whatever its files of words hold, the run goes on, and who reads them says what is left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import read, read_lines, train

from app.checks.verify import verify
from launch import cli

pytestmark = pytest.mark.multiproc

RECIPE = ("--recipe", "digits", "train.global_batch_size=64", "log.every_steps=1", "checkpoint.every_steps=4",
          "train.evaluate_every_epochs=0", "--resume", "auto")  # fmt: skip
STEPS = 12

ZEROS, LARGE = bytes(4096), b'{"step": 1' + b"0" * 300 + b"}"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight of its steps."""
    run_dir = tmp_path_factory.mktemp("power") / "run"
    train("cpu", run_dir, *RECIPE, "train.steps=8").check()
    return run_dir


@pytest.mark.parametrize(
    ("rest", "whole"),
    [(b'{"step": 9, "lo', b""), (ZEROS, ZEROS), (LARGE + b"\n", b'{"init_from"')],
    ids=["cut", "zeros", "large"],
)
def test_a_run_whose_files_are_broken_goes_on_and_says_so(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: bytes, whole: bytes
) -> None:
    """The end of every file of lines, and a line in its midst, and every other file that a later start reads."""
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    for name in ("metrics.jsonl", "evaluations.jsonl", "ledger.jsonl"):
        lines = (run_dir / name).read_bytes().splitlines(keepends=True)
        broken = rest.rstrip(b"\n") + b"\n"
        (run_dir / name).write_bytes(b"".join([*lines[:1], broken, *lines[1:], rest]))
    for name in ("run.json", "trackers.json", "outcome.json"):
        (run_dir / name).write_bytes(whole)
    for command in (["verify"], ["watch", "--once"], ["report"]):
        assert cli.main([*command, str(run_dir)]) == 0
        told = "".join(capsys.readouterr())
        assert "ledger.jsonl: 2 lines are damaged or truncated (the first is line 2: " in told, (command, told)
    finished = train("cpu", run_dir, *RECIPE, f"train.steps={STEPS}").check()
    assert "Traceback" not in finished.output
    is_an_object = rest.startswith(LARGE)  # which stays in the ledger, as the line of another version would
    for name in ("metrics.jsonl", "evaluations.jsonl", *(() if is_an_object else ("ledger.jsonl",))):
        assert f"note: {run_dir / name}: 2 lines are damaged or truncated (the first is line 2: " in finished.output
    assert f"note: {run_dir / 'run.json'} cannot be read: it is " in finished.output
    assert read(run_dir / "run.json")["resumed_step"] == 8
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    verdict = str(verify(run_dir)[0]).splitlines()
    assert verdict[0] == f"every one of the {STEPS} global batches was applied exactly once, over 2 attempts"
    assert len(verdict) == 1 + is_an_object
