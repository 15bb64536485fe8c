r"""The reward `math`: whether two mathematical answers mean the same, by the verdict of the math-verify library.

The final answer is found first: in the last \boxed{}, after the last ####, behind "the answer is", and, where the known
answer is a number, the last number of the response. Most are then the same text, numbers, fractions or plainly
different values, and are decided here in microseconds, as the library would. Only the rest goes to its computer
algebra, which takes tens of milliseconds, and no longer than ALGEBRA_S.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from tidemill.errors import MissingExtra
from tidemill.reward.api import Sample
from tidemill.reward.math import expressions, numbers
from tidemill.reward.verifiers.answers import last_boxed, last_digit

LONGEST = 1000  # characters of an answer; a longer one is compared as text only
LONGEST_FOR_NUMBER = 200  # of one that is compared with a number: a formula of this length is no final answer
TAIL = 300  # characters at the end of a response without a marked answer, where the algebra looks for one
ALGEBRA_S = 0.4  # of this process's own time, for one verdict; what takes longer is not the same

# a^b^c, a^{b^{c}}, 9**9**9, or an exponent of four digits and more: numbers that nobody can write out.
TOWER = re.compile(
    r"(?:\^|\*\*)\s*[\{\(]*\s*-?[\d.]+\s*(?:\^|\*\*|!)|(?:\^|\*\*)\s*[\{\(]*\s*-?\d{4,}|\d{4,}\s*!|!\s*\)*\s*!"
)
# Sizes of brackets, marks of mathematics, and spaces; but not between digits, where a space may be a product.
DROPPED = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\?\$|\\[()\[\]]"
    r"|(?<!\d)(?:\\[!,; ]|\s)+|(?:\\[!,; ]|\s)+(?!\d)|\\!"
)
UNIT = re.compile(r"(?<=[\d}])(?:\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?|°)$")
WRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|textrm)\{([-\d.,/]+)\}")
LIST = re.compile(r"[-+]?[\d.]+(?:,\s*[-+]?[\d.]+)+")
# A word that is no function: to the algebra a product of letters, which no number equals.
WORD = re.compile(r"(?<![\\a-zA-Z{])(?!(?:sin|cos|tan|log|exp|sqrt|frac|max|min|gcd|lcm|mod|deg|inf)\b)[a-zA-Z]{3,}")
PRODUCT = re.compile(r"[-+]?[\d.,/]+\s*(?=[a-zA-Z ]*[a-df-hj-zA-DF-HJ-Z])[a-zA-Z][a-zA-Z ]*")
CURRENCY = re.compile(r"\\?[$€£]")
FORMULA = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
# A sum or product in running text that nothing is said to equal: 30 + 20.
TOTAL = re.compile(r"(?:(?<=[\s=])|^)-?\(?\d[\d.]*(?: ?[-+*/] ?\(?\d[\d.]*(?<!\.)\)?)+(?![\d=]| ?=)")
# A number in running text, with what may stand around it.
STATED = re.compile(
    r"(?<![\w.])(?:(?<![\d)}])[-−])?\\?[$€£]?"
    r"(?:-?\\[dt]?frac\{-?\d+\}\{-?\d+\}|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|\s?\\(?:times|cdot)\s?10\^(?:\{-?\d+\}|\d))?)"
    r"(?:\s?\\?%| percent\b)?"
)


def math(sample: Sample) -> bool:
    r"""The answer in the last \boxed{}, after the last ####, or at the end of the response equals the known answer."""
    gold = marked_answer(sample.answer) or sample.answer.strip()
    given = marked_answer(sample.response)
    if given is not None:
        return same(given, gold)
    if numbers.read(plain(gold)) is None:
        return same_unmarked(sample.response, gold)
    stated = stated_answer(sample.response)
    return stated is not None and same(stated, gold)


def marked_answer(text: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    return text.rpartition("####")[2].strip() if "####" in text else None


def stated_answer(response: str) -> str | None:
    """The number that the response calls its answer, or else its last one, with the sum or formula it stands in."""
    at = response.lower().rfind("answer")
    if at >= 0:
        line = response[at : at + 160].partition("\n")[0]
        _, equals, behind = line[:110].rpartition("=")
        searched = behind + line[110:] if equals else line[:70]
        found = STATED.search(searched)
        if found is not None:
            total = TOTAL.search(searched)
            return total[0] if total and total.start() <= found.start() else bare(found[0])
    end = last_digit(response)
    return None if end < 0 else stated_last(response, end)


def stated_last(response: str, end: int) -> str | None:
    """What has the last digit, which stands at `end`."""
    *_, formula = (None, *FORMULA.finditer(response, max(0, end - TAIL), end + TAIL))
    if formula is not None and formula.end() > end:
        return formula[formula.lastindex or 0].strip()
    *_, total = (None, *TOTAL.finditer(response, max(0, end - 60), end + 2))
    if total is not None and total.end() > end:
        return total[0]
    stated = STATED.findall(response, max(0, end - 60), end + 12)
    return bare(stated[-1]) if stated else None


def bare(stated: str) -> str:
    return CURRENCY.sub("", stated).replace("−", "-").replace(" percent", "%").rstrip(",")


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
    x, y = numbers.read(a), numbers.read(b)
    if x is not None and y is not None:
        return numbers.same(x, y)
    if y is not None:
        return beside_number(given, a, y, b)
    found = numbers.same_list(a, b)
    if found is not None:
        return found
    return False if expressions.differ(a, b) else None


def beside_number(given: str, a: str, y: numbers.Number, b: str) -> bool | None:
    """The verdict on an answer that is no plain number, where the known one is."""
    if len(given) > LONGEST_FOR_NUMBER:
        return False
    if "=" in a and "," not in a:  # 3+4=7 answers 7
        a = a.rpartition("=")[2]
    x = numbers.read(a)
    if x is None and expressions.differ(a, b):
        return False
    normal = normalised(given)
    x = x or numbers.read(plain(normal))
    if x is not None:
        return numbers.same(x, y)
    if LIST.fullmatch(normal) and len(set(normal.replace(" ", "").split(","))) > 1:
        return False
    return False if WORD.search(normal) or PRODUCT.fullmatch(normal) else None


def plain(text: str) -> str:
    """The answer without what does not change its meaning: spaces, dollar signs, sizes of brackets, a number's unit."""
    text = DROPPED.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    text = UNIT.sub("", text.rstrip("."))
    found = WRAPPED.fullmatch(text)
    return found[1] if found else text


def assigned(text: str) -> str:
    """`x=5` is `5`, where the other answer names no variable."""
    name, equals, value = text.partition("=")
    return value if equals and len(name) == 1 and name.isalpha() else text


@lru_cache(maxsize=1 << 16)
def by_algebra(given: str, gold: str) -> bool:
    """Kept, because the samples of one prompt often come to the same answer."""
    if not (is_balanced(given) and is_balanced(gold)):
        return False
    return within(ALGEBRA_S, lambda: library().verify(parsed(boxed(gold)), library().parse(boxed(given))))


@lru_cache(maxsize=1 << 12)
def same_unmarked(response: str, gold: str) -> bool:
    """A response without a marked answer: the library looks for one at its end."""
    tail = response.strip()[-TAIL:]
    if at_once(tail, gold):
        return True
    if TOWER.search(tail) or not is_balanced(gold):
        return False
    marked = tail if "$" in tail or "\\(" in tail or "\\[" in tail else f"${tail}$"
    return within(ALGEBRA_S, lambda: library().verify(parsed(boxed(gold)), library().parse(marked)))


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


class TookTooLong(BaseException):
    """Not an Exception, because the algebra catches those and goes on."""


def within(limit_s: float, decide: Callable[[], bool]) -> bool:
    """The verdict, or False when it takes longer. Another thread's has no limit: signals reach the main one only."""
    if threading.current_thread() is not threading.main_thread():
        return decide()
    try:
        with interrupted_after(limit_s):
            return decide()
    except (TookTooLong, RecursionError, MemoryError):
        return False


@contextlib.contextmanager
def interrupted_after(limit_s: float) -> Iterator[None]:
    def interrupt(number: int, frame: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, limit_s, 0.05)  # again and again, should the first be swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Library(NamedTuple):
    """math-verify, without time limits of its own: they come in whole seconds, and one per part."""

    parse: Callable[[str], Any]
    verify: Callable[[Any, Any], bool]
    normalise: Callable[[str], str]


@lru_cache(maxsize=1 << 12)
def parsed(gold: str) -> Any:
    """Many responses are compared with one known answer."""
    return library().parse(gold)


def normalised(text: str) -> str:
    """As the library reads it before it parses: without the units it knows, and with `and` as a comma."""
    return library().normalise(text)


@lru_cache(maxsize=1)
def library() -> Library:
    try:
        import math_verify
        from latex2sympy2_extended.math_normalization import normalize_latex
    except ImportError:
        raise MissingExtra("the reward math", "math-verify", "rewards") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    latex = math_verify.LatexExtractionConfig()
    configs = (latex, math_verify.ExprExtractionConfig())
    return Library(
        lambda text: math_verify.parse(text, extraction_config=configs, parsing_timeout=None),
        lambda gold, given: bool(math_verify.verify(gold, given, timeout_seconds=None)),
        lambda text: str(normalize_latex(text, latex.normalization_config)),
    )


def warm_up() -> None:
    """Loads the algebra before any sample's clock runs; its first polynomial, root and set take half a second."""
    for given, gold in (
        ("x/2", "\\frac{1}{2}x"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("1,2", "2,1"),
    ):
        library().verify(parsed(boxed(gold)), library().parse(boxed(given)))
