"""Tokenizers: ours and what transformers loads of it agree; texts come back; special tokens are text in a text."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import write_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.errors import DataError
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Bytes, Tokenizer, open_tokenizer

TEXTS = ["Call me Ishmael.", "", "  two  spaces\n\n", "na\u00efve \U0001f40b \u6f22\u5b57 \x00\x7f", f"a {END_OF_TEXT} b </s>"]


def in_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def loaded_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, as transformers loads what a run leaves."""
    return open_tokenizer(str(in_folder(tmp_path_factory.mktemp("bytes"), Bytes().files())))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as GPT-2's, of 600 tokens, with an added word that is none special."""
    folder = tmp_path_factory.mktemp("bpe")
    made = AutoTokenizer.from_pretrained(write_tokenizer(folder))
    made.add_tokens([AddedToken("Ishm\u00e4el", special=False)])
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One as Llama 2's: spaces are written as a sign, unknown letters as their bytes, and a text begins with <s>."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*special, "\u2581", *"abcdefghijklmnopqrstuvwxyzCI.", "\u2581m", "me", "\u2581me"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Backend(
        models.BPE(vocabulary, [("\u2581", "m"), ("m", "e"), ("\u2581", "me")], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("pieces")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=60))
def test_bytes_are_the_same_by_transformers(loaded_bytes: Tokenizer, text: str) -> None:
    """What `AutoTokenizer` makes of the exported folder is what the run was trained with."""
    (mine,), (theirs,) = Bytes().documents([text]), loaded_bytes.documents([text])
    assert mine.tolist() == theirs.tolist() == [*text.encode(), 256]
    assert Bytes().decode(mine) == loaded_bytes.decode(mine) == text
    with_special = f"{text}{END_OF_TEXT}{text}"
    assert Bytes().encode_with_special(with_special) == loaded_bytes.tokenizer(with_special)["input_ids"]


def test_bytes_have_the_numbers_of_the_bytes(loaded_bytes: Tokenizer) -> None:
    ours = Bytes()
    for special, text in ((False, "h\ufffdh"), (True, f"h\ufffd{END_OF_TEXT}h")):
        assert ours.decode([104, 0xC3, 256, 104], special=special) == text
        assert loaded_bytes.decode([104, 0xC3, 256, 104], special=special) == text
    assert np.array_equal(ours.token_bytes, loaded_bytes.token_bytes)
    for key, value in {"vocab_size": 257, "eos_id": 256, "bos_id": None}.items():
        assert ours.about[key] == loaded_bytes.about[key] == value


def test_a_byte_level_tokenizer(byte_level: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(byte_level))
    assert (tokenizer.about["eos_id"], tokenizer.about["bos_id"], tokenizer.about["vocab_size"]) == (0, None, 601)
    # The library's own call, which is slower.
    own = tokenizer.tokenizer(TEXTS, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for text, ids, document in zip(TEXTS, own, tokenizer.documents(TEXTS), strict=True):
        assert document.tolist() == [*ids, 0]
        assert 0 not in ids
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.token_bytes[document].sum()) == len(text.encode())
    (added,) = tokenizer.encode(["Ishm\u00e4el"])
    assert tokenizer.token_bytes[added].tolist() == [8]

    # A copy in another place is the same tokenizer, and its files are what AutoTokenizer loads.
    again = open_tokenizer(str(in_folder(tmp_path / "copy", tokenizer.files())))
    assert again.about["digest"] == tokenizer.about["digest"]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (loaded(TEXTS[0])["input_ids"], loaded.eos_token_id) == (own[0], 0)


def test_a_tokenizer_with_a_beginning_token_begins_documents_with_it(sentence_pieces: Path) -> None:
    tokenizer = open_tokenizer(str(sentence_pieces))
    assert (tokenizer.about["eos_id"], tokenizer.about["bos_id"]) == (2, 1)
    text = "Call me \u6f22 Ishmael."
    (ids,), (document,) = tokenizer.encode([text]), tokenizer.documents([text])
    assert document.tolist() == [1, *ids, 2] == [*AutoTokenizer.from_pretrained(sentence_pieces)(text)["input_ids"], 2]
    assert int(tokenizer.token_bytes[document].sum()) == len(text.encode())
    assert tokenizer.decode(document) == text


def test_what_is_no_tokenizer_is_refused(byte_level: Path, tmp_path: Path) -> None:
    broken = in_folder(tmp_path / "broken", {"tokenizer.json": b"{", "tokenizer_config.json": b"{}"})
    started_s = time.monotonic()
    for name in (str(broken), str(tmp_path / "no" / "such" / "folder"), "no-such-name/of-a-tokenizer"):
        with pytest.raises(DataError, match="transformers cannot load a tokenizer") as raised:
            open_tokenizer(name)
        assert "\n" not in str(raised.value)
    assert time.monotonic() - started_s < 25.0, "without a network, it fails without retries"
    nameless = in_folder(tmp_path / "nameless", {"tokenizer.json": (byte_level / "tokenizer.json").read_bytes()})
    with pytest.raises(DataError, match=r"has no end-of-text token: set eos_token in .*<\|endoftext\|>"):
        open_tokenizer(str(nameless))
