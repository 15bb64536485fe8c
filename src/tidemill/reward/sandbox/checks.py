"""Checks of a program, split so that only the program's own calls are evaluated beside it.

Of `assert abs(f(2) - 4.0) < 1e-6` the sandbox gets `f(2)`. Its value comes back as plain data; `abs`, the subtraction,
the comparison and the wanted 4.0 stay outside. A program that looks through its process finds no answer to give, one
that changes `abs` changes nothing, and an object that calls itself equal to everything is no plain value.

Set-up lines (`s = Stack()`) run beside the program. A test that cannot be split (`try`, `with`) runs there as a whole,
and a program could cheat it.
"""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.reward.sandbox.outside import FUNCTIONS, UNKNOWN, Evaluator, NotSplit, bound, known, substituted
from tidemill.reward.sandbox.values import decoded

MOST_STEPS = 2000  # of one test, loops unrolled
FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, NotSplit, RecursionError, TypeError, ValueError)
FIXED = (int, float, complex, str, bytes, bool, type(None))


@dataclass(frozen=True, slots=True)
class Step:
    """What the sandbox gets: a statement to run, or an expression that an assert asks the value of."""

    source: str
    asked_by: int | None = None


@dataclass(frozen=True, slots=True)
class Assertion:
    test: ast.expr
    names: Mapping[str, Any]
    own: frozenset[str]

    def holds(self, answers: Mapping[str, deque[Any]]) -> bool:
        """`answers`: by source, in the order asked for; None where the call raised or its value was not plain."""
        try:
            return bool(Evaluator(self.names, lambda s: decoded(answers[s].popleft()), self.own).value(self.test))
        except FAULTS:
            return False


@dataclass(frozen=True, slots=True)
class Check:
    steps: tuple[Step, ...]
    asserts: tuple[Assertion, ...] = ()

    def plain(self) -> list[tuple[str, bool]]:
        """For the sandbox: sources in order, and whether the value is asked for."""
        return [(step.source, step.asked_by is not None) for step in self.steps]

    def is_met(self, answers: Sequence[Any] | None) -> bool:
        """`answers`: per step True for a statement that ran, the encoded value, or None for what raised."""
        if answers is None or len(answers) != len(self.steps):
            return False
        given: list[defaultdict[str, deque[Any]]] = [defaultdict(deque) for _ in self.asserts]
        for step, answer in zip(self.steps, answers):
            if step.asked_by is not None:
                given[step.asked_by][step.source].append(answer)
            elif answer is not True:
                return False
        return all(assertion.holds(found) for assertion, found in zip(self.asserts, given))


def read(text: str) -> Check:
    """A test's statements in steps; what cannot be split stays one statement."""
    try:
        reading = Reading(ast.parse(text).body)
    except (SyntaxError, *FAULTS):
        return Check((Step(text),))
    return Check(tuple(reading.steps), tuple(reading.asserts)) if reading.asserts else Check((Step(text),))


class Reading:
    """One test on its way to steps and asserts."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.steps: list[Step] = []
        self.asserts: list[Assertion] = []
        self.functions: dict[str, ast.FunctionDef] = {}
        self.touched = touched_inside(body)
        self.visit(body, {})

    def visit(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> None:
        for statement in body:
            match statement:
                case ast.Assert(test=test):
                    self.add_assert(test, names)
                case ast.Pass() | ast.Expr(value=ast.Constant()):
                    continue
                case ast.FunctionDef(name=name, decorator_list=[]):
                    self.functions[name] = statement
                case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in self.functions:
                    self.call(self.functions[name], args, names)
                case ast.For(target=target, iter=iterable, body=inner, orelse=[]):
                    for value in known(iterable, names):
                        self.visit(inner, bound(target, value, names))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names = self.assign(name, value, names)
                case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Import() | ast.ImportFrom():
                    self.add(Step(ast.unparse(substituted(statement, names))))
                case _:
                    raise NotSplit

    def assign(self, name: str, value: ast.expr, names: dict[str, Any]) -> dict[str, Any]:
        """A value known here stays here, unseen; one that the program makes or may change lives beside it."""
        others = {k: v for k, v in names.items() if k != name}
        try:
            found = known(value, names)
            if isinstance(found, FIXED) or name not in self.touched:
                return {**others, name: found}
        except NotSplit:
            pass
        self.add(Step(f"{name} = {ast.unparse(substituted(value, names))}"))
        return others

    def call(self, function: ast.FunctionDef, args: list[ast.expr], names: dict[str, Any]) -> None:
        """A function of the test's own (`def check(candidate)`), called with the program's by name."""
        called = dict(zip([arg.arg for arg in function.args.args], args, strict=True))

        class Rename(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.expr:
                return called.get(name.id, name)

        if not all(isinstance(arg, ast.Name) for arg in args):
            raise NotSplit
        self.visit([Rename().visit(statement) for statement in function.body], names)

    def add_assert(self, test: ast.expr, names: dict[str, Any]) -> None:
        """With no call of the program's in it, the innermost of Python's own functions are the program's to provide."""
        for own in (frozenset[str](), innermost_functions(test)):
            sources: list[str] = []

            def ask(source: str, to: list[str] = sources) -> Any:
                to.append(source)
                return UNKNOWN

            Evaluator(names, ask, own).value(test)
            if sources:
                break
        for source in sources:
            self.add(Step(source, len(self.asserts)))
        self.asserts.append(Assertion(test, names, own))

    def add(self, step: Step) -> None:
        if len(self.steps) >= MOST_STEPS:
            raise NotSplit
        self.steps.append(step)


def innermost_functions(test: ast.expr) -> frozenset[str]:
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return frozenset(
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name) and not any(other is not call for other in ast.walk(call) if other in calls)
    )


def touched_inside(body: Sequence[ast.stmt]) -> set[str]:
    """Names that occur in the program's calls and in statements that run beside it, which may change their values."""
    found: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        is_call = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS)
        is_change = isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets)
        if is_call or is_change or isinstance(node, ast.AugAssign):
            found |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return found
