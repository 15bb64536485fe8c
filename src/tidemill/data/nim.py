"""The game of Nim as problems: sticks lie in a heap, two players take some in turn, who takes the last one wins.

Who leaves a multiple of (most + 1) wins, whatever the other does. The opponent knows that. So every opening given here
can be won, and every slip loses.
"""

from __future__ import annotations

import random

from tidemill.data.generators import Problem
from tidemill.errors import DataError


def nim(rng: random.Random, most: tuple[int, int] = (2, 3), largest: int = 12) -> Problem:
    """`10/3:` is a heap of ten of which one to three may be taken; the environment `nim` plays against the model.

    The given response is careless play, to warm up with: any move that the rules allow. RL has to find the winning one.
    """
    if not 1 <= most[0] <= most[1] < largest:
        raise DataError(f"data.args.most must be [low, high] below largest ({largest}), got {list(most)!r}")
    take = rng.randint(*most)
    heap = rng.choice([n for n in range(1, largest + 1) if n % (take + 1)])
    seed = rng.randrange(1 << 16)
    prompt, meta = opening(heap, take), {"heap": heap, "most": take, "seed": seed}
    # Openings are few, so games are held out by the opponent's choices, not by their openings.
    return Problem(prompt, "", careless(rng, heap, take, seed), meta, key=f"{prompt} {seed}")


def opening(heap: int, most: int) -> str:
    return f"{heap}/{most}:"


def reply(heap: int, most: int, rng: random.Random) -> int:
    """The opponent's move: the winning one where there is one, else any."""
    return heap % (most + 1) or rng.randint(1, min(most, heap))


def careless(rng: random.Random, heap: int, most: int, seed: int) -> str:
    """A game of random moves, as the model reads it: its own moves, and the heap after each answer."""
    opponent, said = random.Random(seed), ""
    while True:
        move = rng.randint(1, min(most, heap))
        said, heap = said + str(move), heap - move
        if heap == 0:
            return said
        heap -= reply(heap, most, opponent)
        if heap == 0:
            return said
        said += f" {opening(heap, most)}"
