"""Tools: the model writes a call, stops at its end, and reads the result; what it says without a call is its answer.

A call stands between `opening` and `closing`: JSON with `name` and `arguments` or, where there is one tool only, the
text it is given. A tool is a plain function of strings and numbers; what it raises is told to the model.
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tidemill.environment.api import Task, Turn
from tidemill.errors import ConfigError, did_you_mean
from tidemill.imports import is_import_path, load

Tool = Callable[..., Any]
LONGEST_RESULT = 2000  # characters of a tool's result that the model reads


class Tools:
    """`environment: {name: tools, args: {functions: [calculator, my_tools.py:search]}}`."""

    def __init__(
        self,
        task: Task,
        functions: Sequence[str] = ("calculator",),
        opening: str = "<tool_call>",
        closing: str = "</tool_call>",
        inline: bool = False,
        result: str = "<tool_response>{}</tool_response>",
        cost: float = 0.0,
    ) -> None:
        self.tools = {name.rpartition(":")[2]: find(name) for name in functions}
        self.prompt, self.opening, self.closing, self.inline, self.result = (
            task.prompt,
            opening,
            closing,
            inline,
            result,
        )
        self.cost = cost
        self.stop = (closing,)

    def reset(self) -> str:
        return self.prompt

    def step(self, text: str) -> Turn:
        call = self._call(text)
        if call is None:
            return Turn(is_done=True)
        try:
            said, failed = str(self._use(call)), 0.0
        except Exception as error:  # a tool is foreign code, and its failure is for the model to mend
            said, failed = f"error: {error}", 1.0
        told = self.result.format(said[:LONGEST_RESULT])
        return Turn(told, reward=-self.cost, is_inline=self.inline, parts={"calls": 1.0, "failed_calls": failed})

    def _call(self, text: str) -> str | None:
        """What stands in the call that the text ends with."""
        if not text.endswith(self.closing):
            return None
        _, opened, inside = text.removesuffix(self.closing).rpartition(self.opening)
        return inside if opened or not self.opening else None

    def _use(self, call: str) -> Any:
        try:
            asked = json.loads(call)
        except json.JSONDecodeError:
            asked = None
        if isinstance(asked, dict) and "name" in asked:
            name, arguments = str(asked["name"]), asked.get("arguments") or {}
            if name not in self.tools:
                raise ValueError(f"there is no tool {name!r}{did_you_mean(name, self.tools)}")
            return self.tools[name](**arguments) if isinstance(arguments, Mapping) else self.tools[name](arguments)
        if len(self.tools) == 1:
            return next(iter(self.tools.values()))(call)
        raise ValueError('a call is JSON: {"name": …, "arguments": {…}}')


def find(name: str) -> Tool:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_import_path(name):
        tool: Tool = load(name, ConfigError, "environment.args.functions")
        if not callable(tool) or not inspect.signature(tool).parameters:
            raise ConfigError(f"environment.args.functions: {name!r} is no function that takes an argument")
        return tool
    raise ConfigError(
        f"environment.args.functions: there is no tool {name!r}{did_you_mean(name, BUILT_IN)}",
        f"there are {', '.join(BUILT_IN)}; your own is package.module:function",
    )


# The calculator

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
    """`(3+4)*12` → `84`. Exact arithmetic on whole and decimal numbers, bounded in size."""
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


BUILT_IN: dict[str, Tool] = {"calculator": calculator}
