import random

import pytest

from tidemill.reward.api import Sample
from tidemill.reward.verifiers import answers, text
from tidemill.reward.verifiers.countdown import countdown


def sample(response: str, answer: str = "", **meta) -> Sample:
    return Sample("p", response, answer, meta)


@pytest.mark.parametrize(
    ("response", "answer", "args", "is_right"),
    [
        ("17", "17", {}, True),
        (" 17 \n", "17", {}, True),
        ("the 17", "17", {}, False),
        ("the 17", "17", {"final": "last_word"}, True),
        ("a\nParis", "paris", {"final": "last_line", "ignore_case": True}, True),
        ("<answer>x  y</answer>", "x y", {"final": "tag"}, True),
        ("<answer>a</answer><answer>b</answer>", "a", {"final": "tag"}, False),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", {"final": "boxed"}, True),
        ("no box", "no box", {"final": "boxed"}, False),
        ("", "", {}, False),
    ],
)
def test_exact(response, answer, args, is_right) -> None:
    assert answers.exact(sample(response, answer), **args) is is_right


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("12 9 17", "17", True),
        ("12 9 17.", "17", True),
        ("is 1,234", "1234", True),
        ("-3", "3", False),
        ("3-", "3", True),
        ("0.30", "0.3", True),
        ("no number", "3", False),
        ("5 then 3", "5", False),
    ],
)
def test_last_number(response, answer, is_right) -> None:
    assert answers.last_number(sample(response, answer)) is is_right


def test_the_last_number_is_the_one_a_look_through_the_whole_response_finds() -> None:
    rng, alphabet = random.Random(seed := random.randrange(1 << 30)), "0123456789,.eE+- a$\n"
    for _ in range(2000):
        response = "".join(rng.choices(alphabet, k=rng.randint(0, 14)))
        found = answers.NUMBER.findall(response)
        for answer in ("1", *found[-2:]):
            wanted = bool(found) and answers.same_number(found[-1], answer)
            assert answers.last_number(sample(response, answer)) is wanted, (response, answer, seed)


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("50%", "0.5", True),
        ("$3.00", "3", True),
        ("3.1415926", "3.14159265", True),
        ("3.1", "3.14", False),
        ("1e3", "1000", True),
        ("inf", "inf", False),
        ("nan", "nan", False),
    ],
)
def test_numeric(response, answer, is_right) -> None:
    assert answers.numeric(sample(response, answer)) is is_right


@pytest.mark.parametrize(
    ("response", "answer", "is_right"),
    [
        ("B", "B", True),
        ("The answer is (C).", "C", True),
        ("A or B? B", "A", False),
        ("b", "B", False),
        (r"\boxed{D}", "d", True),
        ("", "A", False),
    ],
)
def test_choice(response, answer, is_right) -> None:
    assert answers.choice(sample(response, answer)) is is_right


def test_a_megabyte_of_digits_and_braces_is_judged_at_once() -> None:
    for hard in ("1" * 1_000_000, "\\boxed{" * 100_000, "<answer>" * 100_000, "1," * 300_000, "-" * 500_000):
        for function in (answers.exact, answers.last_number, answers.numeric, answers.choice):
            assert function(sample(hard, "17")) is False
        assert answers.exact(sample(hard, "17"), final="tag") is False
        assert answers.exact(sample(hard, "17"), final="boxed") is False


def test_format_wants_each_tag_once_in_order() -> None:
    assert text.format(sample("<think>a</think><answer>b</answer>")) == 1.0
    assert text.format(sample("<answer>b</answer><think>a</think>")) == 0.5
    assert text.format(sample("<think>a<answer>b</answer>")) == 0.5
    assert text.format(sample("b")) == 0.0


def test_length_falls_off_around_the_target() -> None:
    assert text.length(sample("a b c d"), target=4) == 1.0
    assert text.length(sample("a b"), target=4) == 0.5
    assert text.length(sample("a " * 8), target=4) == 0.0
    assert text.length(sample("a b"), target=4, tolerance=2) == 1.0


def test_repetition_is_the_share_of_sequences_seen_before() -> None:
    assert text.repetition(sample("a b c d e")) == 0.0
    assert text.repetition(sample("a b a b a b"), words=2) == pytest.approx(-0.6)


def test_regex_and_json_schema() -> None:
    assert text.regex(sample("answer: 17", "17"), pattern=r"answer:\s*{answer}\b")
    assert not text.regex(sample("answer: 1.7", "1.7"), pattern="{answer}", whole=True)
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert text.json_schema(sample('{"a": 1}'), schema=schema)
    assert text.json_schema(sample('```json\n{"a": 1}\n```', schema=schema))
    assert not text.json_schema(sample('{"a": "1"}'), schema=schema)
    assert not text.json_schema(sample("{"), schema=schema)


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("3*5-2", True),
        ("3*5-2=13", True),
        ("5*3-2", True),
        ("15-2", False),
        ("3+5+2", False),
        ("3*5-2.0", False),
        ("__import__('os')", False),
        ("3**5**9", False),
        ("(" * 150, False),
        ("", False),
        ("3/0+5-2", False),
    ],
)
def test_countdown(response, is_right) -> None:
    assert countdown(sample(response, "13", numbers=[3, 5, 2], target=13)) is is_right
