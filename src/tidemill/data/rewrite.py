"""What recipes do to a row's text: cut the answer out of its column, and replace by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.data.source import Example
from tidemill.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tidemill.recipe.config import Data


def answer_pattern(data: Data) -> re.Pattern[str] | None:
    if data.answer_pattern is None:
        return None
    try:
        pattern = re.compile(data.answer_pattern)
    except re.error as error:
        raise ConfigError(
            f"data.answer_pattern is not a valid regular expression: {error}",
            r"write one with a group in parentheses, such as '####\s*(.+)'",
        ) from error
    if pattern.groups < 1:
        raise ConfigError(
            f"data.answer_pattern={data.answer_pattern} has no group", "put the answer's part in parentheses: '=(.+)'"
        )
    return pattern


REWRITTEN = ("prompt", "answer", "response")


def rewriter(data: Data) -> Callable[[Example], Example]:
    """Return a function that applies `data.rewrite` to an example's text columns."""
    if unknown := [column for column in data.rewrite if column not in REWRITTEN]:
        raise ConfigError(
            f"data.rewrite names the column {unknown[0]!r}{did_you_mean(unknown[0], REWRITTEN)}",
            f"it can rewrite {', '.join(REWRITTEN)}",
        )
    rules = {
        column: [(compiled("data.rewrite", pattern), new) for pattern, new in pairs]
        for column, pairs in data.rewrite.items()
    }

    def rewrite(example: Example) -> Example:
        changed: dict[str, str] = {}
        for column, pairs in rules.items():
            text = getattr(example, column)
            if isinstance(text, str):
                for pattern, new in pairs:
                    text = pattern.sub(new, text)
                changed[column] = text.strip()
        return replace(example, **changed) if changed else example  # type: ignore[arg-type]

    return rewrite


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{key}: {pattern!r} is not a valid regular expression: {error}", "see the Python manual, module re"
        ) from error
