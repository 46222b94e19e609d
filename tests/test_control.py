"""What a run is asked from outside: all ranks do it after the same step, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
from typing import Any

import pytest
from processes import REPOSITORY, Finished, Started, accelerate

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, dict[str, list[dict[str, Any]]]]:
    """What two ranks were told in each case of the script."""
    run_dir = tmp_path_factory.mktemp("asked")
    target = (str(REPOSITORY / "tests" / "scripts" / "asked.py"), str(run_dir))
    finished = Started(accelerate("multi_gpu", target=target, processes=2)).wait()
    cases = [json.loads(line) for line in finished.output.splitlines() if line.startswith("{")]
    assert len(cases) == 11, finished.output
    return finished, {case["case"]: case["ranks"] for case in cases}


@pytest.mark.parametrize(
    ("case", "why", "stop", "go_on"),
    [
        ("SIGTERM twice", "SIGTERM came", True, True),
        ("SIGUSR1", "SIGUSR1 came", True, True),
        ("SIGUSR2", "SIGUSR2 came", True, True),
        ("SIGINT", "SIGINT came", True, False),
        ("SIGTERM and SIGINT", "SIGINT came", True, False),
        ("SAVE", "the file SAVE was there", False, False),
        ("STOP and SAVE", "the file STOP was there", True, False),
        ("minutes", "checkpoint.every_minutes are over", False, False),
        ("end", "the allocation ends in 3", True, True),
        ("end at once", "the allocation ends in 10 s", True, True),
    ],
)
def test_all_ranks_are_told_the_same_at_the_same_step(told: Any, case: str, why: str, stop: bool, go_on: bool) -> None:
    first, second = told[1][case]
    assert {**first, "files": None} == {**second, "files": None}
    assert first["why"].startswith(why)
    assert (first["stop"], first["go_on"]) == (stop, go_on)
    assert first["step"] == 0 if case == "end at once" else first["step"] > 0


def test_a_file_goes_when_it_was_obeyed_and_asks_once(told: Any) -> None:
    assert [answer["while_saving"] for answer in told[1]["SAVE"]] == [[], []]
    assert told[1]["SAVE"][0]["files"] == [["SAVE", "outcome.json"], ["outcome.json"]]
    assert told[1]["STOP and SAVE"][0]["files"] == [["SAVE", "STOP", "outcome.json"], ["outcome.json"]]


def test_an_older_start_ends_on_all_ranks_when_its_folder_was_taken_over(told: Any) -> None:
    first, second = told[1]["taken over"]
    assert first == second
    assert first["error"] == "RunFolderError"
    assert "another start of this run" in first["text"]


def test_a_second_sigint_stops_at_once(told: Any) -> None:
    assert "rank 1 was interrupted, as by the usual handler: <built-in function default_int_handler>" in told[0].output
