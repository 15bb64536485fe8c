"""Checks of a program, read so that what is wanted never enters the sandbox.

Of `assert f(2) == 4` only `f(2)` is evaluated beside the program; the value comes back as text and is compared here. A
program that looks through its process finds no answer to give, and an object that calls itself equal to everything is
no plain value. Other statements (`assert is_sorted(f(x))`) run beside the program, which could then cheat.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST = 2000  # characters of a value that comes back
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@dataclass(frozen=True, slots=True)
class Check:
    source: str  # an expression to evaluate, or a statement that must hold
    compare: Callable[[Any, Any], bool] | None = None  # None: a statement
    wanted: Any = None

    def plain(self) -> tuple[str, bool]:
        """What the sandbox gets: the source, and whether its value is asked for."""
        return self.source, self.compare is not None

    def is_met(self, answer: str | None) -> bool:
        if self.compare is None:
            return answer == "holds"
        try:
            return answer is not None and bool(self.compare(ast.literal_eval(answer), self.wanted))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return False


def read(text: str) -> Check:
    """`assert EXPRESSION op LITERAL`, either way round, is split; anything else stays whole."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Check(text)
    if len(body) != 1 or not isinstance(body[0], ast.Assert) or not isinstance(body[0].test, ast.Compare):
        return Check(text)
    test = body[0].test
    compare = COMPARE.get(type(test.ops[0]))
    if compare is None or len(test.ops) != 1:
        return Check(text)
    left, right = test.left, test.comparators[0]
    for given, wanted, is_turned in ((left, right, False), (right, left, True)):
        try:
            value = ast.literal_eval(wanted)
        except (ValueError, TypeError, RecursionError, MemoryError):
            continue
        if len(repr(value)) > LONGEST:
            break
        return Check(ast.unparse(given), _turned(compare) if is_turned else compare, value)
    return Check(text)


def _turned(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda given, wanted: compare(wanted, given)
