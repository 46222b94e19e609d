"""A language whose entropy is known: each token depends on the two before it, by a table that is drawn once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

SYMBOLS = 8


@dataclass(frozen=True)
class Grammar:
    """A Markov source of second order."""

    next_of: np.ndarray
    """float64 [A, A, A]: how likely each symbol is after each two."""

    @classmethod
    def drawn(cls, seed: int = 0) -> Grammar:
        """Some choices are nearly certain and others nearly free."""
        return cls(np.random.default_rng(seed).dirichlet(np.full(SYMBOLS, 0.3), size=(SYMBOLS, SYMBOLS)))

    def pairs(self) -> np.ndarray:
        """How often each two symbols follow one another in a long text, [A, A]: what a step leaves as it is."""
        often = np.full((SYMBOLS, SYMBOLS), SYMBOLS**-2)
        for _ in range(10_000):
            often = np.einsum("ab,abc->bc", often, self.next_of)
        return often

    def entropy_rate(self) -> float:
        """In nats a token: what the next one leaves open for who knows all before it."""
        nats = -np.sum(self.next_of * np.log(np.maximum(self.next_of, 1e-300)), axis=2)
        return float(np.sum(self.pairs() * nats))

    def text(self, tokens: int, seed: int) -> np.ndarray:
        """So many tokens of the language, from the middle of a text: uint16 [tokens]."""
        random, often = np.random.default_rng(seed), self.pairs()
        first, second = divmod(int(random.choice(SYMBOLS**2, p=often.ravel())), SYMBOLS)
        bounds, draws = self.next_of.cumsum(2), random.random(tokens)
        bounds[:, :, -1] = 1.0
        found = np.empty(tokens, np.uint16)
        for at, draw in enumerate(draws):
            first, second = second, int(bounds[first, second].searchsorted(draw, side="right"))
            found[at] = second
        return found

    def nats(self, text: np.ndarray, length: int) -> float:
        """What predicting whole rows of the text costs the source itself, a token: nobody can do better but by chance.

        The first target of a row has one token before it; the others are predicted from two.
        """
        often = self.pairs()
        after_one = np.einsum("ab,abc->bc", often, self.next_of) / often.sum(0)[:, None]
        rows = text[(np.arange((len(text) - 1) // length) * length)[:, None] + np.arange(length + 1)]
        after_two = self.next_of[rows[:, :-2], rows[:, 1:-1], rows[:, 2:]]
        likely = np.concatenate([after_one[rows[:, :1], rows[:, 1:2]], after_two], axis=1)
        return float(-np.log(likely).mean())


def write(grammar: Grammar, folder: Path, *, train: int, test: int) -> np.ndarray:
    """A token folder of the language, of text to train on and other text to test; returns the latter."""
    from app.tasks.causal_lm.data.token_writer import writing

    about = {"kind": "grammar", "name": "grammar", "revision": None, "digest": "grammar", "vocab_size": SYMBOLS,
             "eos_id": None, "bos_id": None}  # fmt: skip
    held_out = grammar.text(test, seed=2)
    with writing(folder, about, {}, token_bytes=None) as writer:
        for split, text in (("train", grammar.text(train, seed=1)), ("test", held_out)):
            writer.append(split, text, np.array([len(text)]))
    return held_out
