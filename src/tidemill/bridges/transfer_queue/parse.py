"""Runs a user's parser over fields on their way into the queue, and checks what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def parsed(data: Any, parser: Callable[[Any], Any] | None) -> Mapping[str, Any]:
    """Return the fields to store: those of `data`, or what the parser makes of them: the same fields and rows."""
    fields = {name: data.get(name) for name in data.keys()}  # noqa: SIM118 - a TensorDict iterates over rows
    if parser is None:
        return fields
    given = {name: _plain(value) for name, value in fields.items()}
    rows = {name: _rows(value) for name, value in given.items()}
    try:
        made = parser(given)
        _check(made, rows)
    except Exception as error:
        raise RuntimeError(f"the data_parser failed: {error}") from error
    return dict(made)


def _plain(value: Any) -> Any:
    """A tensor as it is, other values as a list of rows."""
    if not isinstance(value, torch.Tensor):
        return value.tolist()
    return list(value.unbind()) if value.is_nested else value


def _check(made: Any, rows: Mapping[str, int | None]) -> None:
    if not isinstance(made, dict):
        raise TypeError(f"it must return a dict, got {type(made).__name__}")
    if set(made) != set(rows):
        raise ValueError(f"it must return the fields that it was given, {sorted(rows)}, got {sorted(made)}")
    for name, value in made.items():
        before, after = rows[name], _rows(value)
        if None not in (before, after) and before != after:
            raise ValueError(f"it returned {after} rows of {name!r} instead of {before}")


def _rows(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple | list) and len(shape) > 0:
        return int(shape[0])
    try:
        return len(value)
    except TypeError:
        return None
