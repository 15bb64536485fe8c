"""Rewards that compare a response with a known answer. All run in linear time, so they need no time-out.

What each takes for the response's final answer is said in its first line; `final` is shared by all of them.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from tidemill.reward.api import Sample

NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
OF_NUMBERS = "0123456789,.eE+-"  # what a number is made of
CHOICE = re.compile(r"\(?\b([A-Z])\b\)?")


def exact(sample: Sample, final: str = "all", ignore_case: bool = False) -> bool:
    """The final answer equals the known one, spaces apart."""
    return same_text(final_answer(sample.response, final), sample.answer, ignore_case)


def last_number(sample: Sample, tolerance: float = 0.0) -> bool:
    """The last number of the response equals the answer."""
    end = last_digit(sample.response) + 1
    if end == 0:
        return False
    # Only the characters around the last digit: to look through the whole response took ten times as long.
    begin = len(sample.response[:end].rstrip(OF_NUMBERS))
    return same_number(NUMBER.findall(sample.response, begin, end + 1)[-1], sample.answer, tolerance)


def numeric(sample: Sample, tolerance: float = 1e-6, final: str = "all") -> bool:
    """The final answer is a number (with %, commas or a currency sign) within a relative tolerance of the answer."""
    return same_number(final_answer(sample.response, final), sample.answer, tolerance)


def choice(sample: Sample, final: str = "all") -> bool:
    """The last capital letter that stands alone (`B`, `(B)`, `\\boxed{B}`) is the answer."""
    text = final_answer(sample.response, final)
    found = CHOICE.findall(text)
    wanted = CHOICE.findall(sample.answer.strip().upper())
    return bool(found) and bool(wanted) and found[-1] == wanted[-1]


def final_answer(response: str, final: str) -> str:
    """`all`: the whole response; `last_word`, `last_line`; `tag`: inside the last <answer>; `boxed`: inside the last
    \\boxed{}. An answer that is not there is empty, which equals nothing."""
    match final:
        case "all":
            return response.strip()
        case "last_word":
            words = response.split()
            return words[-1] if words else ""
        case "last_line":
            lines = response.strip().splitlines()
            return lines[-1].strip() if lines else ""
        case "tag":
            end = response.rfind("</answer>")
            start = response.rfind("<answer>", 0, max(end, 0))
            return response[start + len("<answer>") : end].strip() if 0 <= start < end else ""
        case "boxed":
            return last_boxed(response) or ""
    raise ValueError(f"final must be all, last_word, last_line, tag or boxed, got {final!r}")


def last_digit(text: str) -> int:
    """Where the last digit stands; -1 without any."""
    return max(map(text.rfind, "0123456789"))


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…}, braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for end in range(begin, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begin:end].strip()
    return None


def same_text(given: str, answer: str, ignore_case: bool = False) -> bool:
    a, b = " ".join(given.split()), " ".join(answer.split())
    return bool(b) and (a.casefold() == b.casefold() if ignore_case else a == b)


def same_number(given: str, answer: str, tolerance: float = 0.0) -> bool:
    """Exact in decimal arithmetic for tolerance 0, so 0.1 + 0.2 written out is 0.3."""
    a, b = as_decimal(given), as_decimal(answer)
    if a is None or b is None:
        return False
    return a == b if tolerance == 0 else abs(a - b) <= Decimal(str(tolerance)) * max(abs(b), Decimal(1))


def as_decimal(text: str) -> Decimal | None:
    """`1,234.5`, `50%`, `$3`, `6.02e23`; None for anything else, infinities included."""
    text = text.strip().strip("$€£").rstrip(".").replace(",", "").replace(" ", "")
    percent = text.endswith("%")
    if len(text) > 400 or not NUMBER.fullmatch(text.rstrip("%")):
        return None
    try:
        value = Decimal(text.rstrip("%"))
    except InvalidOperation:
        return None
    return value / 100 if percent else value
