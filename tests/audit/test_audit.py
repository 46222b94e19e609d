"""`samerun audit`: a table of scripts with the faults it must name, and scripts and command lines that it refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate import __version__ as accelerate_version
from accelerate.state import GradientState
from processes import REPOSITORY, clean_environment, python_path
from refusals import Refused, put
from torch.utils.data import DataLoader

from app.audit import audit, causes, recorder, runs
from app.errors import UsageError

HERE = Path(__file__).parent / "scripts"
ENTRIES = {entry["name"]: entry for entry in yaml.safe_load((HERE / "faults.yaml").read_text())}
# Between them each kind of run (accumulation, --resume-args, --config-file) and causes 1, 3, 5, 7, 9, 11, 12, 13 and 14.
RING = ("resume", "loader_not_prepared", "mean_of_micro_batches", "schedule_and_accuracy", "clipping_and_saving")
QUOTED = "clipping_and_saving"
"""The script whose output is in docs/audit.md, as train.py."""
AUDIT = [sys.executable, "-P", "-m", "launch.cli", "audit"]
TIMEOUT_S = 300


def started(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start an audit in a folder, in a process group of its own, with scratch folders next to this folder."""
    (folder.parent / "scratch").mkdir()
    environment = {**clean_environment(), "TMPDIR": str(folder.parent / "scratch"), **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*AUDIT, *words], cwd=folder, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str, str]:
    """Wait for an audit and return its exit code and outputs. It must leave no process and no scratch folder."""
    scratch = folder.parent / "scratch"
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in running(scratch):
            one.kill()
        raise AssertionError(f"still running after {TIMEOUT_S} s: {process.communicate()}") from None
    assert running(scratch) == []
    assert list(scratch.glob(f"{runs.SCRATCH}*")) == []
    return process.returncode, output, errors


def running(scratch: Path) -> list[psutil.Process]:
    """Return the processes that an audit started, by their environment."""
    return [it for it in psutil.process_iter(["environ"]) if (it.info["environ"] or {}).get("TMPDIR") == str(scratch)]


def project(tmp_path: Path, **files: str) -> Path:
    """Write Python files to a new folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


# The table -------------------------------------------------------------------------------------------------------------------


@pytest.mark.multiproc
@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.slow if it in RING else pytest.mark.long)
                                  for it in ENTRIES])  # fmt: skip
def test_the_causes_of_a_script_are_named_and_no_others(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    text = (HERE / entry["script"]).read_text()
    for old, new in entry.get("replace", []):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    options = ["--json"]
    folder = project(tmp_path, train=text)
    if "config_file" in entry:
        shutil.copy(HERE / entry["config_file"], folder)
        options += ["--config-file", entry["config_file"]]
    if "resume" in entry:
        options += ["--resume-args", f"{entry['resume'].split()[0]} {{dir}}"]
    variables = {key: str(value) for key, value in entry.get("environment", {}).items()}
    process = started(folder, *options, "train.py", *shlex.split(entry.get("arguments", "")), env=variables)
    code, output, errors = ended(process, folder)
    assert output, errors
    answer = json.loads(output)
    faults, notes = ({it["cause"] for it in answer["findings"] if it["is_fault"] is kind} for kind in (True, False))
    assert faults == set(entry["causes"]), output
    assert notes >= set(entry.get("notes", [])), output
    assert code == answer["exit_code"] == (1 if faults else 0 if entry.get("seeded", True) else 2)
    if "resume" in entry:
        assert "1 process, resumed" in [run["name"] for run in answer["runs"]]
    if name == QUOTED:
        page = " ".join((REPOSITORY / "docs" / "audit.md").read_text().split())
        assert [it["what"] for it in answer["findings"] if it["what"] not in page] == []


def test_the_table_has_every_cause_and_the_ring_is_in_it() -> None:
    named = {cause for entry in ENTRIES.values() for cause in (*entry["causes"], *entry.get("notes", []))}
    assert named == set(range(1, 16))
    assert set(RING) < ENTRIES.keys()
    assert {1, 3, 7, 9, 12, 14} <= {cause for name in RING for cause in ENTRIES[name]["causes"]}
    page = (REPOSITORY / "docs" / "audit.md").read_text()
    assert [cause for cause in range(1, 17) if f"\n{cause}. " not in page] == []


@pytest.mark.parametrize("script", sorted(HERE.glob("job_*.sh")), ids=lambda path: path.stem)
def test_a_job_script_with_one_machine_rank_for_all_nodes_is_found(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_wrong = script.stem.startswith("job_wrong")
    assert audit.main(["--script", str(script)], {}, say=print) == is_wrong
    output = capsys.readouterr().out
    assert output.startswith(f"\nFAULT 16: {script.name}: `srun" if is_wrong else "\nNo fault was found."), output
    assert ("Change: Give each node its rank" in output) is is_wrong


def test_the_job_scripts_are_of_both_kinds() -> None:
    assert [len(list(HERE.glob(f"job_{kind}_*.sh"))) for kind in ("wrong", "right")] == [3, 3]


def test_json_of_a_job_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--json", "--script", str(HERE / "job_wrong_srun.sh")], {}, say=print) == 1
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer.keys() == {"exit_code", "verdict", "runs", "meaning", "findings"}
    assert (answer["exit_code"], answer["verdict"], answer["runs"], answer["meaning"]) == (1, "1 fault.", [], [])
    (finding,) = answer["findings"]
    assert finding.keys() == {"cause", "what", "since_step", "is_fault", "change", "reports"}
    assert (finding["cause"], finding["is_fault"]) == (16, True)
    assert "each has machine rank 0" in finding["what"]


# Refusals --------------------------------------------------------------------------------------------------------------------

COMMAND_LINES = {
    "": "no script to audit: expected `samerun audit train.py [its arguments]`, or -m MODULE",
    "--json": "no script to audit",
    "missing.py": "missing.py cannot be read as a Python script: ",
    "folder": "folder cannot be read as a Python script: ",
    "words.py": "words.py cannot be read as a Python script: ",
    "-m no_such_module": "no_such_module cannot be read as a Python script: ",
    "fabric.py": "fabric.py is written for Lightning, and an audit records Hugging Face Accelerate",
    "--script missing.sh": "--script missing.sh cannot be read: ",
    "--steps 0 train.py": "'0': expected a whole number, 1 or more",
    "--tail 0 train.py": "'0': expected a number, more than 0",
    "--step 3 train.py": "--step: unknown option",
}


@pytest.mark.parametrize(("words", "sentence"), COMMAND_LINES.items(), ids=COMMAND_LINES)
def test_command_lines_that_are_refused(words: str, sentence: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path, "folder", None)
    put(tmp_path, "words.py", "train the model\n")
    put(tmp_path, "fabric.py", "from lightning.fabric import Fabric\n\nfabric = Fabric(devices=2)\n")
    put(tmp_path, "train.py", "")
    refused(["samerun", "audit", *words.split()], sentence, UsageError.exit_code)


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(tmp_path, f"here/images/{number}.png", "")
    monkeypatch.setattr(runs, "_MOST_FILES", 2)
    with pytest.raises(UsageError, match="here has over 2 files, and each run copies it"):
        runs.scratch_copy(tmp_path / "here", tmp_path / "copy")


TRAIN = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
set_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
"""
SLOW = f"import time\n{TRAIN}    time.sleep(1000)\n"
# By what the script is: the script, the sentence, and a line of the script's own error.
SCRIPTS = {
    "no Accelerator": ("print('trained')\n", "builds no Accelerator and no Trainer", ""),
    "no step": (
        "from accelerate import Accelerator\n\nAccelerator()\n",
        "train.py takes no optimizer step on 1 process",
        "",
    ),
    "an error": (
        f"{TRAIN}raise ValueError('row 7 has no label')\n",
        "failed on 1 process (exit code 1): its own error is above",
        "ValueError: row 7 has no label",
    ),
    "its exit code": (f"{TRAIN}raise SystemExit(5)\n", "failed on 1 process (exit code 5): its own error is above", ""),
    "arguments": (
        "from argparse import ArgumentParser\n\nparser = ArgumentParser()\nparser.add_argument('--data', required=True)\n"
        "parser.parse_args()\n",
        "it needs arguments: give them after its name",
        "error: the following arguments are required: --data",
    ),
    "the network": (
        "import urllib.request\n\nurllib.request.urlopen('http://nowhere.invalid/data.tar')\n",
        "it needs the network: give it local data and weights",
        "urllib.error.URLError",
    ),
    "a GPU": (
        "import torch\n\ntorch.ones(1, device='cuda')\n",
        "it needs a GPU, and an audit runs on CPU: leave the device to accelerator.device",
        "Traceback",
    ),
    "slow": (SLOW, "1 process: 1 of 12 steps in 20 s: let the script train a smaller model or on less data", ""),
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("script", "sentence", "line"),
    [pytest.param(*it, id=name, marks=pytest.mark.slow if name in ("an error", "no step") else pytest.mark.long)
     for name, it in SCRIPTS.items()],
)  # fmt: skip
def test_a_script_that_cannot_be_audited_gets_a_sentence_after_its_own_error(
    script: str, sentence: str, line: str, tmp_path: Path
) -> None:
    folder = project(tmp_path, train=script)
    code, output, errors = ended(started(folder, "--timeout", "20", "train.py"), folder)
    assert (code, output) == (UsageError.exit_code, ""), errors
    *own, last = errors.strip().split("samerun: ")
    assert sentence in " ".join(last.split())
    assert line in "".join(own)
    assert "app/audit/audit.py" not in errors


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("to_all", [False, True], ids=["kill -INT", "Ctrl-C"])
def test_an_interrupted_audit_leaves_nothing(to_all: bool, tmp_path: Path) -> None:
    folder = project(tmp_path, train=f"{TRAIN}    open('stepped', 'w').close()\n    import time; time.sleep(1000)\n")
    process = started(folder, "train.py")
    scratch, end_s = tmp_path / "scratch", time.monotonic() + 120
    while not list(scratch.rglob("stepped")) and time.monotonic() < end_s and process.poll() is None:
        time.sleep(0.1)
    assert len(running(scratch)) >= 2  # the audit and the script
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    code, output, errors = ended(process, folder)
    assert (code, output) == (130, ""), errors


# The user's files ------------------------------------------------------------------------------------------------------------

LARGE = b"\0" * (2**20 + 1)
OWN_APP = f"""
import sitecustomize
import safetensors.torch
from app.names import TABLE
{TRAIN}
assert sitecustomize.MARK == 7
if accelerator.is_main_process:
    weights = {{"weight": torch.ones(2)}}
    with open(TABLE, "ab") as table:
        table.write(b"row")
    with open("edited.bin", "r+b") as edited:
        edited.write(b"new")
    torch.save(weights, "model.pt")
    safetensors.torch.save_file(weights, "model.safetensors")
"""


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("words", [["train.py"], ["-m", "app.training"]], ids=["script", "module"])
def test_a_project_with_its_own_app_and_sitecustomize_keeps_its_large_files(words: list[str], tmp_path: Path) -> None:
    folder = project(tmp_path, train=OWN_APP)
    put(folder, "app/__init__.py", "")
    put(folder, "app/names.py", "TABLE = 'table.bin'\n")
    put(folder, "app/training.py", OWN_APP)
    put(tmp_path, "site/sitecustomize.py", "MARK = 7\n")
    large = [put(folder, name, LARGE) for name in ("table.bin", "edited.bin", "model.pt", "model.safetensors")]
    before = sorted(folder.rglob("*"))
    process = started(folder, *words, env={"PYTHONPATH": python_path(tmp_path / "site")})
    code, output, errors = ended(process, folder)
    assert (code, "No fault was found." in output) == (0, True), output + errors
    assert [path.name for path in large if path.is_symlink() or path.read_bytes() != LARGE] == []
    assert sorted(folder.rglob("*")) == before


def test_a_scratch_copy_links_large_files_and_skips_environments(tmp_path: Path) -> None:
    put(tmp_path, "here/data/large.bin", LARGE)
    put(tmp_path, "here/data/small.txt", "some words")
    put(tmp_path, "here/.venv/bin/python", "")
    runs.scratch_copy(tmp_path / "here", tmp_path / "copy")
    assert sorted(it.relative_to(tmp_path / "copy").as_posix() for it in (tmp_path / "copy").rglob("*")) == [
        "data", "data/large.bin", "data/small.txt"]  # fmt: skip
    assert (tmp_path / "copy/data/large.bin").readlink() == tmp_path / "here/data/large.bin"
    assert not (tmp_path / "copy/data/small.txt").is_symlink()


# Parts -----------------------------------------------------------------------------------------------------------------------


def test_options_end_at_the_script() -> None:
    assert audit._split(["--steps", "3", "train.py", "--json", "-m", "x"]) == (
        ["--steps", "3"],
        ["train.py", "--json", "-m", "x"],
        False,
    )
    assert audit._split(["--steps=3", "--json", "-m", "own.train", "--lr", "1"]) == (
        ["--steps=3", "--json"],
        ["own.train", "--lr", "1"],
        True,
    )


def test_a_row_of_a_batch_is_the_same_with_other_padding() -> None:
    rows, counts = recorder.rows_of(
        {"ids": torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]]), "labels": torch.tensor([-100, 1])}
    )
    alone, _ = recorder.rows_of({"ids": torch.tensor([[5, 6, 7, 0]]), "labels": torch.tensor([-100])})
    assert alone == rows[:1]
    assert rows[0] != rows[1]
    assert counts == {"ids": [10, 8], "labels": [1, 2]}


def test_rates_of_steps_and_of_samples_are_told_apart() -> None:
    by_step = [1 - step / 12 for step in range(12)]
    assert causes.follows(by_step, by_step[:6], 1.0)
    assert not causes.follows(by_step, by_step[:6], 2.0)
    assert causes.follows(by_step, by_step[::2], 2.0)
    assert not causes.follows(by_step, by_step[::2], 1.0)


def test_the_private_names_of_torch_and_accelerate_are_what_the_recorder_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(DataLoader(list(range(5)), batch_size=2))  # type: ignore[arg-type]
    assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
    indices = [iterator._next_index() for _ in range(3)]
    assert indices == [[0, 1], [2, 3], [4]], f"_BaseDataLoaderIter._next_index in torch {torch.__version__}"
    assert issubclass(torch.nn.BatchNorm1d, torch.nn.modules.batchnorm._BatchNorm), torch.__version__
    monkeypatch.setattr(GradientState, "_shared_state", {})
    assert recorder.is_synchronized() is None
    GradientState().sync_gradients = False
    assert recorder.is_synchronized() is False, f"GradientState._shared_state in accelerate {accelerate_version}"
