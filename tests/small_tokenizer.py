"""A byte-level BPE of 600 tokens, trained here in a moment, as a folder that transformers loads; and a text to read with it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from app.tasks.causal_lm.data import store

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template that marks answers."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without the marks."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def chapters() -> list[str]:
    """Return the chapters of the text that comes with the package, without its end."""
    return [chapter.decode() for chapter in store.embedded_documents()["train"]]


def write_tokenizer(folder: Path, template: str | None = None, eos: str = SPECIAL[0]) -> str:
    """Write the tokenizer into a folder and return its name."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(chapters()[:4], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=SPECIAL[0])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return str(folder)
