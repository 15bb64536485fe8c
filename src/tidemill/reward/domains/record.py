"""The reward of records: a JSON object that fits the row's schema and says what the row's answer says."""

from __future__ import annotations

import json
from typing import Any

from tidemill.reward.api import Reward, Sample
from tidemill.reward.verifiers.text import fits

PARTIAL = 0.5  # the most that an answer with a wrong field is worth
LONGEST = 4_000  # characters; a longer response is no record


def record(sample: Sample) -> Reward:
    """1 when the response is one JSON object that fits `schema` and equals the answer field by field. Else 0.1 for
    JSON, 0.1 more where it fits, and 0.3 for the share of right fields."""
    known: dict[str, Any] = json.loads(sample.answer)
    try:
        given = json.loads(sample.response[:LONGEST])
    except (json.JSONDecodeError, RecursionError):
        return Reward(0.0, {"json": 0.0, "fits": 0.0, "fields": 0.0}, False)
    is_object = isinstance(given, dict)
    right = sum(same(given.get(name), value) for name, value in known.items()) if is_object else 0
    parts = {"json": 1.0, "fits": float(fits(given, sample.meta["schema"])), "fields": right / len(known)}
    is_right = parts["fits"] == parts["fields"] == 1.0 and set(given) == set(known)
    value = 0.1 + 0.1 * parts["fits"] + 0.3 * parts["fields"]
    return Reward(1.0 if is_right else min(PARTIAL, value), parts, is_right)


def same(given: Any, known: Any) -> bool:
    """Whether two values are equal, true not being 1; of texts, case and spaces around do not count."""
    if isinstance(given, str) and isinstance(known, str):
        return given.strip().casefold() == known.strip().casefold()
    return type(given) is type(known) and bool(given == known)
