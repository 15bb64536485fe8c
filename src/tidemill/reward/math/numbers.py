r"""Numbers as answers write them, read exactly: `1,234.5`, `50\%`, `\frac{3}{4}`, `2\frac{1}{2}`, `3\times10^{4}`.

Two of them are the same by math-verify's rules: whole numbers as they stand, whether or not one is a percentage (12 %
answers 12); others by value (12.5 % is 0.125). Decimals that nearly agree are left open, because its algebra rounds.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

SMALL = r"\d{1,15}"
INTEGER = re.compile(rf"[-+]?{SMALL}|-?[1-9]\d{{0,2}}(?:,\d{{3}}){{1,4}}")
DECIMAL = re.compile(r"[-+]?(?=[\d.,]{2,20}$)(?:\d*|[1-9]\d{0,2}(?:,\d{3})+)\.\d+")
FRACTION = re.compile(rf"(-?)({SMALL})?\\frac\{{(-?{SMALL})\}}\{{(-?{SMALL})\}}|([-+]?{SMALL})/({SMALL})")
SCIENTIFIC = re.compile(r"([-+]?\d{1,12}(?:\.\d{1,12})?)(?:\\times|\\cdot|\*)10\^(?:\{(-?\d{1,2})\}|(\d))")
PERCENT = re.compile(r"\\?%$")
NEAR = Fraction(1, 100_000)  # decimals closer than this are rounded by the algebra's own rules


class Number(NamedTuple):
    """`written`: the value as it stands, a percentage not divided."""

    written: Fraction
    is_whole: bool
    is_decimal: bool = False
    is_percent: bool = False

    @property
    def value(self) -> Fraction:
        return self.written / 100 if self.is_percent else self.written


def read(text: str) -> Number | None:
    """A number and nothing else, spaces and currency signs already gone."""
    bare = PERCENT.sub("", text)
    is_percent = bare != text
    if INTEGER.fullmatch(bare):
        return Number(Fraction(int(bare.replace(",", ""))), True, False, is_percent)
    if DECIMAL.fullmatch(bare):
        return Number(Fraction(bare.replace(",", "")), False, True, is_percent)
    found = FRACTION.fullmatch(bare)
    if found is not None:
        value = fraction(found)
        return None if value is None else Number(value, False, False, is_percent)
    found = SCIENTIFIC.fullmatch(bare)
    if found is not None:
        return Number(Fraction(found[1]) * Fraction(10) ** int(found[2] or found[3]), False, True, is_percent)
    return None


def fraction(found: re.Match[str]) -> Fraction | None:
    r"""`-\frac{1}{2}`, `2\frac{1}{2}` (two and a half), `1/2`."""
    over, under = int(found[3] or found[5]), int(found[4] or found[6])
    if under == 0 or (found[2] and (over < 0 or under < 0)):
        return None
    return (-1 if found[1] else 1) * (int(found[2] or 0) + Fraction(over, under))


def same(x: Number, y: Number) -> bool | None:
    if x.value == y.value or (x.is_whole and y.is_whole and x.written == y.written):
        return True
    return None if (x.is_decimal or y.is_decimal) and abs(x.value - y.value) < NEAR else False


LIST = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
THOUSANDS = re.compile(r"\d,\d{3}(?!\d)")


def same_list(a: str, b: str) -> bool | None:
    """Intervals, points and sets of plain numbers; None where there is more to them."""
    one, other = LIST.fullmatch(a), LIST.fullmatch(b)
    if one is None or other is None or THOUSANDS.search(a) or THOUSANDS.search(b):
        return None
    x, y = [[read(part) for part in found[2].split(",")] for found in (one, other)]
    if (one[1], one[3]) != (other[1], other[3]) or None in x or None in y or min(len(x), len(y)) < 2:
        return None
    left, right = [n for n in x if n], [n for n in y if n]
    if any(n.is_percent or n.is_decimal for n in (*left, *right)):
        return None
    values = [n.value for n in left], [n.value for n in right]
    if one[1] == "\\{":
        return set(values[0]) == set(values[1])
    if any(v[0] >= v[1] for v in values):  # as an interval it would be empty
        return None
    return values[0] == values[1]
