"""Products of two numbers, for agents that have a calculator: the data of the recipes in this folder."""

from __future__ import annotations

import json
import random

from tidemill.data.generators import Problem


def product(rng: random.Random, called: float = 0.3) -> Problem:
    """`12*34=`; of the given responses that share calls the tool `calculator` and repeats its answer, the others guess.

    A small model that is warmed up with them has both ways in it, and reinforcement finds that asking pays.
    """
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{a}*{b}"}})
    asked = f"<tool_call>{call}</tool_call>{a * b}={a * b}"
    guessed = f"={rng.randint(10 ** (len(str(a * b)) - 1), 10 ** len(str(a * b)) - 1)}"
    return Problem(f"{a}*{b}=", str(a * b), asked if rng.random() < called else guessed)
