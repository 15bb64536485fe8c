"""Errors a user can act on: what happened, where, what to do. The command line prints them without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class TidemillError(Exception):
    """Something the user can fix; `remedy` says how."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.remedy}" if self.remedy else self.message


class ConfigError(TidemillError):
    """A recipe or an override cannot work as written."""


class DataError(TidemillError):
    """A data file or row cannot be used."""


class ModelError(TidemillError):
    """A model folder cannot be used."""


class CheckpointError(TidemillError):
    """A checkpoint cannot be written or read."""


class RewardError(TidemillError):
    """A reward function failed in a way that ends the run."""


class PlayError(TidemillError):
    """An environment failed in a way that ends the run."""


class DockError(TidemillError):
    """The sample flow was used in a way it does not allow."""


class ReshardError(TidemillError):
    """Weights cannot be moved as asked, or did not arrive whole."""


class CollectiveError(TidemillError):
    """A collective failed or was not joined by all ranks in time."""


class InterpreterError(TidemillError):
    """A part of the run in another Python interpreter has died."""


class MissingExtra(TidemillError):
    """A feature needs a package that is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        message = f"{what} needs the package {package!r}, which is not installed"
        super().__init__(message, f"pip install 'tidemill[{extra}]'")


def nearest(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return the names most like this one: the best, and others only if they are nearly as good."""
    likeness = {word: difflib.SequenceMatcher(None, name.lower(), word.lower()).ratio() for word in known}
    best = sorted(likeness, key=lambda word: likeness[word], reverse=True)[:n]
    return [word for word in best if likeness[word] >= max(0.5, likeness[best[0]] - 0.15)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean X or Y?' or nothing."""
    close = nearest(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def either(values: Sequence[object]) -> str:
    """`1, 2 or 4`; of many the first and the last."""
    words = [str(v) for v in values] or ["1"]
    if len(words) > 8:
        words = [*words[:4], "…", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def human(size: float) -> str:
    """Bytes for people: 512 B, 34 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
