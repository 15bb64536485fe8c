"""Values on their way out of the sandbox: encoded beside the program as lists of plain data, decoded outside.

What comes out is made of Python's own types alone, so a number that calls itself equal to everything is its number.
Numpy's scalars and arrays, fractions, decimals, iterators and views of dicts come out as what they compare as.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

MOST = 10_000  # elements taken from an iterator
LARGEST_EXPONENT = 400  # of a decimal: arithmetic with larger ones takes time without end


class NotPlain(Exception):
    """The value is an object of the program's own making."""


def encoded(value: Any) -> list[Any]:
    """Read by the types' own methods, whatever a subclass says. NotPlain for any other object."""
    if value is None or value is True or value is False:
        return ["constant", value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # before float, which np.float64 is too
        return ["numpy", [str(value.dtype.str), encoded(value.tolist())]]
    for kind, tag, read in READERS:
        if isinstance(value, kind):
            return [tag, read(value)]
    if hasattr(type(value), "__next__"):
        return ["iterator", each(islice(value, MOST))]
    raise NotPlain


def each(values: Any) -> list[Any]:
    return [encoded(value) for value in values]


READERS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (int, "int", lambda v: int.__repr__(int.__add__(v, 0))),
    (float, "float", lambda v: float.__repr__(v)),
    (complex, "complex", lambda v: complex.__repr__(v)),
    (str, "str", lambda v: str.__add__(v, "")),
    ((bytes, bytearray, memoryview), "bytes", lambda v: list(memoryview(v).cast("B"))),
    (list, "list", lambda v: each(list.__iter__(v))),
    (tuple, "tuple", lambda v: each(tuple.__iter__(v))),
    (set, "set", lambda v: each(set.__iter__(v))),
    (frozenset, "set", lambda v: each(frozenset.__iter__(v))),
    (dict, "dict", lambda v: [[encoded(k), encoded(x)] for k, x in dict.items(v)]),
    (range, "range", lambda v: [repr(x) for x in (v.start, v.stop, v.step)]),
    ((type({}.keys()), type({}.items())), "set", each),
    (Fraction, "fraction", lambda v: [repr(int(v.numerator)), repr(int(v.denominator))]),
    (Decimal, "decimal", Decimal.__str__),
    (deque, "deque", lambda v: each(deque.__iter__(v))),
)


def decoded(tree: Any) -> Any:
    """The value; ValueError or TypeError for what `encoded` does not make."""
    tag, data = tree
    return MAKERS[tag](data)


def decoded_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if value.is_finite() and abs(value.adjusted()) > LARGEST_EXPONENT:
        raise ValueError("the exponent is too large")
    return value


def decoded_array(data: Any) -> Any:
    """A scalar or an array of numbers, with numpy's own rules of comparison."""
    import numpy

    kind = numpy.dtype(data[0])
    if kind.kind not in "biufcU":
        raise ValueError("not an array of numbers")
    return numpy.array(decoded(data[1]), dtype=kind)[()]


MAKERS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda d: {None: None, True: True, False: False}[d],
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bytes": bytes,
    "list": lambda d: [decoded(x) for x in d],
    "tuple": lambda d: tuple(decoded(x) for x in d),
    "set": lambda d: {decoded(x) for x in d},
    "dict": lambda d: {decoded(k): decoded(x) for k, x in d},
    "range": lambda d: range(*map(int, d)),
    "iterator": lambda d: iter([decoded(x) for x in d]),
    "deque": lambda d: deque(decoded(x) for x in d),
    "fraction": lambda d: Fraction(*map(int, d)),
    "decimal": decoded_decimal,
    "numpy": decoded_array,
}
