"""Answers that come in virtual time: what a handle gives for a future, without locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidemill.cluster.report import Answer


class Promise:
    """Of a future what the worker pool asks of it. One may answer many: all members that are told the same."""

    __slots__ = ("_answer", "_callbacks", "_error")

    def __init__(self, answer: Answer | None = None) -> None:
        self._answer, self._error = answer, None  # type: tuple[Answer | None, BaseException | None]
        self._callbacks: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self._answer is not None or self._error is not None

    def result(self, timeout: float | None = None) -> Answer:
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._error

    def add_done_callback(self, called: Callable[[Any], None]) -> None:
        if self.done():
            called(self)
        else:
            self._callbacks.append(called)

    def answer(self, answer: Answer) -> None:
        if not self.done():
            self._answer = answer
            self._tell()

    def fail(self, error: BaseException) -> None:
        if not self.done():
            self._error = error
            self._tell()

    def _tell(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for called in callbacks:
            called(self)


NOTHING = Answer(None)
DONE = Promise(NOTHING)
