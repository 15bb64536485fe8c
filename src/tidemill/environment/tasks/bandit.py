"""A contextual bandit: one decision an episode, and what each arm is worth is known to whoever evaluates.

A context is a point x of a standard normal distribution; arm k pays 1 with probability 1 / (1 + exp(−w_k · x)), else 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.random import normal, uniform
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]


class Bandit:
    def __init__(self, count: int, arms: int = 5, context: int = 8, strength: float = 2.0, problem: int = 0) -> None:
        """`strength`: how much a context tells. `problem`: which arms there are."""
        self.arms, self.width = arms, context
        rng = np.random.default_rng([problem, arms, context])
        self.weights = rng.normal(size=(context, arms)) * strength / np.sqrt(context)
        self.spaces = Spaces(observation=(context,), choices=(arms,))
        self.seeds, self.contexts = np.zeros(count, np.int64), np.zeros((count, context), np.float32)

    def reset(self, slots: Array, seeds: Array) -> Array:
        self.seeds[slots] = seeds
        self.contexts[slots] = normal(seeds, np.arange(self.width))
        return self.contexts[slots]

    def step(self, slots: Array, moves: Array) -> tuple[Array, Array, Array, Array]:
        chance = self.chances(self.contexts[slots])[np.arange(len(slots)), moves[:, 0]]
        paid = uniform(self.seeds[slots], np.array([self.width]))[:, 0] < chance
        over = np.ones(len(slots), np.bool_)
        return self.contexts[slots], paid.astype(np.float64), over, ~over

    def chances(self, contexts: Array) -> Array:
        """(contexts, arms) what each arm pays on average."""
        return np.asarray(1.0 / (1.0 + np.exp(-contexts.astype(np.float64) @ self.weights)))

    def regret(self, contexts: Array, chosen: Array) -> float:
        """Mean of what is lost against the best arm, as a share of what the best arm pays."""
        chances = self.chances(contexts)
        best = chances.max(1)
        return float((best - chances[np.arange(len(chances)), chosen]).mean() / best.mean())
