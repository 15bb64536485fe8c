"""The reward of domain finance: `610/4820 % FY2023` is right in value, unit and period, and made of known figures."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from tidemill.reward.api import Reward, Sample
from tidemill.reward.verifiers.countdown import evaluate

UNIT = "%|times|[A-Z]{3} (?:thousand|million)"
ANSWER = re.compile(rf"(?P<formula>[-+*/(). \d]+?)\s*(?P<unit>{UNIT})\s+(?P<period>FY\d{{4}})")
LONGEST = 120  # characters looked at
CONSTANTS = frozenset({1, 100, 1000})  # of scales and growth; all other numbers must be the statement's
TOLERANCE = 1e-6
PARTIAL = 0.1  # for each part of an answer that is not right as a whole


def finance(sample: Sample) -> Reward:
    """1 for the right formula, unit and period; a tenth for each that is right alone. A figure that is not in the
    statement makes the formula wrong, whatever its value."""
    lines = sample.response.strip()[:LONGEST].splitlines()
    found = ANSWER.fullmatch(lines[0].strip()) if lines else None
    if found is None:
        return Reward(0.0, {"form": 0.0, "formula": 0.0, "unit": 0.0, "period": 0.0}, False)
    value, used = worth(found["formula"])
    is_grounded = used <= CONSTANTS | {int(figure) for figure in sample.meta["figures"]}
    is_worth = value is not None and near(float(value), float(sample.meta["value"]))
    parts = {
        "form": 1.0,
        "formula": float(is_worth and is_grounded),
        "unit": float(found["unit"] == sample.meta["unit"]),
        "period": float(found["period"] == sample.meta["period"]),
    }
    is_right = min(parts.values()) == 1.0
    return Reward(1.0 if is_right else PARTIAL * (sum(parts.values()) - 1.0), parts, is_right)


def near(value: float, known: float) -> bool:
    return abs(value - known) <= TOLERANCE * max(1.0, abs(known))


def worth(formula: str) -> tuple[Fraction | None, frozenset[int]]:
    """Return a formula's exact value and the numbers in it; no value for what is not a formula."""
    used: list[int] = []
    try:
        value = evaluate(ast.parse(formula.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None, frozenset()
    return value, frozenset(used)
