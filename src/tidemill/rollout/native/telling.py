"""What an engine tells of tokens as they are made: to those who stream them, and the likeliest other ones."""

from __future__ import annotations

import numpy as np

from tidemill.batch import Array
from tidemill.rollout.engine import Fresh, OnTokens
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.batch.sequences import Sequence


class Teller:
    """Tells of the tokens of requests that have a `stream`, once for each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.slots = scheduler.slots
        self.on_tokens: OnTokens | None = None

    def tell(self, rows: Array, tokens: Array, logprobs: Array, kept: Array | None) -> None:
        if self.on_tokens is None:
            return
        streams = self.slots.stream[rows]
        told = np.flatnonzero((streams >= 0) & np.isfinite(logprobs))
        if len(told):
            self.on_tokens(Fresh(streams[told], tokens[told], logprobs[told], None if kept is None else kept[told]))

    def keep_tops(self, rows: Array, sequences: list[Sequence | None], tops: tuple[Array, Array] | None) -> None:
        """Write down the likeliest tokens of the slots that asked for them."""
        for i in np.flatnonzero(self.slots.tops[rows]) if tops is not None else ():
            sequence, count = sequences[rows[i]], int(self.slots.tops[rows[i]])
            assert sequence is not None and tops is not None
            found = list(zip(tops[0][i, :count].tolist(), tops[1][i, :count].tolist()))
            sequence.tops = [*(sequence.tops or []), found]
