"""Tokenizers: ours and what transformers loads of it agree; texts come back; special tokens are text in a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import chapters, write_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.errors import DataError
from app.tasks.causal_lm.data.store import embedded_documents
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
    """A byte-level BPE as GPT-2's, of 600 tokens, with an end of text and an added word that is none special."""
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([chapter.decode() for chapter in embedded_documents()["test"]], trainer)
    made.add_tokens([AddedToken("Ishm\u00e4el", special=False)])
    folder = tmp_path_factory.mktemp("bpe")
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


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
    """What `AutoTokenizer` makes of the folder that a run leaves is what the run was trained with."""
    ours = Bytes()
    for special in (False, True):
        (mine,), (theirs,) = ours.encode([text], special=special), loaded_bytes.encode([text], special=special)
        assert mine.tolist() == theirs.tolist()
    assert ours.documents([text])[0].tolist() == loaded_bytes.documents([text])[0].tolist() == [*text.encode(), 256]
    assert ours.decode(mine) == loaded_bytes.decode(mine) == text


def test_bytes_have_the_numbers_of_the_bytes(loaded_bytes: Tokenizer) -> None:
    ours = Bytes()
    assert ours.encode([f"h\u00e9{END_OF_TEXT}"], special=True)[0].tolist() == [104, 0xC3, 0xA9, 256]
    assert ours.encode([END_OF_TEXT])[0].tolist() == list(END_OF_TEXT.encode())
    assert ours.decode([104, 0xC3, 256, 104]) == loaded_bytes.decode([104, 0xC3, 256, 104]) == "h\ufffdh"
    assert np.array_equal(ours.token_bytes, loaded_bytes.token_bytes)
    assert {key: loaded_bytes.about[key] for key in ("vocab_size", "eos_id", "bos_id")} == {
        "vocab_size": 257,
        "eos_id": 256,
        "bos_id": None,
    }


def test_a_tokenizer_of_bytes_in_letters(byte_level: Path, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(byte_level))
    assert (tokenizer.about["eos_id"], tokenizer.about["bos_id"], tokenizer.about["vocab_size"]) == (0, None, 601)
    plain = Backend.from_file(str(byte_level))
    plain.encode_special_tokens = True
    for text, ids, document in zip(TEXTS, tokenizer.encode(TEXTS), tokenizer.documents(TEXTS), strict=True):
        assert ids.tolist() == plain.encode(text, add_special_tokens=False).ids
        assert document.tolist() == [*ids, 0]
        assert 0 not in ids
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.token_bytes[document].sum()) == len(text.encode())
    assert 0 in tokenizer.encode([TEXTS[-1]], special=True)[0]
    (added,) = tokenizer.encode(["Ishm\u00e4el"])
    assert tokenizer.token_bytes[added].tolist() == [8]

    # A copy in another place is the same tokenizer, and its files are what AutoTokenizer loads.
    folder = in_folder(tmp_path / "copy", tokenizer.files())
    again = open_tokenizer(str(folder))
    assert again.about["digest"] == tokenizer.about["digest"]
    moved = shutil.copytree(in_folder(tmp_path / "twice", again.files()), tmp_path / "moved")
    assert open_tokenizer(str(moved)).about["digest"] == tokenizer.about["digest"]
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded(TEXTS[0])["input_ids"] == tokenizer.encode([TEXTS[0]])[0].tolist()
    assert loaded.eos_token_id == 0


def test_a_tokenizer_of_pieces_begins_documents_as_it_does(sentence_pieces: Path) -> None:
    tokenizer = open_tokenizer(str(sentence_pieces))
    assert (tokenizer.about["eos_id"], tokenizer.about["bos_id"]) == (2, 1)
    text = "Call me \u6f22 Ishmael."
    (ids,), (document,) = tokenizer.encode([text]), tokenizer.documents([text])
    assert document.tolist() == [1, *ids, 2] == [*AutoTokenizer.from_pretrained(sentence_pieces)(text)["input_ids"], 2]
    assert int(tokenizer.token_bytes[document].sum()) == len(text.encode())
    assert tokenizer.decode(document) == text


def test_what_is_no_tokenizer_is_said(byte_level: Path, tmp_path: Path) -> None:
    broken = in_folder(tmp_path / "broken", {"tokenizer.json": b"{", "tokenizer_config.json": b"{}"})
    for name in (str(broken), str(broken / "tokenizer.json"), str(tmp_path / "no" / "such" / "folder")):
        with pytest.raises(DataError, match="transformers cannot load a tokenizer") as raised:
            open_tokenizer(name)
        assert "\n" not in str(raised.value)
    nameless = byte_level.read_text().replace(END_OF_TEXT, "[nothing]")
    path = in_folder(tmp_path / "nameless", {"tokenizer.json": nameless.encode()}) / "tokenizer.json"
    with pytest.raises(DataError, match="has no end-of-text token"):
        open_tokenizer(str(path))


@pytest.mark.parametrize("special", [False, True])
def test_tokens_are_those_of_the_librarys_own_call(tmp_path: Path, special: bool) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path / "small"))
    texts = [*chapters()[4:6], "<|endoftext|>in <|im_end|>text", "", "Grüße \N{WHALE}"]
    own = tokenizer.tokenizer(texts, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
    assert [ids.tolist() for ids in tokenizer.encode(texts, special=special)] == own
    assert (0 in own[2]) == special
