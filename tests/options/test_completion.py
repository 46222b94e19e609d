"""`samerun completion`: what a real bash completes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# As bash calls the function that `complete` registered: with the command, the word and the word before it.
SIMULATION = """
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
read -ra registered <<< "$(complete -p samerun)"
for ((i = 0; i < ${#registered[@]}; i++)); do [ "${registered[i]}" != -F ] || function=${registered[i + 1]}; done
"$function" samerun "${!#}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "samerun"
    with file.open("w") as output:
        subprocess.run([sys.executable, "-m", "launch.cli", "completion", "bash"], stdout=output, check=True)
    return file


CASES = {
    "samerun ver": "verify", "samerun launch --max-re": "--max-restarts --max-requeues", "samerun recipes lm_": "lm_tiny",
    "samerun launch --preset deepspeed_zero3": "deepspeed_zero3 deepspeed_zero3_offload",
    "samerun submit --recipe m": "mnist mine.yaml my-runs", "samerun launch --mixed-precision ": "no bf16 fp16",
    "samerun data ": "inspect tokenize check pack", "samerun resume my": "my-runs",
}  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), CASES.items(), ids=CASES)
def test_bash_completes(script: Path, tmp_path: Path, words: str, expected: str) -> None:
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "my-runs").mkdir()
    command = ["bash", "--norc", "-c", SIMULATION, "bash", str(script), *words.split(" ")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    assert sorted(found) == sorted(expected.split())
