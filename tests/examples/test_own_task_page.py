"""docs/your-own-task.md, run as it stands: its files are written, its commands run, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import ONE_THREAD, REPOSITORY, TIMEOUT_S, clean_environment, read

PAGE = (REPOSITORY / "docs" / "your-own-task.md").read_text()


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    output, written = "", []
    for language, code in blocks:
        if language == "bash":
            output += run(tmp_path, code)
        elif name := re.match(r"# (\w+\.\w+)\n", code):  # other blocks are excerpts
            written.append(name[1])
            (tmp_path / name[1]).write_text(code)
    assert written == ["longer.py", "longer.yaml"]
    assert read(tmp_path / "runs" / "longer" / "result.json")["test_accuracy"] > 0.95
    (share,) = re.findall(r"point.txt  alike: (\d\.\d\d)$", output, re.MULTILINE)
    assert float(share) > 0.9


def run(folder: Path, code: str) -> str:
    environment = {**clean_environment(), **ONE_THREAD, "SAMERUN_CACHE": os.environ["SAMERUN_CACHE"]}
    ended = subprocess.run(
        ["bash", "-e", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, (code, ended.stdout, ended.stderr)
    return ended.stdout
