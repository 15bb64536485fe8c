"""Inventory control with lost sales and a lead time, whose best average cost is known by dynamic programming.

Each period an order is placed, which arrives `lead` periods later, and demand is drawn; demand beyond the stock is
lost. A unit left costs `holding`, a unit of lost demand `penalty`. The classical instances (Zipkin 2008, Operations
Research 56(5)) have Poisson demand with mean 5, holding 1 and penalties from 4 to 39; base-stock rules are not optimal
there.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.environment.vector.random import uniform
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
SCALE = 10.0  # units of stock to one unit of an observation, and of cost to one of reward


class Inventory:
    def __init__(
        self, count: int, mean: float = 5.0, lead: int = 2, holding: float = 1.0, penalty: float = 4.0,
        most_order: int = 12, periods: int = 200,
    ) -> None:  # fmt: skip
        self.mean, self.lead, self.holding, self.penalty = mean, lead, holding, penalty
        self.most_order, self.periods = most_order, periods
        self.spaces = Spaces(observation=(lead,), choices=(most_order + 1,))
        self.chances = poisson(mean)
        self._sums = np.cumsum(self.chances)
        self.stock = np.zeros((count, lead), np.int64)  # on hand, then what arrives in one period, two, …
        self.seeds, self.period = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def reset(self, slots: Array, seeds: Array) -> Array:
        self.seeds[slots], self.period[slots] = seeds, 0
        begun = uniform(seeds, np.arange(self.lead) + 100_000) * 2.0 * self.mean
        self.stock[slots] = begun.astype(np.int64)
        return self._seen(slots)

    def step(self, slots: Array, moves: Array) -> tuple[Array, Array, Array, Array]:
        chance = uniform(self.seeds[slots] * 4096 + self.period[slots], np.zeros(1, np.int64))[:, 0]
        demand = np.searchsorted(self._sums, chance).clip(max=len(self._sums) - 1)
        stock = self.stock[slots]
        left, lost = np.maximum(stock[:, 0] - demand, 0), np.maximum(demand - stock[:, 0], 0)
        self.stock[slots] = np.concatenate([left[:, None], stock[:, 1:], moves[:, :1]], 1)[:, 1:]
        self.stock[slots, 0] += left
        self.period[slots] += 1
        cost = self.holding * left + self.penalty * lost
        is_cut = self.period[slots] >= self.periods
        return self._seen(slots), -cost / SCALE, np.zeros(len(slots), np.bool_), is_cut

    def _seen(self, slots: Array) -> Array:
        return (self.stock[slots] / SCALE).astype(np.float32)

    def picture(self, slot: int) -> Array:
        """Stock on hand in blue, what is on its way in grey, a unit a line."""
        high, wide = 120, 40
        drawn = np.full((high, wide * self.lead, 3), 255, np.uint8)
        for i, units in enumerate(self.stock[slot].tolist()):
            colour = (40, 90, 200) if i == 0 else (160, 160, 160)
            drawn[high - min(high, 4 * units) :, i * wide + 4 : (i + 1) * wide - 4] = colour
        return drawn

    # What is known

    def model(self, most_stock: int = 40) -> Model:
        return Model(self, most_stock)


def poisson(mean: float, least: float = 1e-12) -> npt.NDArray[np.float64]:
    """Probabilities of 0, 1, … as far as they matter."""
    found = [math.exp(-mean)]
    while found[-1] > least or len(found) < mean:
        found.append(found[-1] * mean / len(found))
    return np.array(found) / sum(found)


class Model:
    """All states of an inventory and what leads from one to another: average costs without any sampling."""

    def __init__(self, own: Inventory, most_stock: int) -> None:
        """Stock on hand above `most_stock` counts as that much: no sensible rule ever comes there."""
        self.own, orders = own, own.most_order + 1
        shape = (most_stock + 1, *(orders,) * (own.lead - 1))
        self.states = np.array(list(product(*map(range, shape))), np.int64)
        on_hand, demand = self.states[:, :1], np.arange(len(own.chances))[None]
        left, lost = np.maximum(on_hand - demand, 0), np.maximum(demand - on_hand, 0)
        self.costs = ((own.holding * left + own.penalty * lost) * own.chances).sum(1)
        # After demand d and order q: stock on hand is what is left and what arrives, the pipeline moves up.
        chain = self.states[:, 1:]
        place = np.array([math.prod(shape[i + 1 :]) for i in range(own.lead)])
        self.next = np.empty((orders, *left.shape), np.int64)
        for order in range(orders):
            pipeline = np.concatenate([chain, np.full((len(chain), 1), order)], 1)
            hand = np.minimum(left + pipeline[:, :1], most_stock)
            self.next[order] = hand * place[0] + (pipeline[:, 1:] @ place[1:])[:, None]

    def best(self, tolerance: float = 1e-7) -> tuple[float, Array]:
        """The smallest average cost, and an order for each state (relative value iteration)."""
        values = np.zeros(len(self.states))
        while True:
            worth = np.stack([(values[after] * self.own.chances).sum(1) for after in self.next])
            new = self.costs + worth.min(0)
            change = new - values
            if change.max() - change.min() < tolerance:
                return float((change.max() + change.min()) / 2), worth.argmin(0)
            values = new - new[0]

    def cost(self, orders: Array, tolerance: float = 1e-9) -> float:
        """The average cost of a rule: an order for each state, from the states that it comes to."""
        after = self.next[orders, np.arange(len(self.states))]
        share = np.full(len(self.states), 1.0 / len(self.states))
        while True:
            new = np.bincount(after.ravel(), (share[:, None] * self.own.chances).ravel(), len(share))
            new = 0.5 * (new + share)  # a rule that orders every other period has no limit without this
            if np.abs(new - share).sum() < tolerance:
                return float(new @ self.costs)
            share = new

    def orders_of(self, policy: Any) -> Array:
        """What a network orders in each state, by its likeliest action."""
        policy.serve()
        seen = (self.states / SCALE).astype(np.float32)
        chosen: Array = policy.act(seen, None).actions[:, 0]
        return chosen
