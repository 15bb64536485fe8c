import time

import pytest

pytest.importorskip("math_verify")

from tidemill.config import Rewards
from tidemill.reward.api import Sample
from tidemill.reward.math_answers import math, same
from tidemill.reward.score import Scorer

SAME = [
    ("17", "17"),
    ("17.0", "17"),
    ("1,000", "1000"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{-1}{2}", "-1/2"),
    ("2/4", r"\frac{1}{2}"),
    ("50\\%", "50"),
    (r"90^\circ", "90"),
    (r"x=5", "5"),
    (r"$\left(1,2\right)$", "(1, 2)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"10^{10^{10}}", "10^{10^{10}}"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"5 \text{ cm}", "5"),
]
DIFFERENT = [
    ("17", "18"),
    (r"\frac{1}{0}", "1"),
    ("", "3"),
    (r"\sqrt{3}", r"\sqrt{2}"),
    ("10^{10^{10}}", "10"),
    ("9**9**9**9", "9"),
    ("x", "y"),
    ("99999!", "1"),
]
PATHOLOGICAL = [
    "10^10^10",
    "10^{10^{10}}",
    "9**9**9**9**9",
    "((((10!)!)!)!)!",
    "\\frac{" * 500,
    "{" * 20_000,
    "\\sqrt{" * 200 + "2" + "}" * 200,
    "x^{99999999999}",
    "\\sum_{n=1}^{10^{12}} n^{n}",
    "\\int_0^{\\infty} e^{-x^{x^{x}}} dx",
    "\\binom{10^9}{10^8}",
    "(x+1)^{2000}",
    "\\prod_{k=1}^{100000} k",
    "\x00\ud800".encode("utf-8", "replace").decode(),
    "1" * 5000 + "^" + "1" * 5000,
]


@pytest.mark.parametrize(("given", "gold"), SAME)
def test_answers_that_mean_the_same(given, gold) -> None:
    assert math(Sample("", rf"So \boxed{{{given}}}.", gold))


@pytest.mark.parametrize(("given", "gold"), DIFFERENT)
def test_answers_that_do_not(given, gold) -> None:
    assert not same(given, gold)


def test_the_last_marked_answer_counts() -> None:
    assert math(Sample("", r"\boxed{1} no, \boxed{2}", "2"))
    assert math(Sample("", "reasons\n#### 42", "#### 42"))
    assert not math(Sample("", r"\boxed{2} or \boxed{3}", "2"))


def test_no_answer_hangs_and_those_behind_are_judged() -> None:
    samples = [Sample("", rf"\boxed{{{p}}}", "7", id=i) for i, p in enumerate(PATHOLOGICAL)]
    samples += [Sample("", r"\boxed{7}", "7", id=len(samples))]
    began = time.monotonic()
    with Scorer(Rewards(functions="math", timeout_s=1.5)) as scorer:
        scored = scorer.score(samples)
        assert [s.correct for s in scored] == [False] * len(PATHOLOGICAL) + [True]
        assert sum(scorer.errors.values()) <= 4
    assert time.monotonic() - began < 60
