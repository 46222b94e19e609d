"""Prompts and answers as tokens: which of them count. Only answers do, each with the token that ends it.

An example has either a prompt and a completion (two texts, or two lists of messages) or a list of messages. Texts are joined as
they are, with the end-of-text token after them. Messages go through the tokenizer's chat template. What counts of them is what
the template marks ({% generation %}). One without marks is rendered up to each answer, and with it: the tokens more are the
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from app.errors import DataError
from app.tasks.causal_lm.data.tokenizers import END_OF_TEXT, Tokenizer, Transformers

Message = dict[str, Any]
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant"}


class Unusable(Exception):  # noqa: N818  (a row is, and the text says why: no error until somebody wants it to be)
    """A row is no example."""


class Example(NamedTuple):
    """One example as tokens."""

    tokens: np.ndarray
    """int32 [n]."""
    counted: np.ndarray
    """bool [n]: the answers."""
    is_merged: bool = False
    """Whether the completion begins within the last token of the prompt. That token counts as part of the answer, and it is not
    there when a model is given the prompt alone."""


class Examples:
    """Makes examples of rows."""

    def __init__(self, tokenizer: Tokenizer, columns: Sequence[str]) -> None:
        """`columns`: the name of that with the messages, or the names of those with prompt and completion."""
        self._tokenizer, self._columns = tokenizer, columns
        self._library = tokenizer.tokenizer if isinstance(tokenizer, Transformers) else None
        self._end = END_OF_TEXT if self._library is None else self._library.eos_token

    def __call__(self, row: Mapping[str, Any]) -> Example:
        """Return the example in a row. Raises Unusable, and DataError where the tokenizer cannot make any."""
        values = [row[column] for column in self._columns]
        if len(values) == 2 and all(isinstance(value, str) for value in values):
            return self._of_texts(*values)
        if not all(isinstance(value, list) for value in values):
            kinds = ", ".join(f"{name} holds {type(value).__name__}" for name, value in zip(self._columns, values, strict=True))
            raise Unusable(f"{kinds}: expected two texts, or lists of messages")
        told = {"tools": _read(row, "tools", list), **(_read(row, "chat_template_kwargs", dict) or {})}
        parts = [[_message(message) for message in value] for value in values]
        return self._of_prompt(*parts, told=told) if len(parts) == 2 else self._of_messages(parts[0], told)

    def _of_texts(self, prompt: str, completion: str) -> Example:
        if not completion.endswith(self._end):
            completion += self._end
        return _after(self._encoded(prompt), self._encoded(prompt + completion))

    def _encoded(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unusable(f"not UTF-8 ({error.reason})") from error
        if self._library is None:
            return list(map(int, self._tokenizer.encode([text], special=True)[0]))
        ids: list[int] = self._library(text, verbose=False)["input_ids"]
        return ids

    def _of_prompt(self, prompt: list[Message], completion: list[Message], *, told: Mapping[str, Any]) -> Example:
        before = self._rendered(prompt, told, add_generation_prompt=True)["input_ids"]
        return _after(before, self._rendered(prompt + completion, told)["input_ids"])

    def _of_messages(self, messages: list[Message], told: Mapping[str, Any]) -> Example:
        if self._is_marked(told):
            found = self._rendered(messages, told, return_assistant_tokens_mask=True)
            tokens = np.array(found["input_ids"], np.int32)
            return Example(tokens, self._with_ends(tokens, np.array(found["assistant_masks"], bool)))
        whole = self._rendered(messages, told)["input_ids"]
        counted = np.zeros(len(whole), bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if not number:
                    raise Unusable(
                        "it begins with an answer, which cannot be found because the chat template has no {% "
                        "generation %} marks"
                    )
                before = self._rendered(messages[:number], told, add_generation_prompt=True)["input_ids"]
                after = self._rendered(messages[: number + 1], told)["input_ids"]
                if not (len(before) <= len(after) and whole[: len(before)] == before and whole[: len(after)] == after):
                    raise Unusable(
                        f"message {number}: the chat template renders the messages before it differently than "
                        "within the whole conversation, so the answer cannot be found: put {% generation "
                        "%} marks into the template"
                    )
                counted[len(before) : len(after)] = True
        return Example(np.array(whole, np.int32), counted)

    def _with_ends(self, tokens: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Count the end-of-text token after each answer as well, where the template's marks leave it out."""
        ends = tokens == self._tokenizer.about["eos_id"]
        ends[1:] &= counted[:-1]
        ends[:1] = False
        return np.asarray(counted | ends)

    def _is_marked(self, told: Mapping[str, Any]) -> bool:
        if self._library is None or not self._library.chat_template:
            return False
        return bool(_MARK.search(self._library.get_chat_template(told.get("chat_template"), told.get("tools"))))

    def _rendered(self, messages: list[Message], told: Mapping[str, Any], **options: Any) -> Any:
        if self._library is None or not self._library.chat_template:
            raise DataError(
                "messages need a tokenizer with a chat template, and this one has none: use the tokenizer of "
                "a chat model, or columns with a prompt and a completion as texts"
            )
        try:
            return self._library.apply_chat_template(messages, tokenize=True, return_dict=True, **{**told, **options})
        except Exception as error:  # whatever a template raises, or Jinja of it
            raise Unusable(f"the chat template refuses it ({type(error).__name__}: {error})") from error


def _after(prompt: list[int], whole: list[int]) -> Example:
    """Return the whole, of which all counts from where it is no longer the prompt."""
    same = next(
        (n for n, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), min(len(prompt), len(whole))
    )
    counted = np.zeros(len(whole), bool)
    counted[same:] = True
    return Example(np.array(whole, np.int32), counted, is_merged=same < len(prompt))


def _read(row: Mapping[str, Any], column: str, kind: type) -> Any:
    """Return what a column tells the template, which may be JSON as text; None: nothing."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise Unusable(f"{column} is no JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        raise Unusable(
            f"{column} is {type(value).__name__}: expected {'a list' if kind is list else 'an object'}, or it as JSON"
        )
    return value


def _message(message: Any) -> Message:
    """Return a message as templates take it; ShareGPT's `from` and `value` are `role` and `content`."""
    if not isinstance(message, dict):
        raise Unusable(f"a message is {type(message).__name__}: expected an object with role and content")
    there = {key: value for key, value in message.items() if value is not None}  # Arrow fills all up to the same keys
    if "role" not in there and "from" in there:
        role = there.pop("from")
        there |= {"role": _ROLES.get(role, role), "content": there.pop("value", "")}
    if "role" not in there:
        raise Unusable(f"a message has no role; it has {', '.join(map(repr, there))}")
    return there
