"""Announces that this process is compiling: kernels, layers and graphs take seconds to minutes the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Listener = Callable[[str], None]
_under_way: list[str] = []  # what is being compiled in this process, by any thread; the latest last
_listeners: list[Listener] = []


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Announce `what` while the block compiles it."""
    begin(what)
    try:
        yield
    finally:
        end(what)


def begin(what: str) -> None:
    _under_way.append(what)
    for listener in list(_listeners):
        listener(f"compiling {what}")


def end(what: str) -> None:
    if what in _under_way:
        _under_way.remove(what)


def under_way() -> str:
    """Return what is being compiled now, or ""."""
    return _under_way[-1] if _under_way else ""


@contextmanager
def announced(listener: Listener) -> Iterator[None]:
    """Call `listener` with "compiling …" whenever something begins to compile in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@cache  # registered once in a process
def follow_torch() -> None:
    """Announce torch's own compilations, which begin inside the first calls of compiled layers."""
    from torch._dynamo import callback

    def started(_: Any) -> None:
        begin("layers")

    def ended(_: Any) -> None:
        end("layers")

    callback.on_compile_start(started)
    callback.on_compile_end(ended)
