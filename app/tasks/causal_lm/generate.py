"""`samerun generate FOLDER ["text"]`: generates text with a language model, printed as it comes.

The folder is that of a finished run, one that `samerun export` wrote, or any of transformers. What runs is transformers' own
`generate`, with its cache; all choices that it makes come from the flags, and none from the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import DataError, DeviceError, RunFolderError
from app.files import other_libraries
from app.options import Parser, not_negative, positive, share, tolerance

if TYPE_CHECKING:
    import torch

_HALF = "\ufffd"
"""An incomplete character is decoded to this."""
_MOST_TOKENS_OF_CHARACTER = 4
"""Bytes of the longest UTF-8 character."""


def run(options: argparse.Namespace, folder: Path) -> int:
    """Write what the model of a folder makes of a text, as the options say, and return 0. Raises SamerunError."""
    device = _device(options.device)
    model, tokenizer = load(folder)
    text = sys.stdin.read() if options.text is None else options.text
    tokens = _beginning(tokenizer, text)
    length = _length(model, tokens, options.max_tokens)
    write = (lambda _: None) if options.json else _write
    write(text)
    new, continuation = generate(model.to(device), tokenizer, tokens, length, options, write)
    if options.json:
        ended = bool(new) and new[-1] in _ends(model, tokenizer)
        told = {"text": text, "continuation": continuation, "tokens": new, "ended": ended, "seed": options.seed}
        sys.stdout.write(json.dumps(told))
    sys.stdout.write("\n")
    return 0


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model of a folder, in evaluation mode on the CPU, and its tokenizer. Raises RunFolderError."""
    if not (folder / "config.json").is_file():
        why = f"{folder} is no folder of a language model: it has no config.json. Give a finished run, or a transformers folder"
        if (folder / "checkpoints").is_dir():
            why = f"{folder} is an unfinished run: export its newest checkpoint with `samerun export {folder}`"
        elif (folder / "model.json").is_file():
            why = f"{folder} contains no language model: it has no config.json of transformers"
        raise RunFolderError(why)
    from transformers import AutoModelForCausalLM  # here: a wrong path need not wait for it

    from app.tasks.causal_lm import causality
    from app.tasks.causal_lm.model import read_folder
    from app.tasks.causal_lm.transformers_folder import has_tokenizer

    model: Any = read_folder(folder, AutoModelForCausalLM)
    causality.check(model.config, model.config._attn_implementation, f"the {model.config.model_type} of {folder}")

    if not has_tokenizer(folder):
        raise RunFolderError(
            f"{folder} has no tokenizer: copy the files of the tokenizer used for training there "
            "(tokenizer.json, tokenizer_config.json)"
        )
    try:
        tokenizer = other_libraries.tokenizer(folder)
    except Exception as error:  # the same
        raise RunFolderError(f"transformers cannot load the tokenizer of {folder}: {_first_line(error)}") from error
    return model.eval(), tokenizer


def generate(
    model: Any, tokenizer: Any, tokens: list[int], length: int, options: Any, write: Callable[[str], object]
) -> tuple[list[int], str]:
    """Return up to `length` new tokens after `tokens`, and their text; `write` gets the text piece by piece.

    `options` has temperature (0: the likeliest token each time), top_p, top_k (0: all) and seed.
    """
    import torch
    from transformers import GenerationConfig

    sampled = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    model.generation_config = GenerationConfig()  # a folder's own would fill in what is not said here
    how = GenerationConfig(
        max_new_tokens=length,
        eos_token_id=_ends(model, tokenizer) or None,
        pad_token_id=tokens[-1],  # of a single text nothing is padded; without one there is a warning
        use_cache=True,
        **(sampled if options.temperature > 0 else {"do_sample": False}),
    )
    written = Written(tokenizer, write)
    torch.manual_seed(options.seed)
    with torch.inference_mode():
        prompt = torch.tensor([tokens], device=model.device)
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how, streamer=written)
    return found[0, len(tokens) :].tolist(), written.text


class Written:
    """A streamer of transformers that writes each new token's text, once it is whole characters.

    transformers' own TextStreamer drops the space that the first token begins with, and each one after a line break.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        """`write` is called with each piece of new text."""
        self._tokenizer, self._write = tokenizer, write
        self._tokens: list[int] = []
        # The text of a token may depend on the tokens before it (a space, half a character), so a few are decoded together.
        self._context = self._written = 0
        self.text = ""
        """All text written so far."""

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        is_prompt = not self._tokens
        self._tokens += tokens.reshape(-1).tolist()
        if is_prompt:
            self._written = len(self._tokens)
            self._context = max(0, self._written - _MOST_TOKENS_OF_CHARACTER)
        else:
            self._show(at_end=False)

    def end(self) -> None:
        """Write what was held back."""
        self._show(at_end=True)

    def _show(self, *, at_end: bool) -> None:
        before, whole = self._decoded(self._written), self._decoded(len(self._tokens))
        new = whole[len(before) :]
        if new and (at_end or not whole.endswith(_HALF)):
            self.text += new
            self._write(new)
            self._context, self._written = self._written, len(self._tokens)

    def _decoded(self, end: int) -> str:
        tokens = self._tokens[self._context : end]
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _beginning(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text; of none that which begins a document. Raises DataError if there is none."""
    tokens: list[int] = tokenizer(text)["input_ids"]
    if not tokens:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise DataError("there is no prompt, and the tokenizer has no beginning-of-text token: give a text")
        tokens = [first]
    return tokens


def _length(model: Any, tokens: list[int], wanted: int) -> int:
    """Return how many tokens can follow. Raises DataError if the text fills the model's window."""
    window: int | None = getattr(model.config, "max_position_embeddings", None)
    if window is None:
        return wanted
    if len(tokens) >= window:
        raise DataError(
            f"the text has {len(tokens):,} tokens, and the model takes {window:,} including generated ones: shorten the text"
        )
    if wanted > (left := window - len(tokens)):
        sys.stderr.write(
            f"note: at most {left:,} tokens will be generated: the model takes {window:,}, and the text has {len(tokens):,}\n"
        )
    return min(wanted, left)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text, as the folder says."""
    said = model.config.eos_token_id
    ends = said if isinstance(said, list) else [said]
    return sorted({token for token in (*ends, tokenizer.eos_token_id) if token is not None})


def _device(name: str | None) -> torch.device:
    import torch  # here: the help need not wait for it

    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"--device {name} is not available: {_first_line(error)}") from error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def parser() -> Parser:
    """Return the parser for its command line."""
    made = Parser(
        prog="samerun generate",
        description="Generate text with a language model: of a finished run, from `samerun export`, or any transformers "
        "folder.",
    )
    made.add_argument("folder", type=Path, metavar="FOLDER", help="finished run, or transformers folder")
    made.add_argument("text", nargs="?", help="prompt (default: read from stdin)")
    made.add_argument(
        "--max-tokens", type=positive, default=200, metavar="N", help="most tokens to generate (default: %(default)s)"
    )
    made.add_argument("--temperature", type=tolerance, default=1.0, metavar="T", help="sampling temperature; 0: always the "
        "most likely token; 1: the model's own probabilities (default: 1)")  # fmt: skip
    made.add_argument("--top-p", type=share, default=1.0, metavar="P", help="sample only from the most likely tokens that "
        "together have this probability (default: 1, all)")  # fmt: skip
    made.add_argument("--top-k", type=not_negative, default=0, metavar="K", help="sample only from the K most likely tokens "
        "(default: 0, all)")  # fmt: skip
    made.add_argument("--seed", type=not_negative, default=0, metavar="S", help="seed of the sampling: it gives the same "
        "text each time on one kind of device (default: 0)")  # fmt: skip
    made.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: an accelerator if there is one)")
    made.add_argument("--json", action="store_true", help="print one JSON object: text, continuation, tokens, ended, seed")
    return made
