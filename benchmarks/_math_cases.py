"""Answers for `bench math`: fuzzed ones in all common forms, published ones, and rambling ones without an end."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


@dataclass(frozen=True, slots=True)
class Case:
    """`reference`: the response as math-verify has to see it; it does not know ####."""

    response: str
    gold: str
    reference: str
    form: str
    is_right: bool | None = None  # where it is known


# Fuzzed answers: (kind, the known answer, the same in other words, something else)
Answer = tuple[str, list[str], list[str]]


def whole(rng: random.Random) -> Answer:
    n = rng.choice([rng.randint(-99, 99), rng.randint(100, 999), rng.randint(1000, 9_999_999)])
    return (
        str(n),
        [str(n), f"{n:,}", f"{n}.0", f"${n}$", f"{n}.00"],
        [str(n + rng.randint(1, 9)), f"{n - 1:,}", f"{-n or 1}"],
    )


def currency(rng: random.Random) -> Answer:
    n = rng.randint(1, 99_999)
    same = [f"\\${n}", f"\\${n:,}", f"\\${n}.00", f"{n}\\$", f"\\$ {n}"]
    return rng.choice([str(n), f"\\${n}", f"\\${n:,}"]), same, [f"\\${n + 1}", f"\\${n}.50", f"\\${10 * n}"]


def percent(rng: random.Random) -> Answer:
    n = rng.randint(1, 250)
    same = [f"{n}\\%", f"{n}%", str(n), f"{n} \\%", f"{n} percent"]
    return rng.choice([str(n), f"{n}\\%", f"{n}%"]), same, [f"{n + 1}\\%", f"{n}.5%", f"{2 * n}"]


def units(rng: random.Random) -> Answer:
    n = rng.choice([str(rng.randint(1, 999)), f"{rng.randint(1, 99)}.{rng.randint(1, 9)}"])
    unit = rng.choice(["cm", "km", "kg", "hours", "minutes", "apples", "feet", "miles", "degrees", "students", "m"])
    same = [
        f"{n} \\text{{ {unit}}}",
        f"{n}\\ \\mathrm{{{unit}}}",
        f"{n} {unit}",
        f"{n}\\text{{ {unit}}}^2",
        f"{n}^\\circ",
    ]
    return n, same, [f"1{n} \\text{{ {unit}}}", f"{n}1 {unit}", f"2{n}^\\circ"]


def fraction(rng: random.Random) -> Answer:
    a, b = rng.randint(-40, 40) or 7, rng.randint(2, 30)
    value = Fraction(a, b)
    sign, size = ("-" if a < 0 else ""), abs(a)
    same = [f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\dfrac{{{3 * a}}}{{{3 * b}}}", f"{sign}\\frac{{{size}}}{{{b}}}"]
    wrong = [
        f"\\frac{{{a + 1}}}{{{b}}}",
        f"{a}/{b + 1}",
        f"\\frac{{{b}}}{{{a}}}" if a != b and a != -b else "99",
        f"{float(value) + 1:.4f}",
    ]
    return rng.choice([f"\\frac{{{a}}}{{{b}}}", str(value)]), same, wrong


def decimal(rng: random.Random) -> Answer:
    n = Fraction(rng.randint(1, 99_999), rng.choice([10, 100, 1000]))
    text = f"{float(n):g}"
    return (
        text,
        [text, f"{text}0" if "." in text else f"{text}.0", f"\\frac{{{n.numerator}}}{{{n.denominator}}}"],
        [f"{float(n) + 0.1:.3f}", f"1{text}"],
    )


def scientific(rng: random.Random) -> Answer:
    a, e = rng.randint(11, 99), rng.randint(2, 8)
    n = a * 10 ** (e - 1)
    same = [f"{a / 10:g}\\times10^{{{e}}}", f"{a / 10:g} \\times 10^{{{e}}}", f"{a / 10:g}\\cdot 10^{{{e}}}", str(n)]
    return (
        rng.choice([str(n), same[0]]),
        same,
        [f"{a / 10:g}\\times10^{{{e + 1}}}", f"{(a + 1) / 10:g}\\times10^{{{e}}}"],
    )


def interval(rng: random.Random) -> Answer:
    a = rng.randint(-20, 20)
    b = a + rng.randint(1, 20)
    left, right = rng.choice("(["), rng.choice(")]")
    end, shown = rng.choice([(str(b), str(b)), ("\\infty", "\\infty")])
    right = ")" if shown == "\\infty" else right
    same = [f"{left}{a},{end}{right}", f"{left}{a}, {end}{right}", f"\\left{left}{a},{end}\\right{right}"]
    return same[1], same, [f"{left}{a - 1},{end}{right}", f"{'[' if left == '(' else '('}{a},{end}{right}"]


def finite_set(rng: random.Random) -> Answer:
    a, b, c = rng.sample(range(-30, 99), 3)
    same = [f"\\{{{a},{b},{c}\\}}", f"\\{{{c}, {a}, {b}\\}}", f"\\left\\{{{b},{a},{c}\\right\\}}"]
    return same[0], same, [f"\\{{{a},{b}\\}}", f"\\{{{a},{b},{c + 1}\\}}"]


def expression(rng: random.Random) -> Answer:
    a, b = rng.randint(2, 9), rng.randint(2, 30)
    forms: list[Answer] = [
        (
            f"{a}\\sqrt{{{b}}}",
            [f"\\sqrt{{{a * a * b}}}", f"{a} \\sqrt{{{b}}}"],
            [f"{a}\\sqrt{{{b + 1}}}", f"{a}+\\sqrt{{{b}}}"],
        ),
        (f"x+{a}", [f"{a}+x", f"x + {a}"], [f"x-{a}", f"x+{a + 1}", f"y+{a}"]),
        (f"{a}\\pi", [f"\\pi\\cdot {a}", f"{a} \\pi"], [f"{a + 1}\\pi", f"{a}"]),
        (f"x={a}", [f"x = {a}", str(a)], [f"x={a + 1}", f"y={a}"]),
    ]
    return rng.choice(forms)


KINDS: dict[str, Callable[[random.Random], Answer]] = {
    f.__name__: f
    for f in (whole, currency, percent, units, fraction, decimal, scientific, interval, finite_set, expression)
}
WEIGHTS = {"whole": 5.0, "interval": 0.6, "finite_set": 0.6, "expression": 0.6}
THOUGHTS = (
    "Let us see. There are 12 of them and 3 are gone, so 12 - 3 = 9.",
    "First we add the two lengths, then we halve the sum.",
    "We know that $x + 2 = 7$.\nHence the rest follows.",
    "Each of the 4 boxes holds 6 items, which makes 4*6=<<4*6=24>>24.",
)


def fuzzed(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    kinds = rng.choices(list(KINDS), [WEIGHTS.get(kind, 1.0) for kind in KINDS], k=count)
    return [case(rng, kind) for kind in kinds]


def case(rng: random.Random, kind: str) -> Case:
    gold, same, other = KINDS[kind](rng)
    is_right = rng.random() < 0.5
    given = rng.choice(same if is_right else other)
    thought = rng.choice(THOUGHTS)
    form = rng.choice(("boxed", "boxed in $", "####", "plain"))
    boxed = f"{thought} So the answer is \\boxed{{{given}}}."
    if form == "boxed in $":
        response = f"{thought}\n$$\\boxed{{{given}}}$$"
        return Case(response, gold, response, f"{kind}, {form}", is_right)
    if form == "####":
        return Case(f"{thought}\n#### {given}", gold, f"\\boxed{{{given}}}", f"{kind}, {form}", is_right)
    if form == "plain":
        inner = given.strip("$") if "\\" not in given else f"${given.strip('$')}$"
        response = f"{thought}\n" + rng.choice(
            (f"The answer is {inner}.", f"Final answer: {inner}", f"The answer is: {inner}")
        )
        return Case(response, gold, response, f"{kind}, {form}", is_right)
    return Case(boxed, gold, boxed, f"{kind}, {form}", is_right)


# Published solutions


def published(path: Path) -> list[tuple[str, str, str, bool]]:
    """Reasoning, final answer, known answer and label of each of OpenAI's `example_model_solutions.jsonl`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows:
        gold = row["ground_truth"].rpartition("A: ")[2]
        for model in MODELS:
            body, _, final = row[model]["solution"].rpartition("A: ")
            found.append((body, final, gold, bool(row[model]["is_correct"])))
    return found


def tidy(folder: Path) -> list[tuple[str, str, str, bool]]:
    """The data set's own solutions, every second one with a wrong final answer."""
    found = []
    for name in ("test.jsonl", "train.jsonl"):
        for i, line in enumerate((folder / name).read_text(encoding="utf-8").splitlines()):
            body, _, gold = json.loads(line)["answer"].rpartition("#### ")
            is_right = i % 2 == 0
            found.append((body, gold if is_right else f"{gold}1", gold, is_right))
    return found


FORMS: dict[str, Callable[[str, str], str]] = {
    "####": lambda body, final: f"{body}#### {final}",
    "boxed": lambda body, final: f"{body}So the answer is \\boxed{{{final}}}.",
    "boxed dollars": lambda body, final: f"{body}So it is \\boxed{{\\${final}}}.",
    "sentence": lambda body, final: f"{body}The answer is ${final}.",
}


# Rambling answers


def rambling(count: int, seed: int) -> list[Case]:
    """Long, half LaTeX: equations, lists of numbers, nested fractions, boxes around anything, often no answer."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        parts = [rng.choice(RAMBLES)(rng) for _ in range(rng.randint(4, 25))]
        if rng.random() < 0.25:
            parts.insert(rng.randrange(len(parts)), f"\\boxed{{{rng.choice(RAMBLES)(rng)}}}")
        response = rng.choice((" ", "\n", ". ")).join(parts)
        made.append(Case(response, str(rng.randint(1, 99)), response, "rambling"))
    return made


def nested(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice((str(rng.randint(1, 99)), "x", f"{rng.randint(1, 9)}x"))
    inner = nested(rng, depth - 1)
    return rng.choice(
        (f"\\frac{{{inner}}}{{{nested(rng, depth - 1)}}}", f"\\sqrt{{{inner}}}", f"({inner} + {rng.randint(1, 9)})")
    )


RAMBLES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "To find the number of apples we need to multiply the number of days by the price of each of them",
    lambda rng: f"{rng.randint(1, 99)} + {rng.randint(1, 99)} = {rng.randint(1, 199)}",
    lambda rng: f"${rng.randint(1, 9)}x + {rng.randint(1, 99)} = {rng.randint(1, 199)}$",
    lambda rng: ", ".join(str(rng.randint(1, 999)) for _ in range(rng.randint(5, 60))),
    lambda rng: f"$${nested(rng, rng.randint(1, 5))}$$",
    lambda rng: f"\\[ {nested(rng, 3)} = {nested(rng, 2)} \\]",
    lambda rng: f"\\begin{{align*}} x &= {rng.randint(1, 9)} \\\\ y &= {nested(rng, 2)} \\end{{align*}}",
    lambda rng: f"The answer is the total of ${rng.randint(1, 99)} and {rng.randint(1, 99)}%",
    lambda rng: f"Step {rng.randint(1, 9)}: **Calculate** the {rng.randint(1, 9)}/{rng.randint(2, 9)} of it",
    lambda rng: f"$\\frac{{{rng.randint(1, 9)}}}{{{rng.randint(1, 9)}",
    lambda rng: "and so on " * rng.randint(1, 20),
    lambda rng: f"{rng.randint(1, 99)} dollars per hour * {rng.randint(1, 9)} hours",
)
