"""Rewards for the shape of a response: patterns, JSON, tags, length, repetition."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tidemill.reward.api import Sample
from tidemill.reward.verifiers.answers import final_answer


def regex(sample: Sample, pattern: str, whole: bool = False) -> bool:
    """The response matches a regular expression somewhere, or as a whole. {answer} stands for the known answer."""
    found = compiled(pattern.replace("{answer}", re.escape(sample.answer)))
    return bool(found.fullmatch(sample.response.strip()) if whole else found.search(sample.response))


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def json_schema(sample: Sample, schema: dict[str, Any] | str | None = None, final: str = "all") -> bool:
    """The response (or its final answer) is JSON that fits a schema: given here, or in the row's column `schema`."""
    text = final_answer(sample.response, final)
    fenced = re.search(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (json.JSONDecodeError, RecursionError):
        return False
    return fits(value, schema if schema is not None else sample.meta.get("schema", {}))


def fits(value: Any, schema: dict[str, Any] | str) -> bool:
    """Whether a value fits a JSON schema, which may be text itself."""
    import jsonschema

    wanted = json.loads(schema) if isinstance(schema, str) else schema
    return bool(jsonschema.validators.validator_for(wanted)(wanted).is_valid(value))


def format(sample: Sample, tags: tuple[str, ...] | list[str] = ("think", "answer")) -> float:
    """The share of tags that stand exactly once, opened before closed, in the given order; 1 only if all do."""
    response, position, good = sample.response, 0, 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start, end = response.find(opening, position), response.find(closing, position)
        if start < 0 or end < start or response.count(opening) != 1 or response.count(closing) != 1:
            continue
        good += 1
        position = end + len(closing)
    return good / len(tags)


def length(sample: Sample, target: int, tolerance: int = 0, unit: str = "words") -> float:
    """1 within `tolerance` of the target length, then falling in a straight line to 0 at twice or no length."""
    if unit not in ("words", "characters"):
        raise ValueError(f"unit must be words or characters, got {unit!r}")
    size = len(sample.response.split()) if unit == "words" else len(sample.response)
    return max(0.0, 1.0 - max(0, abs(size - target) - tolerance) / target)


def stopped(sample: Sample) -> bool:
    """The response ended by itself and was not cut off at the longest length."""
    return sample.finish == "stop"


def repetition(sample: Sample, words: int = 4) -> float:
    """Minus the share of word sequences that occurred before in the response: 0 without any repetition."""
    split = sample.response.split()
    runs = [tuple(split[i : i + words]) for i in range(len(split) - words + 1)]
    return -(1.0 - len(set(runs)) / len(runs)) if runs else 0.0
