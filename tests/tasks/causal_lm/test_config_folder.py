"""A run whose network a folder describes: wherever it lies, it must say the same, to all ranks and when the run goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from languages import TINY
from processes import Finished, read_lines, train
from transformers import LlamaConfig

pytestmark = pytest.mark.multiproc


def test_a_folder_that_says_something_else_is_refused(tmp_path: Path) -> None:
    """Something that changes neither shapes nor initial weights. The path has the rank in it, as on nodes with other disks."""
    LlamaConfig(**TINY, intermediate_size=128, bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "moved0")
    shutil.copytree(tmp_path / "first", tmp_path / "moved1")
    (tmp_path / "recipe.yaml").write_text(
        "task: causal_lm\ndata: {sequence_length: 32}\ntrain: {global_batch_size: 4, evaluate_every_epochs: 0, "
        "max_validation_samples: 4}\nlog: {every_steps: 1}\ncheckpoint: {every_steps: 1}\n"
    )

    def going_on(folder: str, steps: int, processes: int, run: str = "run") -> Finished:
        words = ("--recipe", str(tmp_path / "recipe.yaml"), "--resume", "auto", f"train.steps={steps}")
        preset = "multi_gpu" if processes > 1 else "cpu"
        return train(preset, tmp_path / run, *words, f"model.path={tmp_path}/{folder}", processes=processes)

    going_on("first", 1, 1).check()
    going_on("moved$RANK", 2, 2).check()
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]

    file = tmp_path / "moved1" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-2}))
    apart = going_on("moved$RANK", 2, 2, run="other")
    assert apart.returncode != 0
    assert "They differ in config.json of model.path: rank 0" in apart.output, apart.output
    later = going_on("moved1", 3, 1)
    assert later.returncode != 0
    assert "config.json of model.path was '" in later.output, later.output
