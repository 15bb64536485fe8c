r"""The reward `math`: whether two mathematical answers mean the same, by the verdict of the math-verify library.

Most answers are the same text, numbers, fractions or plainly different values, and are decided here in microseconds,
as the library would. Only the rest goes to its computer algebra, which takes tens of milliseconds and can be led to
compute for ever; towers of powers never get there, and what still hangs is stopped by the worker's time-out.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tidemill.errors import MissingExtra
from tidemill.reward import expressions
from tidemill.reward.answers import last_boxed
from tidemill.reward.api import Sample

LONGEST = 1000  # characters of an answer; a longer one is compared as text only
TAIL = 300  # characters at the end of a response without a marked answer, where the algebra looks for one
PARSE_S = 1  # math-verify's own limit, where its signal can interrupt

# a^b^c, a^{b^{c}}, 9**9**9, or an exponent of four digits and more: numbers that nobody can write out.
TOWER = re.compile(
    r"(?:\^|\*\*)\s*[\{\(]*\s*-?[\d.]+\s*(?:\^|\*\*|!)|(?:\^|\*\*)\s*[\{\(]*\s*-?\d{4,}|\d{4,}\s*!|!\s*\)*\s*!"
)
# Sizes of brackets, marks of mathematics, and spaces; but not between digits, where a space may be a product.
DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\$|\\[()\[\]]|(?<!\d)(?:\\[!,; ]|\s)+|(?:\\[!,; ]|\s)+(?!\d)"
)
UNIT = re.compile(r"(?<=\d)(?:\\(?:text|mathrm|mbox)\{[ a-zA-Z]*\}|\^?\\circ|°)$")
SMALL = r"[-+]?\d{1,15}"
INTEGER = re.compile(rf"{SMALL}|-?[1-9]\d{{0,2}}(?:,\d{{3}}){{1,4}}")
DECIMAL = re.compile(r"[-+]?(?=[\d.]{2,15}$)\d*\.\d+")
FRACTION = re.compile(rf"(-?)\\frac\{{({SMALL})\}}\{{({SMALL})\}}|({SMALL})/(\d{{1,15}})")
NEAR = Fraction(1, 100_000)  # decimals closer than this are rounded by the algebra's own rules


def math(sample: Sample) -> bool:
    r"""The answer in the last \boxed{}, after the last ####, or at the end of the response equals the known answer."""
    gold = marked_answer(sample.answer) or sample.answer
    given = marked_answer(sample.response)
    if given is None:
        given = sample.response.strip()
        if len(given) > LONGEST:
            given = given[-TAIL:]
    return same(given, gold)


def marked_answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2].strip() if "####" in text else None


def same(given: str, gold: str) -> bool:
    found = at_once(given, gold)
    return by_algebra(given, gold) if found is None else found


def at_once(given: str, gold: str) -> bool | None:
    """The verdict where no algebra is needed for it; it takes time linear in the texts."""
    a, b = plain(given), plain(gold)
    if not a or not b:
        return False
    if a == b:
        return True
    if max(len(given), len(gold)) > LONGEST or TOWER.search(given) or TOWER.search(gold):
        return False
    if ("=" in a) != ("=" in b):
        a, b = assigned(a), assigned(b)
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return same_number(x, y)
    return False if expressions.differ(a, b) else None


def plain(text: str) -> str:
    """The answer without what does not change its meaning: spaces, dollar signs, sizes of brackets, a number's unit."""
    text = DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return UNIT.sub("", text)


def assigned(text: str) -> str:
    """`x=5` is `5`, where the other answer names no variable."""
    name, equals, value = text.partition("=")
    return value if equals and len(name) == 1 and name.isalpha() else text


def number(text: str) -> tuple[Fraction, bool] | None:
    """A plain number exactly, and whether it is a decimal."""
    if INTEGER.fullmatch(text):
        return Fraction(int(text.replace(",", ""))), False
    if DECIMAL.fullmatch(text):
        return Fraction(text), True
    found = FRACTION.fullmatch(text)
    if found is None:
        return None
    sign, over, under = -1 if found[1] else 1, int(found[2] or found[4]), int(found[3] or found[5])
    return (Fraction(sign * over, under), False) if under else None


def same_number(x: tuple[Fraction, bool], y: tuple[Fraction, bool]) -> bool | None:
    """Decimals that nearly agree are a matter of rounding: None, for the algebra has rules of its own for that."""
    if x[0] == y[0]:
        return True
    has_decimal = x[1] or y[1]
    return None if has_decimal and abs(x[0] - y[0]) < NEAR else False


@lru_cache(maxsize=4096)
def by_algebra(given: str, gold: str) -> bool:
    """Kept, for the samples of one prompt often come to the same answer."""
    _, _, verify = library()
    return bool(verify(parsed(gold), parsed_response(given), timeout_seconds=PARSE_S))


@lru_cache(maxsize=4096)
def parsed(gold: str) -> Any:
    """Many responses are compared with one known answer."""
    return parsed_response(gold)


def parsed_response(text: str) -> Any:
    parse, configs, _ = library()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    return parse(marked, extraction_config=configs, parsing_timeout=PARSE_S)


@lru_cache(maxsize=1)
def library() -> tuple[Any, Any, Any]:
    try:
        import math_verify
    except ImportError:
        raise MissingExtra("the reward math", "math-verify", "rewards") from None
    configs = (math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig())
    return math_verify.parse, configs, math_verify.verify


def warm_up() -> None:
    """Loads the algebra before any sample's clock runs."""
    by_algebra("\\frac{1}{2}x", "x/2")
