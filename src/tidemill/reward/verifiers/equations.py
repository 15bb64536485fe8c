"""The reward of written-out arithmetic: the share of a response's equations that hold (`48/2=24`)."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

from tidemill.reward.api import Sample
from tidemill.reward.verifiers.countdown import OPERATORS

EQUATION = re.compile(r"(?<![\w.])([-+*/(). \d]*\d[-+*/(). \d]*)=\s*(-?\d+(?:\.\d+)?)(?![\w])")
MOST = 64  # equations looked at
LONGEST = 80  # characters of one side
TOLERANCE = Fraction(1, 100)  # results are rounded by those who write them


def equations(sample: Sample) -> float:
    """The share of equations that hold to a hundredth; 0 where there are none. Of the same one written twice, the
    second does not hold: so nothing is gained by repeating what is easy."""
    found = EQUATION.findall(sample.response)[:MOST]
    seen: set[tuple[str, str]] = set()
    right = 0
    for left, result in found:
        is_new = (left, result) not in seen
        seen.add((left, result))
        right += is_new and holds(left, result)
    return right / len(found) if found else 0.0


def holds(left: str, result: str) -> bool:
    if len(left) > LONGEST or len(result) > LONGEST:
        return False
    try:
        value = worth(ast.parse(left.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value is not None and abs(value - Fraction(result)) <= TOLERANCE


def worth(node: ast.expr) -> Fraction | None:
    """Return the value of + − × ÷ over numbers; None where there is nothing to compute (`5=5`)."""
    return None if isinstance(node, ast.Constant) else number(node)


def number(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](number(left), number(right))
    raise ValueError("not arithmetic of numbers")
