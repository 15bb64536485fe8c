"""The tool `calculator`: exact arithmetic on whole and decimal numbers, bounded in size."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST_EXPRESSION, LARGEST_BITS, LARGEST_POWER = 200, 4096, 64


def calculator(expression: str) -> str:
    """Work out an expression of numbers with + - * / // % ** and brackets.

    Args:
        expression: such as (3+4)*12
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no expression of numbers") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(value.numerator) if value.denominator == 1 else repr(round(float(value), 10))


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return Fraction(OPERATORS[type(node.op)](_evaluate(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (right.denominator != 1 or abs(right) > LARGEST_POWER):
            raise ValueError(f"powers are whole numbers up to {LARGEST_POWER}")
        value = Fraction(OPERATORS[type(node.op)](left, right))
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
            raise ValueError("the number is too large")
        return value
    raise ValueError("only numbers and + - * / // % ** are known")
