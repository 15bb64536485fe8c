"""Calls written as in Python, `add(a=1, b=[2, 3])`, read without running anything."""

from __future__ import annotations

import ast
from typing import Any

from tidemill.chat.answer import ToolCall

LONGEST = 100_000  # characters; a parse tree takes many times the text's memory


def calls_in(text: str) -> list[ToolCall]:
    """The calls that a text consists of, one or a list of them; [] where it is anything else."""
    if len(text) > LONGEST:
        return []
    try:
        body = ast.parse(text.strip(), mode="exec").body
        return [_call(node) for statement in body for node in _nodes(statement)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _nodes(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError
    value = statement.value
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print" and value.args:
        value = value.args[0]  # Gemma was taught to print what a call gives
    return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError
    parts, function = list[str](), node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise ValueError
    given: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        given[keyword.arg] = ast.literal_eval(keyword.value)
    if node.args:  # without names there is nothing to tell them by but their order
        given |= {f"arg{i}": ast.literal_eval(value) for i, value in enumerate(node.args)}
    return ToolCall(".".join([function.id, *reversed(parts)]), given)
