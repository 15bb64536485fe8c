"""Generated tasks with answers that can be checked: arithmetic of rising difficulty, sorting, countdown.

Each also gives the response a supervised warm-up learns from, so a small model can be brought to where RL has a signal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tidemill.data import nim, seen_grid, tictactoe
from tidemill.data.generators import Generator, Problem
from tidemill.data.pictures.shapes import shapes
from tidemill.errors import DataError

Span = int | Sequence[int]


def span(value: Span, name: str, least: int) -> tuple[int, int]:
    """`5` or `[3, 6]` as (low, high)."""
    if isinstance(value, int) and not isinstance(value, bool):
        low = high = value
    elif isinstance(value, Sequence) and len(value) == 2 and all(isinstance(v, int) for v in value):
        low, high = value
    else:
        raise DataError(f"data.args.{name} must be a number or [low, high], got {value!r}")
    if low < least or high < low:
        raise DataError(f"data.args.{name} must be rising and at least {least}, got {value!r}")
    return low, high


def chain(
    rng: random.Random,
    terms: Span = (3, 6),
    max_value: int = 9,
    operators: str = "+-",
    max_total: int | None = None,
    worked: float = 1.0,
    pairs: bool = False,
) -> Problem:
    """`7+5-3=` with the answer `9`. Totals stay at or above 0 and at or below `max_total`.

    The given response works it out, `7+5=12 12-3=9`, in a share `worked` of the problems. The others are careless: they
    answer at once, ` 9`, right for two terms and a guess for more. That working it out pays is left for RL to find.
    With `pairs` there is also a response to reject: worked out with a slip that the later steps carry on.
    """
    if not operators or set(operators) - set("+-"):
        raise DataError(f"data.args.operators must be made of + and -, got {operators!r}")
    if max_value < 1 or (max_total is not None and max_total < 1):
        raise DataError(f"data.args.max_value and max_total must be at least 1, got {max_value} and {max_total}")
    ceiling = max_value * 10 if max_total is None else max_total
    count = rng.randint(*span(terms, "terms", 2))
    total = rng.randint(1, min(max_value, ceiling))
    moves: list[tuple[str, int]] = []
    start = total
    for _ in range(count - 1):
        room = min(max_value, ceiling - total)
        operator = "-" if room < 1 else "+" if total < 1 else rng.choice(operators)
        value = rng.randint(1, room if operator == "+" else min(max_value, total))
        total += value if operator == "+" else -value
        moves.append((operator, value))
    guess = total if count == 2 else rng.randint(0, min(ceiling, 9))
    response = work_out(start, moves) if rng.random() < worked else f" {guess}"
    meta: dict[str, Any] = {"terms": count}
    if pairs:
        meta["rejected"] = work_out(start, moves, slip_at=rng.randrange(len(moves)), slip=rng.choice([1, 2]))
    text = str(start) + "".join(f"{operator}{value}" for operator, value in moves)
    return Problem(f"{text}=", str(total), response, meta)


def work_out(total: int, moves: Sequence[tuple[str, int]], slip_at: int = -1, slip: int = 0) -> str:
    """`7+5=12 12-3=9`; a slip is added to one step's total, and carried on."""
    steps = []
    for place, (operator, value) in enumerate(moves):
        before, total = total, total + (value if operator == "+" else -value) + (slip if place == slip_at else 0)
        steps.append(f"{before}{operator}{value}={total}")
    return " ".join(steps)


def addition(rng: random.Random, digits: Span = 2, numbers: Span = 2) -> Problem:
    """`47+85=` with the answer `132`; every number has `digits` digits."""
    low, high = span(digits, "digits", 1)
    values = [number(rng, rng.randint(low, high)) for _ in range(rng.randint(*span(numbers, "numbers", 2)))]
    answer = str(sum(values))
    return Problem(f"{'+'.join(map(str, values))}=", answer, answer)


def multiplication(rng: random.Random, digits: Span = 2, called: float | None = None) -> Problem:
    """`12*34=`; the response is the partial products and then the answer.

    With `called`, that share of the responses asks a calculator, `<12*34>408;408` (the part behind > up to ; is its
    answer), and the others guess, `=512`: a model warmed up so has both ways in it, and RL finds that asking pays.
    """
    low, high = span(digits, "digits", 1)
    a, b = (number(rng, rng.randint(low, high)) for _ in range(2))
    if called is not None:
        guess = f"={number(rng, len(str(a * b)))}"
        response = f"<{a}*{b}>{a * b};{a * b}" if rng.random() < called else guess
        return Problem(f"{a}*{b}=", str(a * b), response)
    parts = [str(a * int(digit) * 10**place) for place, digit in enumerate(reversed(str(b)))]
    steps = parts if len(parts) == 1 else [*parts, str(a * b)]
    return Problem(f"{a}*{b}=", str(a * b), " ".join(steps))


def number(rng: random.Random, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


# Settings of each level: more terms first, then larger numbers, then products.
LEVELS = (
    ("chain", {"terms": 2, "max_value": 9}),
    ("chain", {"terms": (2, 4), "max_value": 9}),
    ("chain", {"terms": (3, 6), "max_value": 9}),
    ("chain", {"terms": (3, 6), "max_value": 50}),
    ("chain", {"terms": (5, 8), "max_value": 99}),
    ("multiplication", {"digits": (1, 2)}),
    ("multiplication", {"digits": 2}),
    ("multiplication", {"digits": (2, 3)}),
)


def arithmetic(rng: random.Random, level: Span = 1) -> Problem:
    """Sums and products of rising difficulty: level 1 is `3+4=`, level 8 is `123*45=`."""
    low, high = span(level, "level", 1)
    if high > len(LEVELS):
        raise DataError(f"data.args.level must be at most {len(LEVELS)}, got {level!r}")
    chosen = rng.randint(low, high)
    name, args = LEVELS[chosen - 1]
    problem = GENERATORS[name](rng, **args)
    return Problem(problem.prompt, problem.answer, problem.response, {"level": chosen})


def sorting(rng: random.Random, length: Span = (3, 6), max_value: int = 99, descending: bool = False) -> Problem:
    """`sort 31 4 15=` with the answer `4 15 31`."""
    values = [rng.randint(0, max_value) for _ in range(rng.randint(*span(length, "length", 2)))]
    answer = " ".join(map(str, sorted(values, reverse=descending)))
    return Problem(f"sort {' '.join(map(str, values))}=", answer, answer)


def reversal(
    rng: random.Random,
    length: Span = 4,
    letters: str = "01234567",
    reversed_share: float = 1.0,
    pairs: bool = False,
    slips: bool = False,
) -> Problem:
    """`0123=` with the answer `3210`. The given response is that in a share of the problems, and a plain copy in the
    others: a model warmed up so has both ways in it, and RL has to find which one pays. It learns in seconds.

    With `pairs` there is a response to reject: the copy or, with `slips`, in three of four problems the reversed word
    with a slip. A reward model must have seen slips of every kind, or a policy finds the one that it takes for better.
    """
    word = "".join(rng.choice(letters) for _ in range(rng.randint(*span(length, "length", 2))))
    response = word[::-1] if rng.random() < reversed_share else word
    if not pairs:
        return Problem(f"{word}=", word[::-1], response)
    right = word[::-1]
    is_slip = slips and (word == right or rng.random() < 3 / 4)
    return Problem(f"{word}=", right, response, {"rejected": slipped(rng, right, letters) if is_slip else word})


def slipped(rng: random.Random, right: str, letters: str) -> str:
    """A wrong word near the right one: letters changed (one or more), two of them swapped, one left out or added."""
    wrong = right
    while wrong == right:
        made, at = list(right), rng.randrange(len(right))
        match rng.choice(("change", "change", "change", "swap", "drop", "add")):
            case "change":
                share = rng.choice((0.0, 0.4, 0.8))
                made = [rng.choice(letters) if i == at or rng.random() < share else old for i, old in enumerate(made)]
            case "swap":
                other = rng.randrange(len(right))
                made[at], made[other] = made[other], made[at]
            case "drop":
                del made[at]
            case "add":
                made.insert(at, rng.choice(letters))
        wrong = "".join(made)
    return wrong


def countdown(rng: random.Random, numbers: Span = (3, 4), max_value: int = 20, operators: str = "+-*") -> Problem:
    """Reach a target from given numbers, each used once: `use 3 5 2 to make 13:`, checked by reward `countdown`."""
    values = [rng.randint(1, max_value) for _ in range(rng.randint(*span(numbers, "numbers", 2)))]
    text, total = str(values[0]), values[0]
    order = values[1:]
    rng.shuffle(order)
    for value in order:
        operator = rng.choice(operators)
        if operator == "-" and value > total:
            operator = "+"
        total = total + value if operator == "+" else total - value if operator == "-" else total * value
        text = f"({text}){operator}{value}" if operator == "*" and not text.isdigit() else f"{text}{operator}{value}"
    given = sorted(values)
    prompt = f"use {' '.join(map(str, given))} to make {total}:"
    return Problem(prompt, str(total), text, {"numbers": given, "target": total})


GENERATORS: dict[str, Generator] = {
    "arithmetic": arithmetic,
    "chain": chain,
    "addition": addition,
    "multiplication": multiplication,
    "sorting": sorting,
    "reversal": reversal,
    "countdown": countdown,
    "nim": nim.nim,
    "tictactoe": tictactoe.tictactoe,
    "shapes": shapes,
    "seen_grid": seen_grid.seen_grid,
}
