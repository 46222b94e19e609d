"""`samerun replay`, `bisect` and `verify --replay`: steps of real runs on many topologies, computed again in one process."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import ONE_THREAD, REPOSITORY, Finished, Started, read, read_lines, train

from app import export
from app.checkpoints import step_folders
from app.checkpoints.step_folders import Reader
from app.checks.bisect import first_difference
from app.checks.replay import FLOORS, SAME, Record, Replay, Value, Walk, walks
from app.errors import RunFolderError, UsageError
from app.init.region import Piece, Region
from app.reports.compare import compare
from app.runs.claim import claim
from app.tasks.causal_lm.data.store import embedded_documents
from app.tasks.causal_lm.data.token_writer import writing
from app.tasks.causal_lm.data.tokenizers import Bytes

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
LONG = pytest.mark.long

# Augmentation, mixed pairs, clipping, an average of the weights, and spikes: a norm of 1.5 times the median is one.
IMAGES = (
    "--recipe", "digits", "train.steps=90", "model.activation=gelu", "model.pooling=average", "augment.crop_padding=1",
    "augment.mixup=0.2", "augment.erase=0.25", "train.ema_decay=0.95", "optim.clip_norm=0.5", "optim.lr=0.003",
    "train.max_gradient_spike=1.5", "train.max_skipped_steps=90",
)  # fmt: skip
TEXT = (
    "--recipe", "lm_tiny", "model.layers=2", "model.hidden_size=64", "model.architecture=phi", "model.tie_embeddings=false",
    "data.sequence_length=64", "model.dropout=0.1", "train.steps=60", "train.evaluate_every_steps=60",
)  # fmt: skip
OWN = ("--recipe", "examples/segmentation.yaml", "train.steps=60", "train.epochs=null")
SAVES = ("log.every_steps=3", "checkpoint.every_steps=25", "checkpoint.keep_last=9", "train.max_micro_batch=16")
SIZES = {"hsdp": {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "tensor_parallel": {"PARALLELISM_CONFIG_TP_SIZE": "2"},
         "context_parallel": {"PARALLELISM_CONFIG_CP_SIZE": "2"}}  # fmt: skip


def samerun(*words: str | Path) -> Finished:
    """Run a command of samerun as a user would."""
    return Started([sys.executable, "-m", "launch.cli", *map(str, words)], env=ONE_THREAD).wait()


def answer(*words: str | Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a command and the JSON that it prints."""
    done = samerun(*words, "--json")
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    assert lines, done.output
    return done.returncode, json.loads(lines[-1])


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with two passes each, with checkpoints after steps 25, 50, 75 and 90."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    train("multi_gpu", run_dir, *IMAGES, *SAVES, processes=2).check()
    return run_dir


@pytest.fixture
def copied(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in read_lines(path)))


def off_at_45(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "loss": line["loss"] * 1.001} if line["step"] == 45 else line


def falsify(run_dir: Path, step: int, key: str) -> str:
    """Change a number of a checkpoint and seal it again, as no damaged disk would; return the parameter's name."""
    folder = step_folders.path_of(run_dir, step)
    reader = Reader(folder)
    pieces = []
    name = sorted(reader.tensors(key))[0]
    for one in reader.keys():  # noqa: SIM118  (no dict)
        for parameter, stored in reader.tensors(one).items():
            region = Region.flat(0, int(torch.Size(stored.shape).numel()))
            piece = Piece(one, parameter, stored.shape, region, torch.empty(region.count))
            reader.read_into(piece)
            if (one, parameter) == (key, name):
                piece.values.mul_(-3.0)
            pieces.append(piece)
    ours = claim(run_dir)
    temporary = step_folders.begin(ours, step)
    entry = step_folders.write_pieces(temporary, 0, pieces)
    step_folders.commit(ours, step, [entry], state=reader.state, buffers=reader.buffers())
    return name


# Without training ------------------------------------------------------------------------------------------------------------


def test_a_walk_begins_before_the_line_of_its_step(two: Path) -> None:
    record = Record.of(two)
    assert record.span_of(26) == (25, 27)
    assert [(walk.origin, walk.end) for walk in walks(record, [26, 30])] == [(0, 27), (25, 30)]
    assert [walk.origin for walk in walks(record, [1, 29, 53, 80])] == [0, 25, 50, 75]
    with pytest.raises(RunFolderError, match=r"step 91 is not in the ledger of .*, whose last step is 90"):
        walks(record, [91])


def test_runs_that_agree_do_not_part(two: Path, copied: Path) -> None:
    one, other = Record.of(two), Record.of(copied)
    assert first_difference([one, other], compare(one.run, other.run)) == (
        None, [f"the runs agree within {SAME:g} in all {len(one.losses)} lines that both have"]
    )  # fmt: skip
    rewrite(copied / "metrics.jsonl", off_at_45)
    other = Record.of(copied)
    span, (text,) = first_difference([one, other], compare(one.run, other.run))
    assert span == (43, 45)
    assert text.startswith("the runs part: the loss of steps 43-45 differs")


@pytest.mark.parametrize(("floor", "limit"), [(9.6e-8, "1e-05"), (1e-5, "3 noise floors, 3.0e-05")])
def test_the_limit_that_was_used_is_named(floor: float, limit: str) -> None:
    value = Value("loss", (3, 3), 1.0, 1.0 + 4e-6, 4e-6)
    found = Replay(Walk([3], 0, None, 3), [], [value], False, floor, max(SAME, FLOORS * floor), [], 1.0, 1.0)
    assert f"within {limit} (half precision, or another kind of device): largest difference 4.0e-06 (noise floor" in str(found)


# Replays ---------------------------------------------------------------------------------------------------------------------


def test_steps_of_two_processes_are_the_same_in_one_and_nothing_is_written(two: Path) -> None:
    before = contents(two)
    skipped = sorted(Record.of(two).skipped)
    assert skipped, "no step was a spike"
    code, found = answer("replay", two, "--steps", f"{skipped[0]}:{skipped[0] + 1}")
    assert contents(two) == before
    (replay,) = found["replays"]
    assert (code, replay["causes"]) == (0, [])
    assert all(it["difference"] < SAME for it in replay["values"])
    assert {it["name"] for it in replay["values"]} == {"loss", "gradient norm"}


@pytest.mark.parametrize(("key", "step"), [pytest.param("weight", 53, marks=LONG), ("exp_avg", 53)])
def test_a_falsified_state_is_named(copied: Path, key: str, step: int) -> None:
    name = falsify(copied, 50, key)
    code, found = answer("replay", copied, "--step", str(step))
    assert code == 1
    causes = found["replays"][0]["causes"]
    assert "the first that differs" in causes[0], causes
    assert f"step-00000050 is not the state of the run: computed again from step 25, {key} of {name} differs" in causes[-1]


def test_a_falsified_record_is_named(copied: Path) -> None:
    def digest(line: dict[str, Any]) -> dict[str, Any]:
        if line["event"] == "steps" and line["first"] <= 53 <= line["last"]:
            line["digests"][53 - line["first"]] = "0" * 16
        return line

    rewrite(copied / "ledger.jsonl", digest)
    rewrite(copied / "metrics.jsonl", lambda it: {**it, "learning_rate": it["learning_rate"] * (2 if it["step"] == 54 else 1)})
    code, found = answer("replay", copied, "--step", "53")
    assert code == 1
    batch, rate = found["replays"][0]["causes"]
    assert batch.startswith("the samples of step 53 differ: digest 0000")
    assert rate.startswith("the learning rate of step 54 differs")


BAD = """
import torch
from torch import nn
from samerun import Loss, Samples

class Bad:
    def samples(self, split):
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
        targets = inputs[:, :2].clone()
        targets[64:96] = targets[64:96].roll(1, dims=0)
        return Samples.of({"inputs": inputs, "targets": targets}) if split == "train" else None
    def model(self, metadata):
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    def loss(self, model, batch):
        return Loss((model(batch["inputs"]) - batch["targets"]).square().mean())

task = Bad
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an own task, 32 of whose 256 samples have each other's targets. Its recipe skips steps 42 and 43."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "bad.py").write_text(BAD)
    steps = "train: {global_batch_size: 32, steps: 64, skip_steps: [[42, 44]]}"
    (folder / "bad.yaml").write_text(f"task: bad.py\n{steps}\noptim: {{lr: 0.01}}\nlog: {{every_steps: 4}}\n")
    words = ("checkpoint.every_steps=8", "checkpoint.keep_last=9", "log.samples=true", "log.each_step=true")
    train("cpu", folder / "run", "--recipe", str(folder / "bad.yaml"), *words).check()
    return folder / "run"


def step_of(run_dir: Path, sample: int, size: int) -> int:
    """The last step whose global batch has the sample."""
    lines = read_lines(run_dir / "samples.jsonl")
    return max(line["step"] for line in lines if any(it % size == sample for it in line["samples"]))


def test_the_autopsy_puts_a_sample_with_another_label_first(own: Path, tmp_path: Path) -> None:
    before = contents(own)
    page = tmp_path / "page.html"
    done = samerun("replay", own, "--step", "57", "--samples", "--out", page).check()
    rows = [line.strip("\u2502 ") for line in done.output.splitlines() if line.startswith("\u2502")]
    assert sum("loss, step" in row for row in rows) == 1, "steps.jsonl has the loss of the step"
    first = next(row.split()[0] for row in rows if "step" not in row)
    assert int(first) in range(64, 96)
    assert page.read_text().index(f"<figcaption>{first}:") == page.read_text().index("<figcaption>")
    assert "targets: " in page.read_text()
    assert contents(own) == before


@LONG
def test_the_autopsy_shows_a_text_of_one_token(tmp_path: Path) -> None:
    tokenizer = Bytes()
    text = np.frombuffer(b" ".join(embedded_documents()["train"])[: 64 * 64 + 1], dtype=np.uint8).copy()
    text[64 * 10 : 64 * 11 + 1] = ord("q")
    with writing(tmp_path / "text", tokenizer.about, tokenizer.files(), token_bytes=tokenizer.token_bytes) as writer:
        writer.append("train", text, np.array([len(text)]), text_bytes=len(text))
    recipe = (*TEXT, "model.dropout=0", "train.steps=16", "train.global_batch_size=8", "train.evaluate_every_steps=null")
    words = (f"data.path={tmp_path / 'text'}", "checkpoint.every_steps=8", "log.samples=true", "log.every_steps=4")
    train("cpu", tmp_path / "run", *recipe, *words).check()
    code, found = answer("replay", tmp_path / "run", "--step", str(step_of(tmp_path / "run", 10, 64)), "--samples")
    first = found["samples"]["rows"][0]
    assert (code, first["samples"], first["text"][:20]) == (0, [10], "q" * 20)


def test_a_key_explains_a_difference(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train("cpu", other, "--recipe", str(own.parent / "bad.yaml"), "optim.lr=0.002", "checkpoint.every_steps=8").check()
    code, found = answer("bisect", own, other)
    assert (code, found["steps"], found["recipe_keys"]) == (1, [4, 4], ["optim.lr"])
    assert "optim.lr explains it" in found["sentences"][-1]


@LONG
def test_a_changed_task_is_named_first(own: Path) -> None:
    task = own.parent / "bad.py"
    task.write_text(BAD.replace("nn.GELU()", "nn.SiLU()"))
    try:
        done = samerun("replay", own, "--step", "10")
    finally:
        task.write_text(BAD)
    assert done.returncode == 1
    changed = done.output.index("changed since the run: the task's files")
    assert changed < done.output.index("Not the same")


@LONG
def test_a_run_that_its_replay_contradicts_is_named(two: Path, copied: Path) -> None:
    rewrite(copied / "metrics.jsonl", off_at_45)
    code, found = answer("bisect", two, copied)
    assert (code, found["steps"]) == (1, [43, 45])
    assert found["sentences"][1].startswith("A agrees with its replay here")
    assert found["sentences"][2].startswith("B differs from its replay here: the loss of steps 43-45 is the first that differs")
    assert found["sentences"][3] == "by its size, 1.0e-03, the difference is arithmetic"


@LONG
def test_steps_around_skipped_ones_are_the_same(own: Path) -> None:
    code, found = answer("replay", own, "--steps", "41:45")
    lines = {tuple(it["span"]): it["difference"] for it in found["replays"][0]["values"]}
    assert (code, lines.keys()) == (0, {(41, 41), (41, 44), (44, 44), (45, 45)})
    assert max(lines.values()) < SAME


def test_random_steps_are_verified_and_a_line_of_the_model_card(own: Path, tmp_path: Path) -> None:
    code, found = answer("verify", own, "--replay", "1")
    assert (code, found["replayed"]["steps"]) == (0, 1)
    assert found["replayed"]["largest"] < SAME
    (tmp_path / "replayed.json").write_text(json.dumps(found))
    words = [str(own), "--out", str(tmp_path / "out"), "--replayed", str(tmp_path / "replayed.json")]
    assert export.main(words) == 0
    assert f"| replayed | 1 of {found['last_step']} steps, largest difference " in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "replayed.json").write_text(json.dumps({**found, "verified": False}))
    with pytest.raises(UsageError, match="was not verified"):
        export.main([*words, "--force"])


CASES = [
    (name, preset, processes, recipe)
    for name, recipe in {"images": IMAGES, "text": TEXT, "own": OWN}.items()
    for preset, processes in (("multi_gpu", 2), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2), ("fsdp2", 2), ("hsdp", 4),
                              ("tensor_parallel", 2), ("context_parallel", 2))
    if preset not in ("tensor_parallel", "context_parallel") or name == "text"
]  # fmt: skip


@LONG
@pytest.mark.parametrize(
    ("name", "preset", "processes", "recipe"), CASES, ids=[f"{name}-{preset}" for name, preset, *_ in CASES]
)
def test_ten_steps_of_any_topology_are_the_same_in_one_process(
    name: str, preset: str, processes: int, recipe: tuple[str, ...], tmp_path: Path, figure: Callable[[str], None]
) -> None:
    words = [str(REPOSITORY / word) if word.startswith("examples/") else word for word in recipe]
    saves = SAVES if name == "images" else (*SAVES[:-1], "train.max_micro_batch=4")
    train(preset, tmp_path / "run", *words, *saves, processes=processes, env=SIZES.get(preset)).check()
    assert read(tmp_path / "run" / "run.json")["world_size"] == processes
    code, found = answer("verify", tmp_path / "run", "--replay", "10")
    replays = found["replayed"]["replays"]
    largest = {
        kind: max(it["difference"] for one in replays for it in one["values"] if it["name"] == kind)
        for kind in ("loss", "gradient norm")
    }
    here_s, there_s = (min(one[name] for one in replays) for name in ("step_s", "run_step_s"))
    figure(f"{found['replayed']['steps']} steps, {largest}, {here_s:.4f} s a replayed step, {there_s:.4f} s in the run")
    assert code == 0, [one["causes"] for one in replays]
    assert max(largest.values()) < SAME
