"""Tokenizers: text as numbers and back. Bytes need nothing; any other is one of transformers, in a folder or on the hub.

A document is its text's tokens and then the end-of-text token, so that a model learns where texts end. A tokenizer that begins
texts with a token of its own (Llama's) does so here as well. A text that spells a special token is text: its letters are
encoded, unless a chat template has written it.

Of prompts with answers only the answers count, each with the token that ends it. An example has either a prompt and a
completion (two texts, or two lists of messages) or a list of messages. Texts are joined unchanged, with the end-of-text token
after them. Messages go through the tokenizer's chat template. The template marks what counts ({% generation %}). One without
marks is rendered up to each answer, and with it: the additional tokens are the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
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
        """Bytes of text of each token, uint16 [vocab_size]; special ones stand for none."""
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
        where, commit = (str(path), None) if path.is_dir() else (name, revision)
        try:
            try:
                self.tokenizer = other_libraries.tokenizer(where, revision=commit)
            except OSError:  # it is not on this machine
                if path.is_dir():
                    raise
                self.tokenizer = other_libraries.tokenizer(where, revision=commit, download=True)
        except Exception as error:  # whatever a damaged file makes the library raise
            at = f" at the revision {revision}" if revision else ""
            why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"transformers cannot load a tokenizer {name}{at}, neither here nor from the hub "
                f"({why.splitlines()[0][:200]}); give `bytes`, a folder with a tokenizer.json, or a name on the hub"
            ) from error
        self._name, self._revision, self._eos = name, revision, self.tokenizer.eos_token_id
        if self._eos is None:
            special = ", ".join(it.content for it in self.tokenizer.added_tokens_decoder.values() if it.special) or "none"
            why = f"has no end-of-text token: set eos_token in its tokenizer_config.json (special tokens: {special})"
            raise DataError(f"the tokenizer {name} {why}")
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


def _about(kind: str, name: str, revision: str | None, files: Mapping[str, bytes], **sizes: int | None) -> dict[str, Any]:
    hashes = [[name, hashlib.sha256(content).hexdigest()] for name, content in sorted(files.items())]
    digest = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:32]
    return {"kind": kind, "name": name, "revision": revision, "digest": digest, **sizes}


# ---- Prompts and answers --------------------------------------------------------------------------------------

Message = dict[str, Any]
Example = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 [n], and whether each counts, bool [n]."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant"}
_USUAL_COLUMNS = (("prompt", "completion"), ("messages",), ("conversations",))


class Unusable(Exception):  # noqa: N818  (it describes a row, which the caller may skip)
    """A row is no document or example."""


class Examples:
    """Makes examples of rows."""

    def __init__(self, tokenizer: Tokenizer, columns: Sequence[str]) -> None:
        """Take the name of the column with messages, or of those with prompt and completion; none: the usual names."""
        self._tokenizer, self._columns = tokenizer, columns
        self._library: Any = None if isinstance(tokenizer, Bytes) else tokenizer.tokenizer
        self._end = END_OF_TEXT if self._library is None else self._library.eos_token

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Return the example in a row. Raises Unusable, and DataError where the tokenizer cannot make any."""
        columns = self._columns or next((names for names in _USUAL_COLUMNS if set(names) <= set(row)), ())
        values = [row[column] for column in columns]
        if not 1 <= len(values) <= 2:
            raise Unusable(
                f"the row has the columns {', '.join(map(repr, row))}, neither prompt and completion nor messages: choose "
                "columns with --column PROMPT,COMPLETION or --column MESSAGES"
            )
        if len(values) == 2 and all(isinstance(value, str) for value in values):
            prompt, completion = values
            end = "" if completion.endswith(self._end) else self._end
            return _answer_after(self._encoded(prompt), self._encoded(prompt + completion + end))
        if not all(isinstance(value, list) for value in values):
            kinds = ", ".join(f"{name} holds {type(value).__name__}" for name, value in zip(columns, values, strict=True))
            raise Unusable(f"{kinds}: expected two texts, or lists of messages")
        if self._library is None or not self._library.chat_template:
            raise DataError(
                "messages need a tokenizer with a chat template, and this one has none: use the tokenizer of "
                "a chat model, or columns with a prompt and a completion as texts"
            )
        try:
            tools, more = (_json(row.get(name)) for name in ("tools", "chat_template_kwargs"))
            options = {"tools": tools, **(more or {})}
        except (ValueError, TypeError, RecursionError) as error:
            raise Unusable(f"tools is no JSON, or chat_template_kwargs no JSON object ({error})") from error
        first, *second = ([_message(message) for message in value] for value in values)
        if second:
            before = self._rendered(first, options, add_generation_prompt=True)["input_ids"]
            return _answer_after(before, self._rendered(first + second[0], options)["input_ids"])
        return self._conversation(first, options)

    def _encoded(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unusable(f"not UTF-8 ({error.reason})") from error
        if isinstance(self._tokenizer, Bytes):
            return list(self._tokenizer.encode_with_special(text))
        ids: list[int] = self._tokenizer.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def _conversation(self, messages: list[Message], options: Mapping[str, Any]) -> Example:
        if _MARK.search(self._library.get_chat_template(options.get("chat_template"), options.get("tools"))):
            rendered = self._rendered(messages, options, return_assistant_tokens_mask=True)
            tokens, counted = np.array(rendered["input_ids"], np.int32), np.array(rendered["assistant_masks"], bool)
            # Some templates mark an answer without the end-of-text token after it, which counts as well.
            counted[1:] |= counted[:-1] & (tokens == self._tokenizer.about["eos_id"])[1:]
            return tokens, counted
        whole = self._rendered(messages, options)["input_ids"]
        counted = np.zeros(len(whole), bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:number], options, add_generation_prompt=True)["input_ids"] if number else None
            after = self._rendered(messages[: number + 1], options)["input_ids"]
            if before is None or len(before) > len(after) or whole[: len(before)] != before or whole[: len(after)] != after:
                raise Unusable(
                    f"message {number}: its answer cannot be found, because the chat template renders the messages before it "
                    "differently than within the whole conversation, or there are none: put {% generation %} marks into the "
                    "template"
                )
            counted[len(before) : len(after)] = True
        return np.array(whole, np.int32), counted

    def _rendered(self, messages: list[Message], options: Mapping[str, Any], **more: Any) -> Any:
        try:
            return self._library.apply_chat_template(messages, tokenize=True, return_dict=True, **{**options, **more})
        except Exception as error:  # whatever a template raises, or Jinja of it
            raise Unusable(f"the chat template refuses it ({type(error).__name__}: {error})") from error


def _answer_after(prompt: list[int], whole: list[int]) -> Example:
    """Return the whole, of which all tokens count from the first that differs from the prompt."""
    pairs = enumerate(zip(prompt, whole, strict=False))
    first = next((n for n, (one, other) in pairs if one != other), min(len(prompt), len(whole)))
    return np.array(whole, np.int32), np.arange(len(whole)) >= first


def _json(value: Any) -> Any:
    """Return the value of a column, which may be JSON as text; None: it is empty."""
    return (json.loads(value) if value.strip() else None) if isinstance(value, str) else value


def _message(message: Any) -> Message:
    """Return a message as templates take it; ShareGPT's `from` and `value` are `role` and `content`."""
    if not isinstance(message, dict):
        raise Unusable(f"a message is {type(message).__name__}: expected an object with role and content")
    fields = {key: value for key, value in message.items() if value is not None}  # Arrow gives all the same keys
    if "role" not in fields and "from" in fields:
        role = fields.pop("from")
        fields |= {"role": _ROLES.get(role, role), "content": fields.pop("value", "")}
    if "role" not in fields:
        raise Unusable(f"a message has no role; it has {', '.join(map(repr, fields))}")
    return fields
