"""A step that was started: which sequences it serves, and how to get what they drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.batch import Array
from tidemill.rollout.native.draw.sampling import Drawn


class Made(NamedTuple):
    """What the rows of a step drew, on the host."""

    tokens: Array
    logprobs: Array
    kept: Array | None  # log of the mass kept, where something was truncated
    tops: tuple[Array, Array] | None = None  # (rows, tops) the likeliest tokens and their log-probabilities


Fetch = Callable[[], Made]  # waits for the device


@dataclass(frozen=True, slots=True)
class Pending:
    rows: Array  # slots
    arrival: Array  # which tenancy of each slot
    drawn: Drawn | Fetch
    is_draft: bool = False  # tokens that were drafted and turned out right

    def made(self) -> Made:
        if not isinstance(self.drawn, Drawn):
            return self.drawn()
        drawn = self.drawn
        return Made(
            drawn.tokens.cpu().numpy(),
            drawn.logprobs.cpu().numpy(),
            None if drawn.kept is None else drawn.kept.cpu().numpy(),
            None if drawn.tops is None else (drawn.tops[0].cpu().numpy(), drawn.tops[1].cpu().numpy()),
        )
