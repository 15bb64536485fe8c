"""The reward of domain industry: `P41 cavitation: clean strainer` names the right machine, fault and action."""

from __future__ import annotations

import re

from tidemill.reward.api import Reward, Sample

ANSWER = re.compile(r"(?P<machine>[A-Z]\d+) (?P<fault>[a-z ]+): (?P<action>[a-z ]+)\.?")
PARTIAL = 0.1  # for each part of an answer that is not right as a whole


def industry(sample: Sample) -> Reward:
    """1 for the right machine, fault and action; a tenth for each that is right alone."""
    lines = sample.response.strip().splitlines()
    found = ANSWER.fullmatch(lines[0].strip()) if lines else None
    if found is None:
        return Reward(0.0, dict.fromkeys(("machine", "fault", "action"), 0.0), False)
    parts = {name: float(found[name] == sample.meta[name]) for name in ("machine", "fault", "action")}
    is_right = min(parts.values()) == 1.0
    return Reward(1.0 if is_right else PARTIAL * sum(parts.values()), parts, is_right)
