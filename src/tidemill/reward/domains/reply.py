"""The reward of replies: name, order number and remedy, all of them and no other number, in one polite sentence."""

from __future__ import annotations

import re

from tidemill.reward.api import Reward, Sample

MOST_WORDS = 24


def reply(sample: Sample) -> Reward:
    """The share of what a good reply holds: an apology, the customer's name, the order's number and none beside it, the
    remedy, and no more than 24 words. Right when all of it is there."""
    text = sample.response.strip()
    meta = sample.meta
    parts = {
        "sorry": float("sorry" in text.lower()),
        "name": float(bool(re.search(rf"\b{re.escape(str(meta.get('name')))}\b", text))),
        "number": float(re.findall(r"\d+", text) == [str(meta.get("number"))]),
        "remedy": float(str(meta.get("remedy")) in text),
        "short": float(0 < len(text.split()) <= MOST_WORDS),
    }
    share = sum(parts.values()) / len(parts)
    return Reward(share, parts, share == 1.0)
