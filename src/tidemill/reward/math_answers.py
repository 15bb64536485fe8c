r"""The reward `math`: whether two mathematical answers mean the same, by the math-verify library where it takes that.

Most answers are numbers, fractions or the same text, and are decided here in microseconds. Only the rest goes to the
computer algebra, which is slow and can be led to compute for ever; towers of powers never get there, and what still
hangs is stopped by the worker's time-out.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tidemill.errors import MissingExtra
from tidemill.reward.answers import as_decimal, last_boxed
from tidemill.reward.api import Sample

LONGEST = 1000  # characters of an answer; a longer one is compared as text only
TAIL = 300  # characters at the end of a response without a marked answer, where the algebra looks for one
PARSE_S = 1  # math-verify's own limit, where its signal can interrupt

FRACTION = re.compile(r"(-?)\\frac\{(-?\d{1,30})\}\{(-?\d{1,30})\}|(-?\d{1,30})/(\d{1,30})")
# a^b^c, a^{b^{c}}, 9**9**9, or an exponent of four digits and more: numbers that nobody can write out.
TOWER = re.compile(
    r"(?:\^|\*\*)\s*[\{\(]*\s*-?[\d.]+\s*(?:\^|\*\*|!)|(?:\^|\*\*)\s*[\{\(]*\s*-?\d{4,}|\d{4,}\s*!|!\s*\)*\s*!"
)
DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\displaystyle|\$|\\\(|\\\)|\\\[|\\\]|\s+")
UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}$|\^?\\circ$|°$|\\%$|%$")


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
    a, b = plain(given), plain(gold)
    if not b:
        return False
    if a == b:
        return True
    x, y = as_fraction(a), as_fraction(b)
    if x is not None and y is not None:
        return x == y
    if not a or max(len(a), len(b)) > LONGEST or TOWER.search(given) or TOWER.search(gold):
        return False
    return by_algebra(given, gold)


def plain(text: str) -> str:
    """The answer without what does not change its meaning: spaces, dollar signs, sizes of brackets, units."""
    text = DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    text = UNITS.sub("", text)
    if text[:2].isalpha() or "=" not in text:
        return text
    name, _, value = text.partition("=")
    return value if len(name) == 1 and name.isalpha() else text


def as_fraction(text: str) -> Fraction | None:
    """A plain number or fraction, exactly."""
    found = FRACTION.fullmatch(text)
    if found is not None:
        sign = -1 if found[1] else 1
        over, under = int(found[2] or found[4]), int(found[3] or found[5])
        return Fraction(sign * over, under) if under else None
    number = as_decimal(text)
    if number is None or abs(number.adjusted()) > 400:
        return None
    return Fraction(number)


def by_algebra(given: str, gold: str) -> bool:
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
