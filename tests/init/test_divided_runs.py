"""Runs whose model no process holds whole: the same losses under every preset, from a seed or from files, through a resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_models import gpt2
from languages import write_tokens
from processes import SCRIPTS, Started, accelerate, free_port, read, read_lines, run, train
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.multiproc

RECIPE = ("--recipe", str(Path(__file__).with_name("text_task.yaml")), "train.steps=6", "train.ema_decay=0.9")
FROZEN = "train.freeze=[transformer.h.0.*,transformer.wpe.*]"


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl")]


@pytest.mark.slow
def test_they_begin_with_files_and_go_on_under_other_presets(tmp_path: Path) -> None:
    """Parts with an index, in half precision, of a tied model of which something is frozen and the positions are missing."""
    model = gpt2()
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "transformer.wpe.weight"}
    model.bfloat16().save_pretrained(tmp_path / "there", state_dict=weights, max_shard_size="20KB")
    assert len(list((tmp_path / "there").glob("model-*.safetensors"))) > 2
    chosen = (*RECIPE, "model.kind=gpt2", FROZEN, f"train.init_from={tmp_path}/there", "train.init_allow=[transformer.wpe.*]")
    alone = train("cpu", tmp_path / "cpu", *chosen).check()
    for preset, processes in (("fsdp2", 3), ("deepspeed_zero3", 2)):
        begun = train(preset, tmp_path / preset, *chosen, "checkpoint.every_steps=3", processes=processes).check()
        said = [re.findall("initial weights from .*", finished.output) for finished in (alone, begun)]
        assert said[0] == said[1]
        assert "1 initialized from the seed: transformer.wpe.weight is not in the file" in said[0][0]
        assert losses(tmp_path / preset) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)
    for of, preset, processes in (("fsdp2", "deepspeed_zero3", 3), ("deepspeed_zero3", "fsdp2", 2)):
        on = tmp_path / f"on-{preset}"
        step = tmp_path / of / "checkpoints" / "step-00000003"
        train(preset, on, *chosen, "--resume", str(step), processes=processes).check()
        assert losses(on) == pytest.approx(losses(tmp_path / "cpu")[3:], rel=1e-5)
        left, begun_with = load_file(on / "model.safetensors"), load_file(tmp_path / "cpu" / "model.safetensors")
        assert all(
            left[name].equal(begun_with[name]) for name in left if name.startswith(("transformer.h.0.", "transformer.wpe"))
        )


@pytest.mark.slow
def test_nodes_that_read_other_weights_do_not_begin(tmp_path: Path) -> None:
    """Each node's process reads half of a model, by a path that leads it to files of its own."""
    port, started = str(free_port()), []
    for node in (0, 1):
        torch.manual_seed(node)
        gpt2().save_pretrained(tmp_path / str(node) / "there")
        group = ("--num_machines", "2", "--machine_rank", str(node), "--main_process_ip", "127.0.0.1")
        begin = ("model.kind=gpt2", "train.init_from=/proc/self/cwd/there", "--run-dir", str(tmp_path / "run"))
        target = ("-m", "app.train", "--trackers", "none", *RECIPE, *begin)
        command = accelerate("fsdp2", *group, "--main_process_port", port, target=target, processes=2)
        started.append(Started(command, cwd=tmp_path / str(node)))
    for finished in [it.wait() for it in started]:
        assert finished.returncode != 0
        assert re.search(r"They differ in /proc/self/cwd/there/\S+, as read on this node: rank 0 .* rank 1 ", finished.output)
    assert not (tmp_path / "run").exists()


def test_the_weights_at_the_end_come_from_the_checkpoint_or_from_shares(tmp_path: Path) -> None:
    """The average of tied weights, of which some are frozen; a start that has no step left writes no checkpoint."""
    chosen = (*RECIPE, "model.kind=gpt2", FROZEN)
    train("cpu", tmp_path / "saved", *chosen).check()
    expected = (tmp_path / "saved" / "model.safetensors").read_bytes()
    for preset in ("fsdp2", "deepspeed_zero3"):
        resume = ("--resume", str(tmp_path / "saved"))
        train(preset, tmp_path / preset, *chosen, *resume, processes=2).check()
        assert (tmp_path / preset / "model.safetensors").read_bytes() == expected
        left = [path.name for path in (tmp_path / preset).rglob("*") if "rank-" in path.name or "frozen.saf" in path.name]
        assert left == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a Llama of 67 million weights, 256 MiB."""
    folder = tmp_path_factory.mktemp("wide")
    tokens = write_tokens(folder / "tokens", np.arange(17 * 40) % 250, 258)
    train("cpu", folder / "run", "--recipe", "lm_tiny", f"data.path={tokens}", "data.sequence_length=16", "model.layers=16",
          "model.architecture=llama", "model.hidden_size=512", "model.heads=8", "model.intermediate_size=2048",
          "model.vocab_size=258", "train.global_batch_size=4", "train.steps=1", "train.max_validation_samples=6",
          "optim.warmup_steps=null", "log.examples=0", "checkpoint.every_minutes=null").check()  # fmt: skip
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "processes", "sizes", "names"),
    [
        ("fsdp2", 2, {}, None),
        ("deepspeed_zero3", 2, {}, None),
        pytest.param("hsdp", 4, {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, None, marks=pytest.mark.long),
        ("tensor_parallel", 2, {"PARALLELISM_CONFIG_TP_SIZE": "2"}, None),
        ("fsdp2", 2, {}, "the model's"),
        ("fsdp2", 2, {}, "older"),
    ],
)
def test_an_evaluation_reads_into_each_process_its_share(
    wide: Path, tmp_path: Path, preset: str, processes: int, sizes: dict[str, str], names: str | None
) -> None:
    """The scores of one process; under FSDP2 with half of 256 MiB, and units of 17 that are gathered.

    With `names` a folder of transformers is evaluated: names that its model does not have, such as names without a prefix, are
    left to transformers, and each process reads the whole. DeepSpeed's ZeRO-3 keeps up to 1e9 gathered elements from the second
    pass on, by its defaults.
    """
    folder, words, out = wide, list[str](), tmp_path / "peaks"
    out.mkdir()
    if names is not None:
        folder = tmp_path / "folder"
        folder.mkdir()
        shutil.copy(wide / "config.json", folder)
        weights = load_file(wide / "model.safetensors")
        if names == "older":
            weights = {name.removeprefix("model."): values for name, values in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        words = [f"data.path={wide.parent}/tokens", "data.sequence_length=16", "train.global_batch_size=4",
                 "train.max_validation_samples=6"]  # fmt: skip
    evaluate = (str(SCRIPTS / "evaluated_peak.py"), str(out), str(folder), "--json", *words)
    output = run(preset, processes, *evaluate, env=sizes).check().output
    (scores,) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert scores["samples"] == 6
    assert scores["loss"] == pytest.approx(read(wide / "result.json")["validation_loss"], rel=1e-6)
    peaks = [json.loads(file.read_text()) for file in out.glob("*.json")]
    print(f"MiB of each process: {peaks}")
    assert len(peaks) == processes
    assert preset != "fsdp2" or names == "older" or all(128 < peak < 200 for peak in peaks)
