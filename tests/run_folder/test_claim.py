"""One writer: whatever an older start was about to write when its folder was taken over, nobody reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import REPOSITORY, SCRIPTS, read_lines

from app.errors import RunFolderError
from app.runs.claim import Claim, claim

KINDS = ("claim", "lines", "start", "result", "checkpoint", "trackers", "stacks", "profile")


@pytest.fixture(scope="module")
def stopped() -> Iterator[subprocess.Popen[str]]:
    """What starts older starts."""
    command = [sys.executable, str(SCRIPTS / "stopped.py")]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def begun(run_dir: Path) -> None:
    """A run that has taken four steps, and was asked to stop."""
    run_dir.mkdir()
    ours = claim(run_dir)
    ours.go_on_after(0)
    for step in range(1, 5):
        for name in ("metrics.jsonl", "ledger.jsonl"):
            ours.append(name, {"step": step})
    for name in ("STOP", "outcome.json", "result.json", "run.json", "tensorboard/events.out.tfevents.1.hparams"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text('{"written": "before"}')


def taken_over(run_dir: Path) -> Claim:
    """The claim of the start that goes on after two steps."""
    ours = claim(run_dir)
    ours.go_on_after(2)
    ours.append("metrics.jsonl", {"step": 3, "written_by": "the newer start"})
    ours.write_json("result.json", {"of": "the newer start"})
    return ours


def contents(run_dir: Path) -> dict[str, bytes]:
    """All files that anybody reads."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.relative_to(run_dir).parts[0] != "starts")
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_start_is_read_that_was_stopped_anywhere_and_goes_on_when_another_has_taken_over(
    stopped: subprocess.Popen[str], tmp_path: Path, kind: str
) -> None:
    """Before each of its operations on files in turn, until it has no more of them."""
    number, sentences = 0, 0
    while True:
        run_dir = tmp_path / str(number)
        begun(run_dir)
        ask(stopped, f"{kind} {number} {run_dir}")
        state = answer(stopped)
        if state == "done":
            assert answer(stopped) == ""
            break
        ours = taken_over(run_dir)
        before = contents(run_dir)
        ask(stopped, "go")
        said = answer(stopped)
        if "the older start" not in str(contents(run_dir)) and kind == "claim" and said == "":
            with pytest.raises(RunFolderError, match="has taken"):  # it had no number yet, and is the newer one now
                ours.check()
        else:
            assert said == "" or "RunFolderError: another attempt of this run, on " in said, (number, said)
            assert contents(run_dir) == before, (number, said)
            sentences += said != ""
            ours.check()
        number += 1
    assert number >= 3
    print(f"{kind}: stopped before {number} operations, of which {sentences} said so")
    assert sentences > 0 or kind == "lines"


def test_the_newest_of_many_claims_counts_and_one_place_is_left(tmp_path: Path) -> None:
    claims = [claim(tmp_path) for _ in range(4)]
    for ours in claims[:-1]:
        with pytest.raises(RunFolderError, match=r"another attempt of this run, on .*, has taken .* over: this one stops"):
            ours.check()
    claims[-1].check()
    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["4"]


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    ours = claim(run_dir)
    ours.append("metrics.jsonl", {"step": 1})
    run_dir.rename(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"run, the run folder, or .*starts/1 in it, has been removed: this attempt ends"):
        ours.write_text("result.json", "{}")


def test_a_takeover_keeps_what_came_before_its_step_and_says_what_it_cannot_read(tmp_path: Path) -> None:
    older = claim(tmp_path)
    older.go_on_after(0)
    for step in range(1, 9):
        older.append("metrics.jsonl", {"step": step})
        older.append("ledger.jsonl", {"event": "steps", "first": step})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    broken = [b"\0" * 40 + b"\n", b'{"step": 1e400}\n', b'{"step": "3"}\n', b"\xff\n", b"[" * 100_000 + b"\n",
              json.dumps({"step": 10**300}).encode() + b"\n"]  # fmt: skip
    path.write_bytes(b"".join([*lines[:3], *broken, *lines[3:], b'{"ste']))
    newer = claim(tmp_path)
    assert newer.go_on_after(5) == [
        f"{path}: 7 lines are damaged or truncated (the first is line 4: it is not JSON (Expecting value: line "
        "1 column 1 (char 0))), and ignored."
    ]
    newer.append("metrics.jsonl", {"step": 6, "again": True})
    older.append("metrics.jsonl", {"step": 9})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5, 6]
    assert len(read_lines(tmp_path / "ledger.jsonl")) == 8
