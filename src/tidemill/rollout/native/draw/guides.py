"""Grammars of running samples: which tokens may come next, so that a response is JSON of a schema, or a call of a tool.

Each sample has a matcher that is told every token it made. `llguidance` works them out: it needs no tables to be made
ahead, so a schema that comes with a request costs under a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tidemill.batch import Array
from tidemill.errors import MissingExtra
from tidemill.rollout.engine import Grammar

PARALLEL_FROM = 8  # rows: below, starting threads takes longer than the work


class Grammars:
    """What a tokenizer makes of grammars. Made once: it takes about a second for a large vocabulary."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab, self.eos_ids = tokenizer, vocab, [i for i in eos_ids if 0 <= i < vocab]

    @cached_property
    def tokens(self) -> Any:
        """The vocabulary as llguidance knows it."""
        library = package()
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.vocab, eos_token=self.eos_ids)
        except Exception:  # a tokenizer of another kind, such as one token a character
            return library.LLTokenizer(library.TokenizerWrapper(_Words(self.tokenizer, self.vocab, self.eos_ids)))

    def problem(self, grammar: Grammar | None) -> str | None:
        """What is wrong with a grammar, in words."""
        if grammar is None:
            return None
        matcher = self._matcher(grammar)
        return f"the grammar cannot be followed: {matcher.get_error()}" if matcher.is_error() else None

    def begin(self, grammar: Grammar, made: Sequence[int]) -> Any:
        """The matcher of a sample that has made these tokens."""
        matcher = self._matcher(grammar)
        if made:
            matcher.consume_tokens(list(made))
        return matcher

    def _matcher(self, grammar: Grammar) -> Any:
        matcher = package().LLMatcher
        make = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }[grammar.kind]
        return matcher(self.tokens, make(grammar.text))


class Guides:
    """The matchers of an engine's slots."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._of: dict[int, Any] = {}  # by slot
        self._executor: Any = None

    def seat(self, slot: int, grammar: Grammar | None, made: Sequence[int]) -> None:
        """A slot has a new tenant."""
        if grammar is not None:
            self._of[slot] = self.grammars.begin(grammar, made)
        elif self._of:
            self._of.pop(slot, None)

    def accept(self, slots: Array, tokens: Array) -> None:
        for slot, token in zip(slots.tolist(), tokens.tolist()):
            matcher = self._of[slot]
            if not matcher.is_stopped():
                matcher.consume_token(int(token))

    def allowed(self, slots: Array) -> Array:
        """(slots, vocab) bool: what each may draw next. A response that is whole may only end."""
        import llguidance.numpy as words

        vocab, matchers = self.grammars.vocab, [self._of[slot] for slot in slots.tolist()]
        mask = words.allocate_token_bitmask(len(matchers), vocab)
        if len(matchers) < PARALLEL_FROM:
            for i, matcher in enumerate(matchers):
                words.fill_next_token_bitmask(matcher, mask, i)
        else:
            self._executor = self._executor or package().LLExecutor()
            words.fill_next_token_bitmask_par(self._executor, list(zip(matchers, range(len(matchers)))), mask)
        found: Array = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
        found[:, self.grammars.eos_ids] |= ~found.any(1, keepdims=True)
        return found


class _Words:
    """A tokenizer as llguidance asks one: the bytes of every token."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, eos_ids[0] if eos_ids else None, None
        self.special_token_ids = [int(i) for i in tokenizer.all_special_ids]
        known = len(tokenizer)
        self.tokens = [
            str(tokenizer.decode([i], skip_special_tokens=False)).encode() if i < known else f"<{i}>".encode()
            for i in range(vocab)
        ]
        self.special_token_ids += range(known, vocab)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("constrained decoding (a JSON schema, a required tool)", "llguidance", "serve") from None
    return llguidance
