"""Prompts and answers: the tokens and what counts of them are those that trl makes, and what cannot be told is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from languages import save_network
from processes import train
from small_tokenizer import MARKED, PLAIN, SPECIAL, write_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from app.errors import DataError
from app.tasks.causal_lm.data import store
from app.tasks.causal_lm.data.command import main
from app.tasks.causal_lm.data.rows import Rows
from app.tasks.causal_lm.data.tokenizers import Examples, Unusable, open_tokenizer

PAIRS = [
    {"prompt": "Call me", "completion": " Ishmael."},
    {"prompt": "Some years ago ", "completion": "never mind how long"},  # the space and the letters may share a token
    {"prompt": "the th", "completion": "e the whale"},  # and these do
    {"prompt": "", "completion": "Nothing was asked."},
    {"prompt": "ends by itself", "completion": " so<|endoftext|>"},
    {"prompt": "<|im_start|>user\nGrüße<|im_end|>", "completion": "été \N{WHALE}"},
    {"prompt": "a long question " * 30, "completion": "short"},
    {"prompt": "short", "completion": " a long answer" * 30},
]
TALKS = [
    [{"role": "user", "content": "Call me"}, {"role": "assistant", "content": "Ishmael"}],
    [
        {"role": "system", "content": "You are a whale."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "I."},
        {"role": "user", "content": "Really, " * 20},
        {"role": "assistant", "content": "Yes. " * 40},
    ],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "and nobody answers"}],
]
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of one tokenizer: its answers end a text, or a turn."""
    place = tmp_path_factory.mktemp("tokenizers")
    return {
        "marked": write_tokenizer(place / "marked", MARKED, eos=SPECIAL[2]),
        "plain": write_tokenizer(place / "plain", PLAIN, eos=SPECIAL[2]),
        "text": write_tokenizer(place / "text"),
    }


def trl_makes(folder: Path, tokenizer: str, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[bool]]]:
    """What trl trains on: tokens of each example, cut at as many as a row has, and whether its label counts."""
    config = LlamaConfig(vocab_size=600, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    from trl import SFTConfig, SFTTrainer  # not where GPU tests are collected

    arguments = SFTConfig(output_dir=str(folder), max_length=LENGTH + 1, assistant_only_loss="messages" in rows[0],
                          use_cpu=True, bf16=False, report_to="none")  # fmt: skip
    library = AutoTokenizer.from_pretrained(tokenizer)
    trainer = SFTTrainer(LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_list(rows), processing_class=library)
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]


def ours(folder: Path, tokenizer: str, rows: list[dict[str, Any]]) -> list[tuple[list[int], list[bool]]]:
    """The same of the token folder that the command makes, in the order of the examples."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ["--tokenizer", tokenizer, "--prompts", "--sequence-length", str(LENGTH), "--workers", "1"]
    assert main(["tokenize", str(folder / "rows.jsonl"), "--out", str(folder / "out"), *told]) == 0
    split = store.open_split(folder / "out", "train")
    bits = np.unpackbits(split.counted, bitorder="little")[: len(split.tokens)].astype(bool)
    ends = split.documents[1:-1].astype(int)
    return [
        (tokens.tolist(), counted.tolist())
        for tokens, counted in zip(np.split(split.tokens, ends), np.split(bits, ends), strict=True)
    ]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")  # what trl sets by itself
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("text", PAIRS),
        ("marked", [{"messages": talk} for talk in TALKS]),
        ("plain", [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS[:2]]),
    ],
)
def test_tokens_and_what_counts_are_those_of_trl(
    tokenizers: dict[str, str], tmp_path: Path, name: str, rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = trl_makes(tmp_path / "trl", tokenizers[name], rows)
    assert ours(tmp_path, tokenizers[name], rows) == theirs
    said = capsys.readouterr().out
    assert f"\nexamples truncated to {LENGTH + 1} tokens: " in said
    if name == "text":
        assert len(theirs) == len(PAIRS) - 1, "one has no room for its answer"
        assert "examples without an answer left out: 1" in said


def test_without_marks_the_answers_are_the_additional_tokens(tokenizers: dict[str, str]) -> None:
    plain, marked = (Examples(open_tokenizer(tokenizers[name]), ["messages"]) for name in ("plain", "marked"))
    library = AutoTokenizer.from_pretrained(tokenizers["plain"])
    for talk in TALKS[:2]:
        tokens, counted = plain({"messages": talk})
        others, marks = marked({"messages": talk})
        assert tokens.tolist() == others.tolist()
        assert not (marks & ~counted).any()
        (after,) = {library.decode([token]) for token in tokens[counted & ~marks]}
        assert after == "\n", "the line that ends a turn"
    shares = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TALKS[0]]
    usual = Examples(open_tokenizer(tokenizers["plain"]), [])
    assert usual({"conversations": shares})[0].tolist() == plain({"messages": TALKS[0]})[0].tolist()


def test_a_turn_ends_with_a_token_that_counts(tokenizers: dict[str, str], tmp_path: Path) -> None:
    """Some templates mark the answer and not its end: the model would never learn to stop."""
    end = "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    assert end in MARKED
    short = MARKED.replace(end, "{{ m['content'] }}{% endgeneration %}<|im_end|>")
    folder = write_tokenizer(tmp_path / "short", short, eos=SPECIAL[2])
    mine, right = (Examples(open_tokenizer(it), ["messages"])({"messages": TALKS[1]}) for it in (folder, tokenizers["marked"]))
    assert [array.tolist() for array in mine] == [array.tolist() for array in right]


def test_packed_examples_are_whole_and_can_be_inspected(
    tokenizers: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"question {number}:", "completion": f" answer {number}"} for number in range(20)]
    examples = ours(tmp_path, tokenizers["text"], rows)
    packed = Rows(store.open_split(tmp_path / "out", "train"), None, document_masks=True)
    assert len(packed) < len(rows) / 2
    batch = packed.fetch(np.arange(len(packed)), None)
    assert int(batch["counted"].sum()) == sum(sum(counted[1:]) for _, counted in examples)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--row", "0"]) == 0
    shown = capsys.readouterr().out
    assert "question 0:{+ answer 0<|endoftext|>+}" in shown
    assert f", {int(batch['counted'][0].sum())} count as targets, documents: 5" in shown


UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("text", {"prompt": "a", "completion": 3}, "prompt holds str, completion holds int: expected two texts"),
    ("text", {"messages": TALKS[0]}, "messages need a tokenizer with a chat template, and this one has none"),
    ("marked", {"messages": [{"content": "hello"}]}, "a message has no role; it has 'content'"),
    ("marked", {"messages": TALKS[0], "tools": "no JSON"}, "tools is no JSON"),
    ("refuses", {"messages": TALKS[0]}, r"the chat template refuses it \(TemplateError: no such roles\)"),
    ("changes", {"messages": TALKS[1]}, "message 2: its answer cannot be found, because the chat template renders"),
]


@pytest.mark.parametrize(("name", "row", "text"), UNUSABLE)
def test_rows_that_are_no_example_are_refused(
    tokenizers: dict[str, str], tmp_path: Path, name: str, row: Any, text: str
) -> None:
    templates = {
        "refuses": "{{ raise_exception('no such roles') }}",
        "changes": PLAIN.replace("{% for", "{{ messages|length }}{% for", 1),
    }
    folder = tokenizers.get(name) or write_tokenizer(tmp_path / name, templates[name])
    with pytest.raises((Unusable, DataError), match=text):
        Examples(open_tokenizer(folder), [column for column in row if column != "tools"])(row)


def test_an_exported_model_stops_at_the_end_of_a_turn(tokenizers: dict[str, str], tmp_path: Path) -> None:
    """The base model ends its texts with another token than the chat."""
    base, run = save_network(tmp_path / "base", vocab_size=600, eos_token_id=0), tmp_path / "run"
    ours(tmp_path, tokenizers["marked"], [{"messages": TALKS[0]}] * 8)
    keys = ("train.steps=1", "train.global_batch_size=1", "train.evaluate_every_epochs=0", f"data.sequence_length={LENGTH}")
    paths = (f"train.init_from={base}", f"model.path={base}", f"data.path={tmp_path / 'out'}")
    train("cpu", run, "--recipe", "finetune_lm", *paths, *keys).check()
    end = AutoTokenizer.from_pretrained(run).eos_token_id
    network = LlamaForCausalLM.from_pretrained(run)
    assert network.config.eos_token_id == network.generation_config.eos_token_id == [end, 0]
