"""The reward of domain health: level and codes of a triage note, and the rule that a red flag is always red."""

from __future__ import annotations

import re

from tidemill.reward.api import Reward, Sample

LEVELS = ("green", "amber", "red")
CODE = re.compile(r"[A-Z]\d\d(?:\.\d)?")
BROKEN = -1.0  # worth of an answer that breaks the rule, whatever its codes


def health(sample: Sample) -> Reward:
    """1 for the right level and codes; else up to 0.3 for the level and 0.3 for the codes (F1). A red flag that is not
    called red, or not answered in this form, breaks the rule: -1."""
    lines = sample.response.strip().splitlines()
    words = lines[0].split() if lines else []
    level = words[0].strip(",;:").lower() if words else ""
    known = sample.meta.get("level")
    is_broken = bool(sample.meta.get("is_red_flag")) and level != "red"
    codes = [word.strip(",;.") for word in words[1:]]
    agreement = f1(codes, list(sample.meta.get("codes", ()))) if all(map(CODE.fullmatch, codes)) else 0.0
    parts = {"level": float(level == known), "codes": agreement, "broken": float(is_broken)}
    if is_broken:
        return Reward(BROKEN, parts, False)
    is_right = level == known and agreement == 1.0
    return Reward(1.0 if is_right else 0.3 * parts["level"] + 0.3 * agreement, parts, is_right)


def f1(given: list[str], known: list[str]) -> float:
    """Compute the harmonic mean of precision and recall; a code that is given twice counts as a wrong one."""
    if not given or not known:
        return 0.0
    right = len(set(given) & set(known))
    return 2 * right / (len(given) + len(known))
