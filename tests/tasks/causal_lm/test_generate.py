"""`samerun generate`: what transformers' own `generate` returns, as complete characters; and samples during training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from languages import save_network
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from app.errors import DataError, DeviceError, RunFolderError
from app.tasks.causal_lm import generate
from app.tasks.causal_lm.data.tokenizers import Bytes
from app.tasks.causal_lm.generate import PROMPT_TOKENS, SAMPLE_TOKENS, Streamer, continuations

TEXT = "Call me Ishmäel"


def save_llama(folder: Path, architecture: str = "llama") -> Path:
    """A Llama, or another network, of bytes with random weights, as transformers writes it."""
    save_network(folder, architecture, max_position_embeddings=64, initializer_range=0.5)
    for name, content in Bytes().files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def answer(folder: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert generate.main([str(folder), TEXT, *arguments, "--json", "--device", "cpu"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_temperature_zero_is_the_likeliest_token_each_time(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the model says without cache or `generate`; and the text is that of the tokens."""
    model, tokens = AutoModelForCausalLM.from_pretrained(llama).eval(), list(TEXT.encode())
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    found = answer(llama, "--max-tokens", "20", "--temperature", "0", capsys=capsys)
    assert found["tokens"] == tokens[-20:]
    assert found["continuation"] == AutoTokenizer.from_pretrained(llama).decode(tokens[-20:])


def test_a_seed_gives_the_same_text_and_another_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Top-k 1 leaves nothing to chance, and settings of the folder do not change what the flags say."""
    folder = save_llama(tmp_path)
    one, other, greedy = (
        answer(folder, "--max-tokens", "30", *flags, capsys=capsys)
        for flags in (["--seed", "1"], ["--seed", "2"], ["--temperature", "0"])
    )
    assert one["tokens"] != other["tokens"]
    settings = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 3.0, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert answer(folder, "--max-tokens", "30", "--seed", "1", capsys=capsys) == one
    for narrowed in (["--top-k", "1"], ["--top-p", "1e-9"], ["--temperature", "0"]):
        assert answer(folder, "--max-tokens", "30", *narrowed, capsys=capsys)["tokens"] == greedy["tokens"]


def test_characters_are_written_when_they_are_whole(tmp_path: Path) -> None:
    """Bytes that are none are in the end too, and nothing is lost or said twice."""
    for name, content in Bytes().files().items():
        (tmp_path / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for added in ("ß🙂é and a".encode(), b"\xf0\x9f\x99a", b"\xff\xfe\xe2\x82\xacx\xe2", b"\xc3"):
        pieces: list[str] = []
        written = Streamer(tokenizer, pieces.append)
        written.put(torch.tensor([list("Prömpt".encode())]))
        for byte in added:
            written.put(torch.tensor([byte]))
            assert not pieces or not pieces[-1].endswith("\ufffd")
        written.end()
        assert "".join(pieces) == written.text == added.decode(errors="replace")
    assert len(pieces) == 1


def test_a_space_that_a_token_begins_with_is_kept(tmp_path: Path) -> None:
    """Tokenizers of SentencePiece's kind drop it of the first token that they decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "three": 2}, unk_token="three"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces: list[str] = []
    written = Streamer(PreTrainedTokenizerFast(tokenizer_object=made), pieces.append)
    for token in ([[0]], [1], [2], [1]):
        written.put(torch.tensor(token))
    written.end()
    assert pieces == [" two", "three", " two"]


def test_the_command_reads_stdin(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert generate.main([str(llama), "--max-tokens", "9", "--temperature", "0"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(TEXT)
    assert len(output) > len(TEXT) + 1


def test_a_full_window_is_reported(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(llama), "x" * 60, "--temperature", "0"]) == 0
    assert "note: only 4 tokens follow: the model takes 64, and the text has 60" in capsys.readouterr().err
    with pytest.raises(DataError, match="the text has 64 tokens, and the model takes 64 with generated ones: shorten"):
        generate.main([str(llama), "x" * 64])


def test_it_stops_where_a_text_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_llama(tmp_path)
    on = answer(folder, "--temperature", "0", "--max-tokens", "5", capsys=capsys)
    assert not on["ended"]
    assert len(on["tokens"]) == 5
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": on["tokens"][2]}))
    ended = answer(folder, "--temperature", "0", "--max-tokens", "5", capsys=capsys)
    assert ended["ended"]
    assert ended["tokens"] == on["tokens"][: on["tokens"].index(on["tokens"][2]) + 1]


def test_what_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(RunFolderError) as caught:
            generate.main([str(folder), "a"])
        return str(caught.value)

    assert "has no config.json of a language model: give a finished run, " in refused(tmp_path)
    (tmp_path / "model.json").write_text("{}")
    assert "it is the finished run of another task. `samerun predict" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert f"transformers cannot load the model of {tmp_path}: " in refused(tmp_path)
    gpt2 = save_network(tmp_path / "gpt2", "gpt2")
    assert f"{gpt2} has no tokenizer: copy tokenizer.json and tokenizer_config.json" in refused(gpt2)
    (gpt2 / "tokenizer.json").write_text("{")
    assert f"transformers cannot load the tokenizer of {gpt2}: " in refused(gpt2)
    with pytest.raises(DeviceError, match="--device moon is not available: "):
        generate.main([str(gpt2), "a", "--device", "moon"])


# Samples during training


@torch.no_grad()
def test_samples_continue_as_the_model_does(tmp_path: Path) -> None:
    """A model that is sure writes what transformers' greedy generation writes, and is called once for each token."""
    model, calls = LlamaForCausalLM.from_pretrained(save_llama(tmp_path)).eval(), []
    model.lm_head.weight.mul_(1e4)
    tokens = torch.randint(97, 122, (3, 2 * SAMPLE_TOKENS), generator=torch.Generator().manual_seed(1))

    def counted(**named: Any) -> Any:
        calls.append(named["input_ids"].shape)
        return model(**named)

    begin, added = continuations(counted, tokens)
    assert torch.equal(begin, tokens[:, :PROMPT_TOKENS])
    assert calls == [(3, PROMPT_TOKENS + number) for number in range(SAMPLE_TOKENS)]
    expected = model.generate(begin, attention_mask=torch.ones_like(begin), do_sample=False, max_new_tokens=SAMPLE_TOKENS)
    assert torch.equal(torch.cat([begin, added], dim=1), expected)


@torch.no_grad()
def test_samples_are_drawn_by_the_generator_with_the_probabilities_of_the_model(llama: Path) -> None:
    """In 4000 equal rows: chi-squared of the 257 counts, within five standard deviations of its mean."""
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    torch.manual_seed(1)
    model.lm_head.weight.mul_(0.1)
    rows = torch.full((4000, 2), 97)
    expected = 4000 * model(rows[:1, :1]).logits[0, -1].double().softmax(-1)
    _, added = continuations(model, rows)
    counts = torch.bincount(added[:, 0], minlength=257)
    assert float(((counts - expected) ** 2 / expected).sum()) < 256 + 5 * (2 * 256) ** 0.5
