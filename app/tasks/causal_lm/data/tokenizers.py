"""Tokenizers: text as numbers and back. Bytes need nothing; any other is one of transformers, in a folder or on the hub.

A document is its text's tokens and then the end-of-text token, so that a model learns where texts end. A tokenizer that begins
texts with a token of its own (Llama's) does so here as well. A text that spells a special token is text: its letters are
encoded, unless a chat template has written it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import DataError
from app.files import other_libraries

END_OF_TEXT = "<|endoftext|>"
_ORIGIN = ("is_local", "local_files_only", "name_or_path")
"""Keys that record where a tokenizer came from. The digest leaves them out: it must not depend on the place."""


def open_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """Return a tokenizer: `bytes`, a folder, or a name on the hub, of a commit, branch or tag.

    The network is used only for what is not on this machine. Raises DataError if there is no such tokenizer, or it has no
    end-of-text token.
    """
    return Bytes() if name == "bytes" else Transformers(name, revision)


class Bytes:
    """The bytes of UTF-8, and 256 for the end of a text. `Transformers` has the same methods."""

    vocab_size = 257
    eos_id = 256

    @property
    def about(self) -> dict[str, Any]:
        """Kind, name, revision, digest (of its files), vocab_size, eos_id and bos_id, which is None unless documents begin with
        it."""
        sizes = {"vocab_size": self.vocab_size, "eos_id": self.eos_id, "bos_id": None}
        return _about("bytes", "bytes", None, self.files(), **sizes)

    @property
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each token stands for, uint16 [vocab_size]; special ones stand for none."""
        return np.array([1] * 256 + [0], np.uint16)

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text as a document, with the special tokens at its ends; uint16."""
        return [self.document(text) for text in texts]

    def document(self, text: str | bytes) -> np.ndarray:
        """Return a document's tokens, uint16 [bytes + 1]."""
        content = text.encode() if isinstance(text, str) else text
        return np.append(np.frombuffer(content, np.uint8), np.uint16(self.eos_id))

    def encode_with_special(self, text: str) -> list[int]:
        """Return the tokens of a text in which the end-of-text token may be spelled."""
        parts = [list(part.encode()) for part in text.split(END_OF_TEXT)]
        return [token for part in parts for token in (*part, self.eos_id)][:-1]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of tokens, special ones only if `special`; bytes that are not UTF-8 become U+FFFD."""
        end = END_OF_TEXT.encode() if special else b""
        return b"".join(bytes([token]) if token < self.eos_id else end for token in ids).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return the files that `transformers.AutoTokenizer` loads it from, by name: byte-level BPE without merges, whose
        numbers are the values of the bytes."""
        end = {"id": self.eos_id, "content": END_OF_TEXT, "special": True}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        # Byte-level BPE (GPT-2's) writes a byte as itself if it is visible, and else as a letter from U+0100 on.
        visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
        others = iter(range(0x100, 0x200))
        letters = [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(letters)}, "merges": []},
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }
        both = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
        return {name: (json.dumps(content, indent=1) + "\n").encode() for name, content in both.items()}


class Transformers:
    """A tokenizer of transformers."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        """Load the tokenizer of a folder or of the hub. Raises DataError."""
        path = Path(name).expanduser()
        try:
            self.tokenizer = _loaded(str(path) if path.is_dir() else name, None if path.is_dir() else revision)
        except Exception as error:  # whatever a damaged file makes the library raise
            at = f" at the revision {revision}" if revision else ""
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"transformers cannot load a tokenizer {name}{at}, neither here nor from the hub "
                f"({why.splitlines()[0][:200]}); give `bytes`, a folder with a tokenizer.json, or a name on the hub"
            ) from error
        self._name, self._revision, self._eos = name, revision, self.tokenizer.eos_token_id
        if self._eos is None:
            raise DataError(f"the tokenizer {name} has no end-of-text token (eos_token): set it in its tokenizer_config.json")
        begin = self.tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        self._bos = self.tokenizer.bos_token_id if begin == [self.tokenizer.bos_token_id] else None

    @cached_property
    def about(self) -> dict[str, Any]:
        """As `Bytes.about`."""
        sizes = {"vocab_size": self.vocab_size, "eos_id": self._eos, "bos_id": self._bos}
        return _about("transformers", self._name, self._revision, self.files(), **sizes)

    @cached_property
    def vocab_size(self) -> int:
        """The largest token, and one: tokens that were added count."""
        return 1 + int(max(self.tokenizer.get_vocab().values()))

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """As `Bytes.token_bytes`."""
        added = dict(self.tokenizer.added_tokens_decoder)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        byte_level = backend is not None and "ByteLevel" in str(json.loads(backend.to_str()).get("decoder"))
        sizes = np.zeros(self.vocab_size, np.uint16)
        for token, number in self.tokenizer.get_vocab().items():
            if number in added:
                sizes[number] = 0 if added[number].special else len(token.encode())
            elif byte_level:
                sizes[number] = len(token)  # a letter stands for a byte
            elif len(token) == 6 and token.startswith("<0x"):
                sizes[number] = 1
            else:
                sizes[number] = len(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())
        return sizes

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n], without special tokens."""
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is None:
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return [np.array(ids, np.int32) for ids in self.tokenizer(list(texts), **options)["input_ids"]]
        # 1.4 times as fast as the library's own call, which also finds the place of each token in the text.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        return [np.array(it.ids, np.int32) for it in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `Bytes.documents`; int32."""
        begin = np.array([] if self._bos is None else [self._bos], np.int32)
        return [np.concatenate([begin, ids, np.array([self._eos], np.int32)]) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """As `Bytes.decode`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))

    def files(self) -> dict[str, bytes]:
        """As `Bytes.files`."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            files = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
        config = json.loads(files["tokenizer_config.json"])
        portable = {key: value for key, value in config.items() if key not in _ORIGIN}
        return {**files, "tokenizer_config.json": (json.dumps(portable, indent=1) + "\n").encode()}


Tokenizer = Bytes | Transformers


def _loaded(name: str, revision: str | None) -> Any:
    """Return a tokenizer from this machine, or else from the hub."""
    try:
        return other_libraries.tokenizer(name, revision=revision)
    except OSError:
        if Path(name).is_dir():
            raise
        return other_libraries.tokenizer(name, revision=revision, download=True)


def _about(kind: str, name: str, revision: str | None, files: Mapping[str, bytes], **sizes: int | None) -> dict[str, Any]:
    hashes = [[name, hashlib.sha256(content).hexdigest()] for name, content in sorted(files.items())]
    digest = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:32]
    return {"kind": kind, "name": name, "revision": revision, "digest": digest, **sizes}
