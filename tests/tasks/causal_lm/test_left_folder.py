"""What a run of a language model leaves: a folder that transformers loads, under every preset, and what evaluate says of it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import read, run, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from app import export
from app.checkpoints import stored_weights
from app.errors import DataError
from app.tasks.causal_lm import configuration, generate
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.token_writer import writing
from app.tasks.causal_lm.data.tokenizers import Bytes

LENGTH = 64
SMALL = ("--recipe", "lm_tiny", "train.steps=3", f"data.sequence_length={LENGTH}", "model.layers=2", "model.hidden_size=32",
         "train.evaluate_every_epochs=0", "train.max_validation_samples=16", "train.evaluate_every_steps=null")  # fmt: skip
GPT2 = ("model.architecture=gpt2", "model.tie_embeddings=null")

# From the pieces of the last checkpoint, averaged; gathered; as it is. The first two have tied embeddings.
CASES = {
    "fsdp2": ("fsdp2", 2, ("train.ema_decay=0.5", "checkpoint.every_steps=3", *GPT2)),
    "zero3": ("deepspeed_zero3", 2, ("checkpoint.every_minutes=null",)),
    "untied": ("cpu", 1, ("checkpoint.every_steps=3", "model.tie_embeddings=false", "model.architecture=qwen3")),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of each case, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run_folder(case: str) -> Path:
        preset, processes, keys = CASES[case]
        train(preset, folder / case, *SMALL, *keys, processes=processes).check()
        return folder / case

    return run_folder


def perplexities(folder: Path, rows: list[torch.Tensor]) -> dict[str, float]:
    """The scores of rows of tokens by transformers alone, in float32; they are bytes, and 256 is the end of a text."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    nats = targets = text = 0.0
    for row in rows:
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum").item()
        targets += len(row) - 1
        text += int((row[1:] != Bytes.eos_id).sum())
    return {"loss": nats / targets, "perplexity": math.exp(nats / targets), "bits_per_byte": nats / math.log(2) / text}


def rows_of(tokens: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(tokens[at : at + LENGTH + 1].astype(np.int64)) for at in range(0, len(tokens) - 1, LENGTH)]


def evaluated(folder: Path, *arguments: str) -> dict[str, Any]:
    output = run("cpu", 1, "app.evaluate", str(folder), "--json", *arguments).check().output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize("case", ["untied", *(pytest.param(case, marks=pytest.mark.slow) for case in ("fsdp2", "zero3"))])
def test_transformers_loads_what_a_run_leaves(run_of: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    """Nothing is missing or too much, names are those of `save_pretrained`, logits and scores are the run's."""
    folder = run_of(case)
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    model.save_pretrained(tmp_path)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ("lm_head.weight" in ours) == (case == "untied")
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    _, own, _ = stored_weights.load(folder)
    with torch.no_grad():
        assert torch.equal(own(tokens).logits, model.eval()(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id == Bytes.eos_id
    result, expected = read(folder / "result.json"), perplexities(folder, rows_of(store.open_embedded("test").tokens))
    assert {name: result[f"test_{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| test loss | {expected['loss']:.4f} |" in card


@pytest.mark.slow
@pytest.mark.multiproc
def test_evaluate_scores_any_folder_of_transformers_on_any_text(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Ours, one that transformers wrote, on the embedded text and on another; not on text of another tokenizer."""
    ours, plain, text = run_of("untied"), tmp_path / "plain", tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(ours).save_pretrained(plain)
    AutoTokenizer.from_pretrained(ours).save_pretrained(plain)
    for name in Bytes().files():
        (plain / name).write_bytes((ours / name).read_bytes())
    document = Bytes().document("Another text, of which there is little. " * 20)
    with writing(text, Bytes().about, Bytes().files(), token_bytes=Bytes().token_bytes) as writer:
        for split in ("validation", "test"):  # and nothing to train on
            writer.append(split, document, np.array([len(document)]))
    expected = perplexities(plain, rows_of(document))
    for folder in (ours, plain):
        length = f"data.sequence_length={LENGTH}"
        found = evaluated(folder, f"data.path={text}", length)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert found["split"] == "test"
    other = json.loads((text / "tokens.json").read_text())
    other["tokenizer"]["digest"] = "0" * 32
    (text / "tokens.json").write_text(json.dumps(other))
    for folder in (ours, plain):
        done = run("cpu", 1, "app.evaluate", str(folder), f"data.path={text}")
        assert done.returncode == DataError.exit_code, done.output
        assert re.search(f"the text was tokenized with (another tokenizer [(])?{'0' * 32}", done.output), done.output


@pytest.mark.multiproc
def test_the_best_of_a_run_goes_on_with_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As its export does, also before the run is finished."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = [word for word in SMALL if "evaluate" not in word]
    train("cpu", run_dir, *words, "optim.lr=1", "optim.schedule=constant", "train.evaluate_every_steps=1",
          "checkpoint.every_steps=1", "checkpoint.keep_best=true").check()  # fmt: skip
    assert export.main([str(run_dir), "--best", "--out", str(out)]) == 0
    (run_dir / "model.json").unlink()
    told = []
    for arguments in ([str(out)], [str(run_dir)]):
        capsys.readouterr()
        assert generate.main([*arguments, "Call me", "--max-tokens", "20", "--device", "cpu"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] != told[1]


def test_another_tokenizer_in_the_token_folder_is_refused(tmp_path: Path) -> None:
    tokenizer, path = {**Bytes().about, "kind": "transformers", "digest": "1" * 32}, str(tmp_path / "text")
    document = Bytes().document("a text")
    with writing(tmp_path / "text", tokenizer, {"tokenizer.json": b"{}"}, token_bytes=None) as writer:
        writer.append("train", document, np.array([len(document)]))
    assert configuration.tokenizer_files(path, tokenizer) == {"tokenizer.json": b"{}"}
    for place, info in ((path, {**tokenizer, "digest": "2" * 32}), (str(tmp_path / "gone"), tokenizer)):
        with pytest.raises(DataError, match=r"does not contain the tokenizer .* export only the weights \(--out FILE\.safeten"):
            configuration.tokenizer_files(place, info)
