"""Prompts and answers as tokens, and which of them count: only answers do, each with the token that ends it.

An example has either a prompt and a completion (two texts, or two lists of messages) or a list of messages. Texts are joined
unchanged, with the end-of-text token after them. Messages go through the tokenizer's chat template. The template marks what
counts ({% generation %}). One without marks is rendered up to each answer, and with it: the additional tokens are the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.errors import DataError
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Bytes, Tokenizer

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
        self._library = None if isinstance(tokenizer, Bytes) else tokenizer.tokenizer
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
        if self._is_marked(options):
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

    def _is_marked(self, options: Mapping[str, Any]) -> bool:
        if self._library is None or not self._library.chat_template:
            return False
        return bool(_MARK.search(self._library.get_chat_template(options.get("chat_template"), options.get("tools"))))

    def _rendered(self, messages: list[Message], options: Mapping[str, Any], **more: Any) -> Any:
        if self._library is None or not self._library.chat_template:
            raise DataError(
                "messages need a tokenizer with a chat template, and this one has none: use the tokenizer of "
                "a chat model, or columns with a prompt and a completion as texts"
            )
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
