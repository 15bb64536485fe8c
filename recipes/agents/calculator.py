"""What the agents of this folder share: the calculator, and what an answer is worth. No framework is needed here."""

from __future__ import annotations

import ast
import operator
import re

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
STOP = ["</tool_call>"]  # a plain model writes its calls as text, and goes on unless it is stopped


def calculate(expression: str) -> str:
    """Work out a sum, a difference or a product of two whole numbers."""
    if len(expression) > 40:
        raise ValueError("the expression is too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError("this is no expression") from None
    if not (isinstance(tree, ast.BinOp) and type(tree.op) in OPERATORS):
        raise ValueError("only sums, differences and products of two numbers are known")
    if not (isinstance(tree.left, ast.Constant) and isinstance(tree.right, ast.Constant)):
        raise ValueError("only whole numbers are known")
    if not (isinstance(tree.left.value, int) and isinstance(tree.right.value, int)):
        raise ValueError("only whole numbers are known")
    return str(OPERATORS[type(tree.op)](tree.left.value, tree.right.value))


def outcome(task: dict, said: str | None, calls: int) -> dict:
    """The last number counts."""
    numbers = re.findall(r"\d+", said or "")
    is_right = bool(numbers) and numbers[-1] == task["answer"]
    return {"reward": float(is_right), "solved": is_right, "parts": {"calculations": calls}}
