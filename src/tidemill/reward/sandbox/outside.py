"""The part of a test that is evaluated outside the sandbox: arithmetic, comparisons and Python's own pure functions.

The evaluator walks an expression. What belongs to the program (a call of a name that is not Python's own, and whatever
hangs on it) it asks for as source text; everything else it computes here. Where the values are not known yet, every
branch is walked, so that all that will be needed is asked for.
"""

from __future__ import annotations

import ast
import collections
import decimal
import fractions
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

UNKNOWN = object()  # a value that the sandbox has not given yet
MOST_ROUNDS = 10_000  # of one loop or comprehension
MOST_BITS = 1_000_000  # of a power or a shift, and elements of a repeated sequence


class NotSplit(Exception):
    """The test cannot be evaluated in two places; it has to run beside the program."""


def power(base: Any, exponent: Any, *modulus: Any) -> Any:
    if not modulus and isinstance(base, int | fractions.Fraction) and isinstance(exponent, int):
        size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
        if size * abs(exponent) > MOST_BITS:
            raise OverflowError
    return pow(base, exponent, *modulus)


def times(a: Any, b: Any) -> Any:
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Sequence) and isinstance(other, int) and len(one) * other > MOST_BITS:
            raise OverflowError
    return a * b


def shifted(a: Any, b: Any) -> Any:
    if isinstance(b, int) and b > MOST_BITS:
        raise OverflowError
    return a << b


def remainder(a: Any, b: Any) -> Any:
    if isinstance(a, str | bytes):  # a format, which can ask for any width
        raise TypeError
    return a % b


def small(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions whose result grows with their arguments' values."""

    def guarded(*arguments: int) -> Any:
        if any(abs(a) > MOST_ROUNDS for a in arguments):
            raise OverflowError
        return function(*arguments)

    return guarded


BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: times,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: remainder,
    ast.Pow: power,
    ast.LShift: shifted,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
PLAIN: tuple[Any, ...] = (
    *(abs, all, any, ascii, bin, bool, bytearray, bytes, chr, complex, dict, divmod, enumerate, float, frozenset, hex),
    *(int, isinstance, len, list, max, min, oct, ord, range, repr, reversed, round, set, slice, sorted, str, sum),
    *(tuple, type, zip),
)
FUNCTIONS: dict[str, Any] = {function.__name__: function for function in PLAIN} | {"pow": power}
FUNCTIONS |= {"Fraction": fractions.Fraction, "Decimal": decimal.Decimal, "Counter": collections.Counter}
FUNCTIONS |= {"OrderedDict": collections.OrderedDict, "deque": collections.deque}
GROWING = {name: small(getattr(math, name)) for name in ("factorial", "comb", "perm")}
ARRAYS = ("abs", "all", "allclose", "any", "array", "array_equal", "asarray", "isclose", "isnan")
METHODS = {
    *("all", "any", "capitalize", "casefold", "conjugate", "copy", "count", "denominator", "difference", "endswith"),
    *("get", "imag", "index", "intersection", "isdigit", "islower", "issubset", "issuperset", "isupper", "item"),
    *("items", "join", "keys", "lower", "lstrip", "most_common", "numerator", "real", "replace", "rstrip", "split"),
    *("splitlines", "startswith", "strip", "title", "tolist", "union", "upper", "values"),
}


def module_member(module: str, name: str) -> Any:
    """A pure function or constant of a known module; NotSplit for another."""
    if module == "math":
        return GROWING[name] if name in GROWING else vars(math).get(name, UNKNOWN)
    if module in ("np", "numpy") and name in ARRAYS:
        import numpy

        return getattr(numpy, name)
    if module in ("fractions", "decimal", "collections") and name in FUNCTIONS:
        return FUNCTIONS[name]
    return UNKNOWN


class Evaluator:
    """`names`: values known outside. `ask`: gives the value of a source text from the sandbox, or UNKNOWN.
    `own`: functions of Python's that the program is to provide itself (a task may be to write `max`)."""

    def __init__(self, names: Mapping[str, Any], ask: Callable[[str], Any], own: frozenset[str] = frozenset()) -> None:
        self.names, self.ask, self.own = dict(names), ask, own

    def value(self, node: ast.expr) -> Any:
        if self.is_programs(node):
            return self.ask(ast.unparse(substituted(node, self.names)))
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.names[name] if name in self.names else FUNCTIONS[name]
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
                return self.apply(lambda *values: kind(values), *map(self.value, elements))
            case ast.Dict(keys=keys, values=values) if all(keys):
                found = [self.value(part) for part in (*keys, *values) if part is not None]
                return self.apply(lambda *parts: dict(zip(parts[: len(keys)], parts[len(keys) :])), *found)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return self.apply(BINARY[type(op)], self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=operand):
                return self.apply(UNARY[type(op)], self.value(operand))
            case ast.BoolOp():
                return self.either_or_both(node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self.value(part) for part in (left, *others)]
                return self.apply(partial(compared, [COMPARE[type(op)] for op in ops]), *values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.chosen(self.value(test), body, orelse)
            case ast.Subscript(value=value, slice=index):
                return self.apply(operator.getitem, self.value(value), self.value(index))
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = [None if part is None else self.value(part) for part in (lower, upper, step)]
                return self.apply(slice, *parts)
            case ast.Attribute() | ast.Call():
                return self.called(node)
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element) | ast.SetComp(elt=element):
                found = [inner.value(element) for inner in self.rounds(node.generators)]
                return self.apply(lambda *values: (set if isinstance(node, ast.SetComp) else list)(values), *found)
        raise NotSplit

    def is_programs(self, node: ast.expr) -> bool:
        """Whether it is the program's to compute: a name that is not Python's own, and what is made of such alone."""
        match node:
            case ast.Name(id=name):
                return name in self.own or not (name in self.names or name in FUNCTIONS)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module not in self.names:
                return module not in FUNCTIONS and module_member(module, name) is UNKNOWN
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Call(func=value):
                return self.is_programs(value)
            case ast.BinOp(left=left, right=right):
                return self.is_programs(left) and self.is_programs(right)
            case ast.Compare(left=left, comparators=others):
                return all(map(self.is_programs, (left, *others)))
        return False

    def apply(self, function: Callable[..., Any], *values: Any) -> Any:
        return UNKNOWN if any(value is UNKNOWN for value in values) else function(*values)

    def called(self, node: ast.Attribute | ast.Call) -> Any:
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id not in self.names:
                return module_member(node.value.id, node.attr)
            if node.attr not in METHODS:
                raise NotSplit
            return self.apply(lambda value: getattr(value, node.attr), self.value(node.value))
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords):
            raise NotSplit
        function = self.value(node.func)
        arguments = [self.value(arg) for arg in node.args]
        named = [self.value(keyword.value) for keyword in node.keywords]
        words = [str(keyword.arg) for keyword in node.keywords]
        count = len(arguments)
        return self.apply(lambda f, *a: f(*a[:count], **dict(zip(words, a[count:]))), function, *arguments, *named)

    def either_or_both(self, node: ast.BoolOp) -> Any:
        """In order; behind a value that is not known yet all are walked, behind one that decides none."""
        is_open, found = False, None
        for part in node.values:
            found = self.value(part)
            if found is UNKNOWN:
                is_open = True
            elif not is_open and bool(found) is isinstance(node.op, ast.Or):
                return found
        return UNKNOWN if is_open else found

    def chosen(self, test: Any, body: ast.expr, orelse: ast.expr) -> Any:
        if test is not UNKNOWN:
            return self.value(body if test else orelse)
        self.value(body)
        self.value(orelse)
        return UNKNOWN

    def rounds(self, generators: Sequence[ast.comprehension]) -> Iterator[Evaluator]:
        """An evaluator for each round of a comprehension, its variables bound."""
        if not generators:
            yield self
            return
        first, *others = generators
        over = self.value(first.iter)
        for value in [UNKNOWN] if over is UNKNOWN else islice(over, MOST_ROUNDS):
            inner = Evaluator(bound(first.target, value, self.names), self.ask, self.own)
            tests = [inner.value(test) for test in first.ifs]
            if all(test is UNKNOWN or test for test in tests):
                yield from inner.rounds(others)


def compared(functions: Sequence[Callable[[Any, Any], Any]], *values: Any) -> Any:
    """`a < b <= c`."""
    found: Any = True
    for function, left, right in zip(functions, values, values[1:]):
        found = function(left, right)
        if len(functions) > 1 and not found:
            return False
    return found


def bound(target: ast.expr, value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The names with a loop's variables among them."""
    if isinstance(target, ast.Name):
        return {**names, target.id: value}
    if not isinstance(target, ast.Tuple | ast.List):
        raise NotSplit
    parts = [UNKNOWN] * len(target.elts) if value is UNKNOWN else list(value)
    found = dict(names)
    for inner, part in zip(target.elts, parts, strict=True):
        found = bound(inner, part, found)
    return found


def known(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression in which the program has no part."""

    def ask(source: str) -> Any:
        raise NotSplit

    return Evaluator(names, ask).value(node)


def substituted(node: Any, names: Mapping[str, Any]) -> Any:
    """The node with values known outside written out; NotSplit for one that cannot be written as a literal."""

    class Write(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            if name.id not in names:
                return name
            if not isinstance(name.ctx, ast.Load) or names[name.id] is UNKNOWN:
                raise NotSplit
            text = repr(names[name.id])
            try:
                ast.literal_eval(text)
            except (ValueError, SyntaxError):
                raise NotSplit from None
            return ast.parse(text, mode="eval").body

    return Write().visit(ast.parse(ast.unparse(node)) if names else node)
