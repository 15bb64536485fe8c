"""A step that was started: which sequences it serves, and how to get what they drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidemill.batch import Array
from tidemill.rollout.native.draw.sampling import Drawn

# Waits for the device and gives tokens, log-probabilities and, where something was truncated, the log of the mass kept.
Fetch = Callable[[], tuple[Array, Array, Array | None]]


@dataclass(frozen=True, slots=True)
class Pending:
    rows: Array  # slots
    arrival: Array  # which tenancy of each slot
    drawn: Drawn | Fetch
    is_draft: bool = False  # tokens that were drafted and turned out right

    def arrays(self) -> tuple[Array, Array, Array | None]:
        if not isinstance(self.drawn, Drawn):
            return self.drawn()
        kept = self.drawn.kept
        return (
            self.drawn.tokens.cpu().numpy(),
            self.drawn.logprobs.cpu().numpy(),
            None if kept is None else kept.cpu().numpy(),
        )
