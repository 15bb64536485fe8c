"""What the learner made of a few samples, token by token, for people to look at: log-probability, ratio and advantage
as the loss saw them last, and the images that the sample shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill import tiles
from tidemill.algorithms.api import TokenBatch
from tidemill.batch import ID, Batch

LATE_STEPS = 16  # for which a sample that was shown before it was learned from is waited for
DIGITS = 4

Picture = npt.NDArray[np.uint8]
Noted = tuple[dict[str, Any], list[Picture]]  # a record, and the sample's images


class Notes:
    """Keeps the `most` samples of a step with the smallest ids, which are those that are shown, and any that were asked
    for. Slices stay on the device until they are read, so that learning waits for nothing."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor, list[Picture]]] = {}
        self._asked: deque[frozenset[int]] = deque(maxlen=LATE_STEPS)

    def ask(self, ids: Iterable[int]) -> None:
        """Keep these too, when they are learned from."""
        self._asked.append(frozenset(ids))

    def keep(self, batch: Batch, tokens: TokenBatch) -> None:
        if not self.most or "mask" not in batch or tokens.rollout_logprobs is None:
            return
        ids = batch.values(ID).tolist()
        rows = [row for row, id in enumerate(ids) if self._wants(id)]
        if not rows:
            return
        ends = np.cumsum(batch["mask"].lengths)
        shown = tiles.of_batch(batch)
        for row in rows:
            own = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
            columns = (tokens.logprobs, tokens.old_logprobs, tokens.advantages)
            now, old, advantages = (column.detach()[own].clone() for column in columns)
            self._kept[ids[row]] = now, old, advantages, tiles.images(shown[row])
        self._drop()

    def _is_asked(self, id: int) -> bool:
        return any(id in ids for ids in self._asked)

    def _wants(self, id: int) -> bool:
        if id in self._kept or len(self._kept) < self.most or self._is_asked(id):
            return True
        return id < max(self._kept)

    def _drop(self) -> None:
        spare = sorted(id for id in self._kept if not self._is_asked(id))[self.most :]
        for id in spare:
            del self._kept[id]

    def drain(self) -> list[Noted]:
        """Return what is kept, and forget it. All numbers come in one copy: each would wait for the device."""
        kept, self._kept = sorted(self._kept.items()), {}
        if not kept:
            return []
        columns = []
        for _, (now, old, advantages, _) in kept:
            columns += [now.float(), (now.float() - old.float()).exp(), advantages.float()]
        numbers = iter(torch.split(torch.cat(columns).cpu(), [len(column) for column in columns]))
        return [({"id": id, **_record(numbers)}, images) for id, (*_, images) in kept]


def _record(numbers: Iterator[Tensor]) -> dict[str, list[float]]:
    names = ("logprobs", "ratio", "advantages")
    return {name: [round(x, DIGITS) for x in next(numbers).tolist()] for name in names}
