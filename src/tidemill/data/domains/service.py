"""Service: what a shop's policy says about a case, with the clause it rests on cited.

Clauses stand in any order under any number, and their limits differ from case to case, so the policy has to be read.
A supervisor's limit decides first, then a final sale, then the window of a faulty, opened or unopened item.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidemill.data.generators import Problem
from tidemill.errors import DataError

ITEMS = ("headphones", "kettle", "lamp", "jacket", "backpack", "keyboard", "blender", "watch", "tent", "printer")
RULE = "Decide by the policy: refund or credit with the amount, replace, refuse or escalate. Cite the clause."


@dataclass(frozen=True, slots=True)
class Policy:
    unopened_days: int
    opened_days: int
    faulty_months: int
    supervisor_from: int

    def clauses(self) -> dict[str, str]:
        return {
            "unopened": f"unopened items: refund within {self.unopened_days} days",
            "opened": f"opened items: store credit within {self.opened_days} days",
            "faulty": f"faulty items: replaced within {self.faulty_months} months",
            "sale": "sale items: no refund, no credit",
            "supervisor": f"above {self.supervisor_from} EUR: a supervisor decides",
        }


@dataclass(frozen=True, slots=True)
class Case:
    item: str
    price: int
    state: str  # unopened, opened or faulty
    age: int  # days, or months where it is faulty
    is_on_sale: bool

    def text(self) -> str:
        since = f"{self.age} {'months' if self.state == 'faulty' else 'days'} ago"
        sale = "on sale " if self.is_on_sale else ""
        return f"{self.state} {self.item}, {self.price} EUR, bought {sale}{since}"


def service(rng: random.Random, clauses: int = 3) -> Problem:
    """A policy of `clauses` clauses, the deciding one among them, and a case."""
    if not 3 <= clauses <= 5:
        raise DataError(f"data.args of service: clauses must be 3 to 5, got {clauses}")
    policy = Policy(
        unopened_days=rng.choice((14, 20, 30, 45, 60)),
        opened_days=rng.choice((7, 10, 14, 20)),
        faulty_months=rng.choice((6, 12, 24)),
        supervisor_from=rng.choice((150, 200, 300, 400)),
    )
    state = rng.choice(("unopened", "opened", "faulty"))
    window = {"unopened": policy.unopened_days, "opened": policy.opened_days, "faulty": policy.faulty_months}[state]
    is_late = rng.random() < 0.4
    age = rng.randint(window + 1, 2 * window + 3) if is_late else rng.randint(1, window)
    is_dear = rng.random() < 0.15
    price = rng.randint(policy.supervisor_from + 1, 999) if is_dear else rng.randint(5, policy.supervisor_from - 1)
    case = Case(rng.choice(ITEMS), price, state, age, rng.random() < 0.15)
    decision, amount, deciding = decide(policy, case, window)
    text, numbers = policy_text(rng, policy.clauses(), relevant(case, deciding, policy), clauses)
    clause = numbers[deciding]
    answer = f"{decision}{f' {amount} EUR' if amount else ''} [{clause}]"
    meta = {"decision": decision, "amount": amount, "clause": clause}
    return Problem(f"{RULE}\n{text}\nCase: {case.text()}\nDecision:", answer, f" {answer}", meta)


def decide(policy: Policy, case: Case, window: int) -> tuple[str, int, str]:
    """Return the decision, the amount of money it moves, and the clause that decides."""
    if case.price > policy.supervisor_from:
        return "escalate", 0, "supervisor"
    if case.is_on_sale and case.state != "faulty":
        return "refuse", 0, "sale"
    if case.age > window:
        return "refuse", 0, case.state
    given = {"unopened": "refund", "opened": "credit", "faulty": "replace"}[case.state]
    return given, 0 if given == "replace" else case.price, case.state


def relevant(case: Case, deciding: str, policy: Policy) -> list[str]:
    """Return the clauses that must be shown: without them another decision would be right."""
    needed = [deciding, case.state]
    if case.is_on_sale:
        needed.append("sale")
    if case.price > policy.supervisor_from:
        needed.append("supervisor")
    return list(dict.fromkeys(needed))


def policy_text(
    rng: random.Random, clauses: dict[str, str], needed: list[str], count: int
) -> tuple[str, dict[str, str]]:
    """Return the policy's text and each shown clause's number."""
    others = [name for name in clauses if name not in needed]
    shown = [*needed, *rng.sample(others, max(0, count - len(needed)))]
    rng.shuffle(shown)
    numbers = [f"R{number}" for number in sorted(rng.sample(range(1, 10), len(shown)))]
    text = "\n".join(f"{number} {clauses[name]}" for number, name in zip(numbers, shown))
    return text, dict(zip(shown, numbers))
