"""How logits are cut where they never exist at once; apart from `learn.logprob` so that an estimate needs no torch."""

from __future__ import annotations

WORDS = 128  # a chunk of words is a multiple of this: what suits products of matrices


def words_at_once(tokens: int, words: int, chunk: int) -> int:
    """So that all tokens have as many logits as `chunk` tokens have with all words."""
    fitting = chunk * words // max(tokens, 1)
    return words if fitting >= words else max(WORDS, fitting // WORDS * WORDS)
