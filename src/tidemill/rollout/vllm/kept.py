"""Top-k, top-p and min-p inside vLLM, with the mass they keep written down.

vLLM gives log-probabilities of what it drew from and not the mass that truncation left, and without it a learner cannot
compare like with like. So we truncate, as a logits processor, which is vLLM's own way to add one; vLLM draws from what
is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.rollout.engine import Sampling
from tidemill.rollout.native.draw.sampling import Draw, is_truncated, threshold

# Where a request's own settings carry its name, from which the processor knows it.
NAME = "tidemill"


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    how: Sampling
    made: Sequence[int]  # the request's tokens so far, which vLLM goes on writing to


class KeptMass:
    """Which row of vLLM's batch is whose, and of each token drawn the log of the mass it was drawn from."""

    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}
        self._asked: dict[str, Sampling] = {}
        self._kept: dict[str, dict[int, float]] = {}

    def expect(self, name: str, how: Sampling) -> None:
        """Before a request is given to vLLM."""
        if is_truncated(how):
            self._asked[name] = how
            self._kept[name] = {}

    def of(self, name: str, first: int, count: int) -> list[float]:
        """Of tokens `first` … of a request, as vLLM counts them."""
        kept = self._kept[name]
        return [kept.pop(place) for place in range(first, first + count)]

    def forget(self, name: str) -> None:
        self._asked.pop(name, None)
        self._kept.pop(name, None)

    def update(self, removed: Iterable[int], added: Iterable[Any], moved: Iterable[tuple[int, int, bool]]) -> None:
        """vLLM's batch changed, in this order; `moved`: from, to, and whether the two change places."""
        for row in removed:
            self.rows.pop(row, None)
        for row, params, _, made in added:
            name = (params.extra_args or {}).get(NAME)
            self.rows.pop(row, None)
            if name in self._asked:
                self.rows[row] = _Row(name, self._asked[name], made)
        for source, target, is_swap in moved:
            mine, theirs = self.rows.pop(source, None), self.rows.pop(target, None)
            if mine is not None:
                self.rows[target] = mine
            if is_swap and theirs is not None:
                self.rows[source] = theirs

    def truncate(self, logits: Tensor) -> Tensor:
        """Logits (rows, vocab) before the temperature, with what each row leaves out at -inf."""
        rows = [(row, mine) for row, mine in self.rows.items() if row < len(logits)]
        if not rows:
            return logits
        index = torch.tensor([row for row, _ in rows], device=logits.device)
        heated = logits[index].float() / _column(logits, [mine.how.temperature for _, mine in rows]).unsqueeze(1)
        outside = heated < threshold(heated, _draw(logits, [mine.how for _, mine in rows]))
        kept = heated.log_softmax(-1).masked_fill(outside, -torch.inf).logsumexp(-1)
        for (_, mine), mass in zip(rows, kept.tolist()):
            # A row whose prompt is not read to the end draws too, for nothing; its first token is then drawn again.
            self._kept.setdefault(mine.name, {})[len(mine.made)] = mass
        logits[index] = logits[index].masked_fill(outside, -torch.inf)
        return logits


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def _draw(like: Tensor, hows: list[Sampling]) -> Draw:
    none = torch.zeros(0, dtype=torch.int64, device=like.device)
    return Draw(
        none,
        none,
        top_k=torch.tensor([min(how.top_k, like.shape[1]) or like.shape[1] for how in hows], device=like.device),
        top_p=_column(like, [how.top_p if how.top_p < 1 else 2.0 for how in hows]),
        min_p=_column(like, [how.min_p for how in hows]),
    )


def processor(kept: KeptMass) -> type:
    """A class for vLLM's `logits_processors` that works for `kept`."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.interface import MoveDirectionality

    class Truncate(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

        def is_argmax_invariant(self) -> bool:
            return False  # it is; but those that say so come after the temperature, and not in every runner

        def update_state(self, batch_update: Any) -> None:
            if batch_update is not None:
                swap = MoveDirectionality.SWAP
                moved = [(a, b, kind == swap) for a, b, kind in batch_update.moved]
                kept.update(batch_update.removed, batch_update.added, moved)

        def apply(self, logits: Tensor) -> Tensor:
            return kept.truncate(logits)

    return Truncate
