r"""The value of a plain LaTeX expression in floating point: enough to say that two answers differ, not that they agree.

What it reads means one thing only: numbers, + - * / and \cdot, powers, \frac, \sqrt, \pi, brackets and single letters.
Anything else (words, functions, `2\frac{1}{3}`, `1/2x`) is left to the computer algebra.
"""

from __future__ import annotations

import math
import re

# Values without symmetry, for letters that are no unit: to the algebra `5m` is 5.
LETTERS = {"k": 1.3172, "n": 1.7113, "x": 2.2391, "y": 1.1453, "z": 1.9187}
DEEPEST = 12  # brackets inside brackets
LARGEST = 1e12  # a value beyond it is known too roughly to tell two apart
CLEARLY = 1e-5  # apart by more than this share of their size: more than any rounding of the algebra
TOKEN = re.compile(r"\d+(?:\.\d+)?|\\frac|\\sqrt|\\pi|\\cdot|\\times|[knxyz]|[-+*/^(){}]")
TIMES = ("*", "\\cdot", "\\times")


class Unreadable(Exception):
    """The expression is not of the plain kind."""


def differ(a: str, b: str) -> bool:
    """Whether both can be read, and have clearly different values at one point."""
    x, y = value(a), value(b)
    return x is not None and y is not None and abs(x - y) > CLEARLY * max(abs(x), abs(y), 1.0)


def value(text: str) -> float | None:
    """Spaces are gone already; None for what cannot be read or is too large."""
    try:
        found = Reader(tokens_of(text)).whole()
    except (Unreadable, ZeroDivisionError, OverflowError, ValueError):
        return None
    return found if abs(found) < LARGEST else None


def tokens_of(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise Unreadable
        tokens.append(found[0])
        at = found.end()
    return tokens


class Reader:
    """Recursive descent, one method per level of binding."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def whole(self) -> float:
        found = self.total()
        if self.at < len(self.tokens):
            raise Unreadable
        return found

    def total(self) -> float:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable
        sign = -1.0 if self.peek() == "-" else 1.0
        if self.peek() in ("-", "+"):
            self.at += 1
        found = sign * self.product()
        while self.peek() in ("+", "-"):
            sign = -1.0 if self.take() == "-" else 1.0
            found += sign * self.product()
        self.depth -= 1
        return found

    def product(self) -> float:
        found, is_divided = self.power(), False
        while True:
            token = self.peek()
            if token in TIMES or token == "/":
                self.at += 1
                is_divided = token == "/"
                found = found / self.power() if is_divided else found * self.power()
            elif self.follows_without_a_sign(token):
                if is_divided:  # 1/2x: readers disagree
                    raise Unreadable
                found *= self.power()
            else:
                return found

    def follows_without_a_sign(self, token: str) -> bool:
        """2x, 3\\pi, (a)(b); but 2\\frac{1}{3} is a mixed number, and x(y) may be a function."""
        before = self.tokens[self.at - 1]
        if token in LETTERS or token in ("\\pi", "\\sqrt"):
            return True
        if token == "(" and (before[0].isdigit() or before == ")"):
            return True
        if token == "(" or token == "\\frac" or token[:1].isdigit():
            raise Unreadable
        return False

    def power(self) -> float:
        is_simple = self.peek() != "\\frac"
        base = self.factor()
        if self.peek() != "^":
            return base
        self.at += 1
        exponent = self.braced() if self.peek() == "{" else self.digit()
        if not is_simple or self.peek() == "^" or abs(exponent) > 64 or (base < 0 and exponent % 1):
            raise Unreadable
        return float(base**exponent)

    def digit(self) -> float:
        """x^2: one digit; what stands behind it would not belong to the exponent."""
        token = self.take()
        if len(token) != 1 or not token.isdigit():
            raise Unreadable
        return float(token)

    def factor(self) -> float:
        token = self.take()
        if token[:1].isdigit():
            return float(token)
        if token in LETTERS:
            return LETTERS[token]
        match token:
            case "\\pi":
                return math.pi
            case "(":
                found = self.total()
                if self.take() != ")":
                    raise Unreadable
                return found
            case "\\frac":
                over = self.braced()
                return over / self.braced()
            case "\\sqrt":
                return math.sqrt(self.braced())
        raise Unreadable

    def braced(self) -> float:
        if self.take() != "{":
            raise Unreadable
        found = self.total()
        if self.take() != "}":
            raise Unreadable
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token
