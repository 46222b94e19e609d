"""Names and numbers that cannot be used: one sentence each."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from app.errors import RunFolderError
from app.runs import run_folder
from launch.start.resolved import unwritable


def test_a_name_that_is_no_text_is_refused_by_the_launcher(tmp_path: Path) -> None:
    problem = unwritable(tmp_path / os.fsdecode(b"r\xff"))
    assert problem is not None
    assert re.match(r"--run-dir is b'.*r\\xff', .* not UTF-8: choose another", problem)


@pytest.mark.parametrize("may_exist", [True, False])
def test_a_name_that_is_too_long_is_refused_in_a_sentence(may_exist: bool, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"the run folder .*rrr cannot be written: File name too long"):
        run_folder.choose(str(tmp_path / ("r" * 300)), "digits", may_exist=may_exist)
