"""Replies: a customer's message and two replies to it, one better than the other in ways that can be checked.

The better reply calls the customer by name, says the order's number and what happens next. The other is curt, or gets
one of these wrong. Reward `reply` measures the same, so preference learning can be watched by a true measure.
"""

from __future__ import annotations

import random

from tidemill.data.generators import Problem
from tidemill.errors import DataError

NAMES = ("Ana", "Bilal", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jale", "Kofi", "Lena", "Milo")
# What went wrong, how a customer says it, and what the shop does about it.
TROUBLES = {
    "late": (("my parcel is late", "nothing has arrived yet"), "we trace the parcel today"),
    "broken": (("the item came broken", "it was in pieces"), "we send a new one"),
    "wrong": (("you sent the wrong item", "this is not what I chose"), "we collect it and send the right one"),
    "twice": (("I was charged twice", "the money left my account two times"), "we return the second payment"),
    "missing": (("a part is missing", "the box lacked a piece"), "we post the missing part"),
}
CURT = ("Noted.", "Please wait.", "Not our fault.", "Read the website.", "Try again later.")
SLIPS = ("curt", "no name", "no number", "wrong number", "no remedy")


def replies(rng: random.Random, good_share: float = 1.0, slips: bool = True) -> Problem:
    """A message, the better reply as the response in a share `good_share` of the problems (else the other one), and
    the worse reply to reject. Without `slips` the worse reply is always a curt one."""
    if not 0 <= good_share <= 1:
        raise DataError(f"data.args.good_share must be between 0 and 1, got {good_share}")
    name, number = rng.choice(NAMES), rng.randint(1000, 9999)
    said, remedy = TROUBLES[rng.choice(list(TROUBLES))]
    prompt = f"Message: Hi, {name} here, order {number}: {rng.choice(said)}.\nReply:"
    good = reply(name, number, remedy)
    bad = worse(rng, rng.choice(SLIPS) if slips else "curt", name, number, remedy)
    response = good if rng.random() < good_share else bad
    meta = {"rejected": f" {bad}", "name": name, "number": number, "remedy": remedy}
    return Problem(prompt, good, f" {response}", meta)


def reply(name: str | None, number: int | None, remedy: str | None) -> str:
    """Compose a reply; what is None is left out."""
    opening = "Sorry" if name is None else f"Sorry, {name},"
    about = "" if number is None else f" about order {number}"
    text = f"{opening}{about}".rstrip(",")
    return f"{text}{'.' if remedy is None else f': {remedy}.'}"


def worse(rng: random.Random, slip: str, name: str, number: int, remedy: str) -> str:
    match slip:
        case "no name":
            return reply(None, number, remedy)
        case "no number":
            return reply(name, None, remedy)
        case "wrong number":
            return reply(name, wrong(rng, number), remedy)
        case "no remedy":
            return reply(name, number, None)
    return rng.choice(CURT)


def wrong(rng: random.Random, number: int) -> int:
    """Change one digit."""
    digits = list(str(number))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([d for d in "123456789" if d != digits[at]])
    return int("".join(digits))
