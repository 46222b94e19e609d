"""Text that a language model generates: `samerun generate FOLDER ["text"]`, and samples during training.

The folder is a finished run, one that `samerun export` wrote, or any of transformers. The command runs transformers'
own `generate`, with its cache; only the options decide, and not the folder's settings.

During training the model continues the beginnings of a few rows by forward passes alone. All ranks call the model equally
often, with the same tokens, and draw the same numbers, so the texts are the same under every strategy.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.data_files import first_line
from app.errors import DataError, DeviceError, RunFolderError
from app.files import other_libraries
from app.options import Parser, not_negative, positive, share, tolerance
from app.runs import run_folder

if TYPE_CHECKING:
    from torch import Tensor

    from app.tasks.causal_lm.data.tokenizers import Tokenizer

PROMPT_TOKENS, SAMPLE_TOKENS = 32, 64
"""Most tokens of a row that a sample begins with, and most that the model adds: each is a forward pass."""
LARGEST_SAMPLED = 1_000_000_000
"""Parameters of the largest model that generates samples: under ZeRO-3 and FSDP2 every pass gathers all parameters."""


def main(argv: Sequence[str]) -> int:
    """Run `samerun generate` with these arguments and return its exit code. Raises SamerunError."""
    options = _parser().parse_all(argv)
    import torch
    from transformers import GenerationConfig

    device = options.device
    if device is None:
        device = (torch.accelerator.is_available() and torch.accelerator.current_accelerator()) or "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"--device {device} is not available: {first_line(error)}") from error
    model, tokenizer = load(options.folder)
    text = sys.stdin.read() if options.text is None else options.text
    tokens = tokenizer(text)["input_ids"]
    if not tokens:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None:
            raise DataError("there is no prompt, and the tokenizer has no beginning-of-text token: give a text")
        tokens = [first]
    length, window = options.max_tokens, getattr(model.config, "max_position_embeddings", None)
    if window is not None and len(tokens) >= window:
        raise DataError(f"the text has {len(tokens):,} tokens, and the model takes {window:,} with generated ones: shorten it")
    if window is not None and length > window - len(tokens):
        length = window - len(tokens)
        sys.stderr.write(f"note: only {length:,} tokens follow: the model takes {window:,}, and the text has {len(tokens):,}\n")
    write: Callable[[str], object] = (lambda _: None) if options.json else functools.partial(print, end="", flush=True)
    write(text)
    configured = model.config.eos_token_id
    ends = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id} - {None}
    sampled = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
    model.generation_config = GenerationConfig()  # a folder's own would fill in what is not set here
    how = GenerationConfig(
        max_new_tokens=length,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokens[-1],  # a single text is not padded; without one there is a warning
        use_cache=True,
        **(sampled if options.temperature > 0 else {"do_sample": False}),
    )
    streamer = Streamer(tokenizer, write)
    torch.manual_seed(options.seed)
    with torch.inference_mode():
        prompt = torch.tensor([tokens], device=device)
        mask = torch.ones_like(prompt)
        output = model.to(device).generate(prompt, attention_mask=mask, generation_config=how, streamer=streamer)
    if options.json:
        new = output[0, len(tokens) :].tolist()
        answer = {"text": text, "continuation": streamer.text, "tokens": new, "ended": bool(new) and new[-1] in ends}
        sys.stdout.write(json.dumps({**answer, "seed": options.seed}))
    sys.stdout.write("\n")
    return 0


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model of a folder, in evaluation mode on the CPU, and its tokenizer. Raises RunFolderError."""
    if not (folder / "config.json").is_file():
        advice = "give a finished run, a transformers folder, or what `samerun export RUN` writes of an unfinished run"
        if (folder / run_folder.MODEL_CONFIG).is_file():
            advice = f"it is the finished run of another task. `samerun predict {folder} FILE` predicts with it"
        raise RunFolderError(f"{folder} has no config.json of a language model: {advice}")
    from transformers import AutoModelForCausalLM  # here: a wrong path need not wait for it

    from app.tasks.causal_lm import causality
    from app.tasks.causal_lm.configuration import has_tokenizer
    from app.tasks.causal_lm.model import read_folder

    model: Any = read_folder(folder, AutoModelForCausalLM)
    causality.check(model.config, model.config._attn_implementation, f"the {model.config.model_type} of {folder}")
    if not has_tokenizer(folder):
        raise RunFolderError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of its training there")
    try:
        tokenizer = other_libraries.tokenizer(folder)
    except Exception as error:  # whatever a damaged file makes the library raise
        raise RunFolderError(f"transformers cannot load the tokenizer of {folder}: {first_line(error)}") from error
    return model.eval(), tokenizer


class Streamer:
    """A streamer of transformers that writes each new token's text, once its characters are complete.

    The text of a token depends on those before it, so all are decoded each time. transformers' own TextStreamer drops the
    space that the first token begins with, and each one after a line break.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        """Take a function that writes each piece of new text."""
        self._tokenizer, self._write = tokenizer, write
        self._tokens: list[int] = []
        self._prompt = self.text = ""
        """Text of the prompt, and all text written so far."""

    def put(self, tokens: Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        is_prompt = not self._tokens
        self._tokens += tokens.reshape(-1).tolist()
        if is_prompt:
            self._prompt = self._decoded()
        elif not self._decoded().endswith("\ufffd"):  # the replacement of an incomplete character
            self.end()

    def end(self) -> None:
        """Write the rest."""
        whole = self._decoded()[len(self._prompt) :]
        if new := whole[len(self.text) :]:
            self.text = whole
            self._write(new)

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _parser() -> Parser:
    """Return the parser for its command line."""
    made = Parser("generate", "Generate text with a language model: of a finished run, from `samerun export`, or any "
        "transformers folder.")  # fmt: skip
    add = made.add_argument
    add("folder", type=run_folder.existing, metavar="RUN", help="finished run, or transformers folder")
    add("text", nargs="?", metavar="TEXT", help="prompt (default: read from stdin)")
    add("--max-tokens", type=positive, default=200, metavar="N", help="most tokens to generate (default: %(default)s)")
    add("--temperature", type=tolerance, default=1.0, metavar="NUMBER", help="sampling temperature; 0: always the most likely "
        "token; 1: the model's own probabilities (default: 1)")  # fmt: skip
    add("--top-p", type=share, default=1.0, metavar="SHARE", help="sample only from the most likely tokens that together have "
        "this probability (default: 1, all)")  # fmt: skip
    add("--top-k", type=not_negative, default=0, metavar="N", help="sample only from the N likeliest tokens (default: 0, all)")
    add("--seed", type=not_negative, default=0, metavar="N", help="seed of the sampling: it gives the same text each time on "
        "one kind of device (default: 0)")  # fmt: skip
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: an accelerator if there is one)")
    add("--json", action="store_true", help="print one JSON object: text, continuation, tokens, ended, seed")
    return made


def continuations(model: Callable[..., Any], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the beginnings of rows of tokens, int64 [B, S], and what the model draws after them, by torch's generator."""
    import torch

    begin = min(PROMPT_TOKENS, tokens.shape[1] // 2)
    rows = tokens[:, :begin]
    for _ in range(min(SAMPLE_TOKENS, tokens.shape[1] - begin)):
        logits = model(input_ids=rows, use_cache=False).logits[:, -1]
        # On the CPU and in float64: the draws then do not depend on how a device adds up.
        cumulative = logits.double().cpu().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(cumulative, torch.rand(len(rows), 1, dtype=torch.float64) * cumulative[:, -1:], right=True)
        rows = torch.cat([rows, drawn.clamp(max=cumulative.shape[1] - 1).to(rows.device)], dim=1)
    return rows[:, :begin], rows[:, begin:]


def samples(model: Callable[..., Any], tokens: Tensor, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the beginning of each row, and the model's continuation until it ends the text."""
    end, texts = tokenizer.about["eos_id"], []
    for begin, added in zip(*(part.tolist() for part in continuations(model, tokens)), strict=True):
        until = added.index(end) if end in added else len(added)
        texts.append((tokenizer.decode(begin), tokenizer.decode(added[:until])))
    return texts
