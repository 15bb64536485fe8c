"""Answers that are given while they are made: tokens in, pieces of text out, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from tidemill.errors import ModelError
from tidemill.rollout.engine import Completion

KEPT = 64  # tokens that are decoded anew for each piece
UNFINISHED = "\ufffd"  # what a tokenizer gives for a character whose last bytes are still to come


@dataclass(frozen=True, slots=True)
class Piece:
    """What one or more steps added to an answer that is streamed. Text may lag behind by an unfinished character."""

    text: str
    tokens: list[int]
    logprobs: list[float]


class Pieces:
    """One answer on its way."""

    def __init__(self, text: Callable[[Sequence[int]], str], ring: Callable[[], object]) -> None:
        self.ready: SimpleQueue[Piece | None] = SimpleQueue()  # None: there are no more
        self.number, self.is_over = -1, False
        self._text, self._ring = text, ring
        self._failure: str | None = None
        self._seen: list[int] = []  # since a place where text could be cut
        self._given = ""  # text of `_seen` that was given
        self._tokens: list[int] = []  # not given yet
        self._logprobs: list[float] = []

    def add(self, token: int, logprob: float) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._seen.append(token)
        text = self._text(self._seen)
        if not text.endswith(UNFINISHED):
            self._give(text)

    def end(self, completion: Completion) -> None:
        self._failure, self.is_over = completion.error, True
        if self._tokens:
            self._give(self._text(self._seen))
        self.ready.put(None)
        self._ring()

    def close(self, failure: BaseException | None) -> None:
        """End a stream whose engine failed."""
        if not self.is_over:
            self._failure, self.is_over = str(failure), True
            self.ready.put(None)
            self._ring()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise ModelError(self._failure)

    def _give(self, text: str) -> None:
        self.ready.put(Piece(text[len(self._given) :], self._tokens, self._logprobs))
        self._tokens, self._logprobs, self._given = [], [], text
        if len(self._seen) > KEPT:  # a tokenizer looks back at most a few tokens
            self._seen = self._seen[-KEPT // 2 :]
            self._given = self._text(self._seen)
        self._ring()
