"""Finance: a figure or ratio out of a company's statement, as a formula over its figures, with unit and period.

The answer is the formula, not its value, so that a reader can audit it and no arithmetic is left to the model:
`610/4820 % FY2023` is an operating margin.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.data.generators import Problem
from tidemill.errors import DataError

NAMES = ("Aldbrook", "Brevia", "Cormund", "Delmar", "Estwick", "Fenley", "Gransol", "Hadria", "Ilmen", "Jorvik")
TRADES = ("Foods", "Pumps", "Textiles", "Logistics", "Glass", "Energy", "Paper", "Optics")
CURRENCIES = ("EUR", "USD", "GBP", "CHF")
# A line of the statement, what questions call it, and its usual size as a share of revenue.
LINES = {
    "Revenue": (("revenue", "turnover", "net sales"), 1.0),
    "Cost of sales": (("cost of sales", "cost of goods sold"), 0.6),
    "Operating profit": (("operating profit", "EBIT"), 0.12),
    "Net profit": (("net profit", "net income"), 0.08),
    "Current assets": (("current assets",), 0.45),
    "Current liabilities": (("current liabilities",), 0.3),
    "Total assets": (("total assets",), 1.2),
    "Equity": (("equity", "shareholders' funds"), 0.5),
    "Inventories": (("inventories", "stock"), 0.15),
    "Staff costs": (("staff costs", "personnel expenses"), 0.2),
}
# What questions call a ratio, and its two lines and unit.
RATIOS = {
    "operating margin": ("Operating profit", "Revenue", "%"),
    "net margin": ("Net profit", "Revenue", "%"),
    "cost ratio": ("Cost of sales", "Revenue", "%"),
    "current ratio": ("Current assets", "Current liabilities", "times"),
    "equity ratio": ("Equity", "Total assets", "%"),
    "return on equity": ("Net profit", "Equity", "%"),
    "staff cost ratio": ("Staff costs", "Revenue", "%"),
}
SCALES = {"thousand": 1_000, "million": 1_000_000}
RULE = "Answer with a formula over the figures, the unit and the period."


@dataclass(frozen=True, slots=True)
class Statement:
    """Figures by line and period, in `currency scale`."""

    company: str
    currency: str
    scale: str
    periods: tuple[str, ...]
    figures: dict[str, tuple[int, ...]]

    def figure(self, line: str, period: str) -> int:
        return self.figures[line][self.periods.index(period)]

    def text(self) -> str:
        head = f"{self.company}, {self.currency} {self.scale}: {', '.join(self.periods)}"
        return "\n".join([head, *(f"{line}: {', '.join(map(str, of))}" for line, of in self.figures.items())])


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and what its answer is made of; `value` in the asked unit, a percentage as a share."""

    question: str
    formula: str
    value: float
    unit: str
    period: str


def finance(rng: random.Random, lines: int = 4, periods: int = 2, largest: int = 9999) -> Problem:
    """A statement with `lines` lines over `periods` periods and a question about it; figures up to `largest`."""
    if not 3 <= lines <= len(LINES) or not 2 <= periods <= 4 or largest < 100:
        raise DataError(
            f"data.args of finance: lines must be 3 to {len(LINES)}, periods 2 to 4 and largest at least 100, "
            f"got {lines}, {periods} and {largest}"
        )
    ratio = rng.choice(list(RATIOS))
    statement = make_statement(rng, RATIOS[ratio][:2], lines, periods, largest)
    ask: Callable[[], Asked] = rng.choice(
        [
            lambda: figure(rng, statement),
            lambda: ratio_of(rng, statement, ratio),
            lambda: ratio_of(rng, statement, ratio),
            lambda: growth(rng, statement),
        ]
    )
    asked = ask()
    answer = f"{asked.formula} {asked.unit} {asked.period}"
    figures = sorted({number for of in statement.figures.values() for number in of})
    meta = {"value": asked.value, "unit": asked.unit, "period": asked.period, "figures": figures}
    return Problem(f"{RULE}\n{statement.text()}\n{asked.question}\nAnswer:", answer, f" {answer}", meta)


def make_statement(rng: random.Random, needed: tuple[str, ...], lines: int, periods: int, largest: int) -> Statement:
    chosen = [*needed, *rng.sample([line for line in LINES if line not in needed], lines - len(needed))]
    year = rng.randint(2015, 2024)
    names = tuple(f"FY{year - back}" for back in range(periods))
    revenue = rng.randint(largest // 10, largest)
    figures = {}
    for line in sorted(chosen, key=list(LINES).index):
        base = max(2, round(revenue * LINES[line][1] * rng.uniform(0.5, 1.2)))
        figures[line] = tuple(max(1, round(base * rng.uniform(0.8, 1.25))) for _ in names)
    company = f"{rng.choice(NAMES)} {rng.choice(TRADES)}"
    return Statement(company, rng.choice(CURRENCIES), rng.choice(list(SCALES)), names, figures)


def figure(rng: random.Random, statement: Statement) -> Asked:
    """A figure as it stands, or in the other scale."""
    line, period = rng.choice(list(statement.figures)), rng.choice(statement.periods)
    scale = rng.choice(list(SCALES))
    number = statement.figure(line, period)
    step = {("thousand", "million"): "/1000", ("million", "thousand"): "*1000"}.get((statement.scale, scale), "")
    value = number * SCALES[statement.scale] / SCALES[scale]
    unit = f"{statement.currency} {scale}"
    return Asked(f"What was {called(rng, line)} in {period}, in {unit}?", f"{number}{step}", value, unit, period)


def ratio_of(rng: random.Random, statement: Statement, ratio: str) -> Asked:
    above, below, unit = RATIOS[ratio]
    period = rng.choice(statement.periods)
    a, b = statement.figure(above, period), statement.figure(below, period)
    return Asked(f"What was the {ratio} in {period}, in {unit}?", f"{a}/{b}", a / b, unit, period)


def growth(rng: random.Random, statement: Statement) -> Asked:
    line = rng.choice(list(statement.figures))
    place = rng.randrange(len(statement.periods) - 1)
    period = statement.periods[place]
    now, before = statement.figures[line][place], statement.figures[line][place + 1]
    question = f"By how much did {called(rng, line)} grow in {period}, in %?"
    return Asked(question, f"{now}/{before}-1", now / before - 1, "%", period)


def called(rng: random.Random, line: str) -> str:
    return rng.choice(LINES[line][0])
