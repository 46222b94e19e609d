"""Tokenizers: text as numbers and back. Bytes need nothing; any other is one of transformers, in a folder or of the hub.

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
_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]")
"""Usual names of the end-of-text token: a tokenizer.json alone does not say which token it is."""
_HOW_LOADED = ("is_local", "local_files_only", "name_or_path")
"""Keys that record where a tokenizer came from. The digest leaves them out: it must not depend on the place."""


def open_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """Return a tokenizer: `bytes`, a folder or a tokenizer.json, or a name of the hub, of a commit, branch or tag.

    What is on this machine is taken first; the network is asked for what is not there. Raises DataError if there is none, or
    it has no end-of-text token.
    """
    return Bytes() if name == "bytes" else Transformers.load(name, revision)


class Bytes:
    """The bytes of UTF-8, and 256 for the end of a text. `Transformers` has the same methods."""

    vocab_size = 257
    eos_id = 256

    @property
    def about(self) -> dict[str, Any]:
        """Kind, name, revision, digest (of its files), vocab_size, eos_id and bos_id, which is None unless documents begin with
        it."""
        return {
            "kind": "bytes",
            "name": "bytes",
            "revision": None,
            "digest": _digest(self.files()),
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": None,
        }

    @property
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each token stands for, uint16 [vocab_size]; special ones stand for none."""
        return np.array([1] * 256 + [0], np.uint16)

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """Return the tokens of each text, uint16 [n], without anything at its ends.

        `special`: whether a text that spells a special token means it, as one that a chat template has written does.
        """
        return [self._special(text) if special else self.document(text)[:-1] for text in texts]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text as a document, with the special tokens at its ends; uint16."""
        return [self.document(text) for text in texts]

    def document(self, text: str | bytes) -> np.ndarray:
        """Return a document's tokens, uint16 [bytes + 1]; what of a string UTF-8 cannot hold (half a surrogate pair) is `?`."""
        content = text.encode(errors="replace") if isinstance(text, str) else text
        tokens = np.empty(len(content) + 1, np.uint16)
        tokens[:-1] = np.frombuffer(content, np.uint8)
        tokens[-1] = self.eos_id
        return tokens

    def _special(self, text: str) -> np.ndarray:
        return np.concatenate([self.document(part) for part in text.split(END_OF_TEXT)])[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return the files that `transformers.AutoTokenizer` loads it from, by name: byte-level BPE without merges, whose
        numbers are the values of the bytes."""
        end = {"id": self.eos_id, "content": END_OF_TEXT, "special": True}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(_letters())}, "merges": []},
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

    def __init__(self, tokenizer: Any, name: str, revision: str | None) -> None:
        """Take one that is loaded; `name` and `revision` are what it was asked for by. Raises DataError."""
        self.tokenizer, self._name, self._revision = tokenizer, name, revision
        self._eos = tokenizer.eos_token_id
        if self._eos is None:
            raise DataError(f"the tokenizer {name} has no end-of-text token (eos_token): set it in its tokenizer_config.json")
        begun = tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        self._bos = tokenizer.bos_token_id if begun == [tokenizer.bos_token_id] else None

    @classmethod
    def load(cls, name: str, revision: str | None) -> Transformers:
        """Return the tokenizer of a folder, a tokenizer.json or the hub. Raises DataError."""
        import transformers

        path = Path(name).expanduser()
        try:
            if path.is_file():
                loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
                known = loaded.get_vocab()
                loaded.eos_token = next((end for end in _ENDS if end in known), None)
            else:
                loaded = _pretrained(str(path) if path.is_dir() else name, None if path.is_dir() else revision)
        except Exception as error:  # whatever a file that is none makes the library raise
            at = f" at the revision {revision}" if revision else ""
            raise DataError(
                f"transformers cannot load a tokenizer {name}{at}, neither here nor from the hub "
                f"({_first_line(error)}); give `bytes`, a folder or file with a tokenizer.json, or a name on "
                "the hub"
            ) from error
        return cls(loaded, name, revision)

    @cached_property
    def about(self) -> dict[str, Any]:
        """As `Bytes.about`."""
        return {
            "kind": "transformers",
            "name": self._name,
            "revision": self._revision,
            "digest": _digest(self.files()),
            "vocab_size": self.vocab_size,
            "eos_id": self._eos,
            "bos_id": self._bos,
        }

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
        found = np.zeros(self.vocab_size, np.uint16)
        for token, number in self.tokenizer.get_vocab().items():
            if number in added:
                found[number] = 0 if added[number].special else len(token.encode())
            elif byte_level:
                found[number] = len(token)  # a letter stands for a byte
            elif len(token) == 6 and token.startswith("<0x"):
                found[number] = 1
            else:
                found[number] = len(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())
        return found

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """As `Bytes.encode`; int32."""
        if not texts:
            return []
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if (
            backend is not None
        ):  # as the library's own call does it, without the place of each token in the text: 1.4 times as fast
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = not special
            return [np.array(found.ids, np.int32) for found in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        found = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=not special, return_attention_mask=False, verbose=False
        )
        return [np.array(ids, np.int32) for ids in found["input_ids"]]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `Bytes.documents`; int32."""
        begin = np.array([] if self._bos is None else [self._bos], np.int32)
        return [np.concatenate([begin, ids, np.array([self._eos], np.int32)]) for ids in self.encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        """As `Bytes.decode`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def files(self) -> dict[str, bytes]:
        """As `Bytes.files`."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            found = {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir()) if file.is_file()}
        config = json.loads(found["tokenizer_config.json"])
        kept = {key: value for key, value in config.items() if key not in _HOW_LOADED}
        return {**found, "tokenizer_config.json": (json.dumps(kept, indent=1) + "\n").encode()}


Tokenizer = Bytes | Transformers


def _pretrained(name: str, revision: str | None) -> Any:
    """Return a tokenizer from this machine, or else from the hub."""
    try:
        return other_libraries.tokenizer(name, revision=revision)
    except OSError:
        if Path(name).is_dir():
            raise
        return other_libraries.tokenizer(name, revision=revision, download=True)


def _digest(files: Mapping[str, bytes]) -> str:
    parts = [[name, hashlib.sha256(content).hexdigest()] for name, content in sorted(files.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _first_line(error: Exception) -> str:
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "  # of an OSError the text is a sentence
    return f"{kind}{error}".splitlines()[0][:200]


def _letters() -> list[str]:
    """Return the letter by which byte-level BPE writes each byte: itself if it is seen, else one from U+0100 on (GPT-2's)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]
