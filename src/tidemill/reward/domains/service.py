"""The reward of domain service: `refund 35 EUR [R2]` decides by the policy and cites the clause that decides."""

from __future__ import annotations

import re

from tidemill.reward.api import Reward, Sample

ANSWER = re.compile(
    r"(?P<decision>refund|credit|replace|refuse|escalate)(?: (?P<amount>\d+) EUR)? ?(?P<cited>(?:\[R\d\] ?)*)\.?"
)
MONEY = ("refund", "credit")
UNDUE = -0.5  # worth of a promise of money that the policy does not give
PARTIAL = 0.1  # for each part of an answer that is not right as a whole


def service(sample: Sample) -> Reward:
    """1 for the right decision, amount and citation; a tenth for each that is right alone. Money that the policy does
    not give costs half a point, and an answer without exactly one citation is never right."""
    lines = sample.response.strip().splitlines()
    found = ANSWER.fullmatch(lines[0].strip()) if lines else None
    if found is None:
        return Reward(0.0, dict.fromkeys(("decision", "amount", "citation", "undue"), 0.0), False)
    cited = re.findall(r"R\d", found["cited"])
    decision, amount = found["decision"], int(found["amount"] or 0)
    known, due = sample.meta["decision"], int(sample.meta["amount"])
    parts = {
        "decision": float(decision == known),
        "amount": float(amount == due),
        "citation": float(cited == [sample.meta["clause"]]),
        "undue": float(decision in MONEY and (known not in MONEY or amount > due)),
    }
    if parts["undue"]:
        return Reward(UNDUE, parts, False)
    is_right = parts["decision"] == parts["amount"] == parts["citation"] == 1.0
    credit = PARTIAL * (parts["decision"] + parts["citation"] + (parts["amount"] if parts["decision"] else 0.0))
    return Reward(1.0 if is_right else credit, parts, is_right)
