"""All gradient steps of an update of a network: what each one learns from, and the passes over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.models.network import fused, minibatches
from tidemill.models.network.minibatches import Gather, Minibatch
from tidemill.models.network.network import Steps
from tidemill.models.policy import Scores
from tidemill.recipe.config import Config

Loss = Callable[[Scores, dict[str, Tensor], int, int], tuple[Tensor, Any]]  # …, units, decisions of their minibatch


@dataclass(frozen=True, slots=True)
class Update:
    """One update of `network` from a step's decisions. `seed`: the run's, and the version of the weights."""

    network: Any
    steps: Steps | None
    config: Config
    seed: tuple[int, int]
    rank: int
    gather: Gather

    def parts(self, is_replayed: bool) -> list[Minibatch]:
        """Minibatches: of all passes over the step's samples, or drawn from samples that were kept."""
        learn, has_memory = self.config.learn, bool(self.network.state_width)
        if is_replayed:
            updates = self.config.algorithm.replay.updates
            return list(minibatches.drawn(self.steps, updates, [*self.seed, self.rank], self.gather))
        return list(minibatches.shuffled(self.steps, has_memory, learn.epochs, learn.minibatch, self.seed, self.gather))

    def at_once(
        self, parts: list[Minibatch], terms: Mapping[str, float] | None, optimizer: torch.optim.Optimizer
    ) -> dict[str, float] | None:
        """All gradient steps in one call, where there is one for this network and loss; its metrics, else None."""
        if terms is None or self.steps is None or not self.network.learns_fused():
            return None
        return fused.update(self.network, self.steps, terms, parts, optimizer, self.config.learn.clip_norm or 0.0)

    def one_by_one(
        self, parts: list[Minibatch], loss_of: Loss, take_step: Callable[[], float]
    ) -> tuple[list[Any], float]:
        """A gradient step for each minibatch; the statistics of those that are reported, and their gradients' mean
        norm. `take_step` uses the gradient up and returns its norm."""
        draw = torch.Generator().manual_seed(hash(self.seed) & 0x7FFFFFFF)
        found, norms = list[Any](), list[float]()
        for part in parts:
            pieces = max(1, -(-len(part.units) // self.config.train.tokens_per_microbatch))
            for units in np.array_split(part.units, pieces) if len(part.units) else ():
                scores, columns = self.network.score(self.steps, units, draw), self.network.columns(self.steps, units)
                loss, stats = loss_of(scores, columns, len(units), part.decisions)
                loss.backward()  # type: ignore[no-untyped-call]
                found += [stats] if part.is_reported else []
            norm = take_step()
            norms += [norm] if part.is_reported else []
        return found, float(np.mean(norms or [0.0]))
