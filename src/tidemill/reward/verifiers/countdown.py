"""The reward of the countdown task: an expression that reaches the target with the given numbers, each used once."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from tidemill.reward.api import Sample
from tidemill.reward.verifiers.answers import final_answer

LONGEST = 200  # characters; a longer expression is no answer
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(sample: Sample, final: str = "last_line") -> bool:
    """The final answer, up to an equals sign, uses exactly the row's `numbers` and equals its `target`."""
    text = final_answer(sample.response, final).split("=")[0].strip()
    if not text or len(text) > LONGEST:
        return False
    try:
        used: list[int] = []
        value = evaluate(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == int(sample.meta["target"]) and Counter(used) == Counter(map(int, sample.meta["numbers"]))


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Exact arithmetic; anything but numbers and + − × ÷ is refused. The numbers met are added to `used`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, used), evaluate(node.right, used)
        return OPERATORS[type(node.op)](left, right)
    raise ValueError("not an expression of numbers")
