"""Whether a response has come to one of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def ends_by_string(tokens: Sequence[int], stops: Sequence[str], tokenizer: Any) -> bool:
    """Whether the newest token completes a stop string; it is called after each, so only the tail is looked at."""
    if not stops:
        return False
    # A stop string of c bytes lies within the last c tokens, plus one that may end inside a character.
    reach = max(len(stop.encode()) for stop in stops) + 1
    text = tokenizer.decode(tokens[-reach:])
    # Tokens that mean no text (numbers beyond the tokenizer's own, in a padded vocabulary) take places up too. Before
    # the newest there must be a whole stop string, and up to three pieces of a character that the cut went through.
    enough = len(tokenizer.decode(tokens[-1:])) + max(map(len, stops)) + 3
    while len(text) < enough and reach < len(tokens):
        reach *= 2
        text = tokenizer.decode(tokens[-reach:])
    return any(stop in text for stop in stops)
