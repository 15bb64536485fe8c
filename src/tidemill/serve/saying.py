"""An answer as it is made: tokens in, pieces of text out, and at the end what all of it says.

Pieces are told as soon as they are sure: not inside a character, not while they may be the beginning of a stop string
or of a call, and without the spaces that end an answer where the format's reader takes them away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.chat.answer import Answer, Schema
from tidemill.chat.formats.api import THINK, UNTHINK
from tidemill.serve.talk import Talk

BROKEN = "\ufffd"  # a decoder's sign for part of a character


class Decoding:
    """Text of a growing list of tokens, in time that does not grow with it."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.tokenizer = talk, talk.tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self._first = self._read = 0  # the window that is decoded, and how far it was told

    def add(self, tokens: Sequence[int]) -> str:
        self.tokens += self.talk.chat.shown(tokens)
        before = self._decode(self._first, self._read)
        whole = self._decode(self._first, len(self.tokens))
        if len(whole) <= len(before) or whole.endswith(BROKEN):
            return ""
        new = whole[len(before) :]
        self._first, self._read = self._read, len(self.tokens)
        self.text += new
        return new

    def end(self) -> str:
        """What was held back: part of a character that nothing followed."""
        before = self._decode(self._first, self._read)
        new = self._decode(self._first, len(self.tokens))[len(before) :]
        self._read = len(self.tokens)
        self.text += new
        return new

    def _decode(self, first: int, last: int) -> str:
        return str(self.tokenizer.decode(self.tokens[first:last], skip_special_tokens=False)) if last > first else ""


@dataclass(frozen=True, slots=True)
class Piece:
    content: str = ""
    reasoning: str = ""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning)


class Saying:
    """One sample of a chat request. `tools`: those whose calls are looked for."""

    def __init__(self, talk: Talk, tools: Sequence[Schema], stops: Sequence[str], *, has_thoughts: bool) -> None:
        self.talk, self.tools, self.stops, self.has_thoughts = talk, tools, stops, has_thoughts
        self.decoding = Decoding(talk)
        format = talk.chat.format
        self._is_strict = bool(tools) or (talk.has_template and format.name in ("harmony", "mistral"))
        marks = [*format.markers, *format.openings] if self._is_strict else [THINK, UNTHINK]
        self._marks = tuple(marks) if self._is_strict or THINK in format.markers else ()
        self._openings = tuple(format.openings)
        self._told = Piece()
        self.is_stopped = False

    def add(self, tokens: Sequence[int]) -> Piece:
        """Tell what is sure by now."""
        if self.is_stopped:
            return Piece()
        self.decoding.add(tokens)
        text, self.is_stopped = cut(self.decoding.text, self.stops)
        if self.is_stopped:
            return self._tell(text)
        held = max(_partial(text, self.stops), _partial(text, self._marks))
        return self._tell(text[: len(text) - held] if held else text)

    def whole(self, tokens: Sequence[int]) -> Answer:
        """What all tokens say."""
        text, _ = cut(self.talk.text(tokens), self.stops)
        return self.talk.read(text, self.tools, has_thoughts=self.has_thoughts)

    def rest(self, answer: Answer) -> Piece:
        """What was not told of the whole answer."""
        content = _behind(answer.content, self._told.content)
        return Piece(content, _behind(answer.reasoning or "", self._told.reasoning))

    def _tell(self, text: str) -> Piece:
        if not self._marks and not self.has_thoughts:
            piece = Piece(text[len(self._told.content) :])
            self._told = Piece(text)
            return piece
        answer = self.talk.read(text, self.tools, has_thoughts=self.has_thoughts)
        content = answer.content.rstrip()  # more may follow, then spaces count
        if answer.calls or answer.unread or (self.tools and text.lstrip().startswith(self._openings)):
            content = self._told.content
        reasoning = (answer.reasoning or "").rstrip()
        piece = Piece(_behind(content, self._told.content), _behind(reasoning, self._told.reasoning))
        self._told = Piece(self._told.content + piece.content, self._told.reasoning + piece.reasoning)
        return piece


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop string, and whether there is one."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def _partial(text: str, words: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a word."""
    most = 0
    for word in words:
        for size in range(min(len(word) - 1, len(text)), most, -1):
            if text.endswith(word[:size]):
                most = size
                break
    return most


def _behind(text: str, told: str) -> str:
    return text[len(told) :] if text.startswith(told) else ""


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Each token's own text, special ones too."""
    return [str(tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]
