"""Built-in tasks are what their descriptions say, and what is known about them is right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tidemill.environment.tasks.bandit import Bandit
from tidemill.environment.tasks.connect_four import ConnectFour, one_ply, random_player, scores, two_ply
from tidemill.environment.tasks.inventory import Inventory


def game(columns: list[int]) -> ConnectFour:
    made, own = ConnectFour(1), np.arange(1)
    made.begin(own)
    for column in columns:
        made.move(own, np.array([column]))
    return made


@pytest.mark.parametrize(
    ("columns", "winner"),
    [
        ([0, 1, 0, 1, 0, 1, 0], 1),  # four above each other
        ([0, 0, 1, 1, 2, 2, 3], 1),  # beside each other
        ([0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3], 1),  # rising
        ([6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3], 1),  # falling
        ([0, 1, 0, 1, 0, 1], 0),  # not yet
        ([2, 0, 2, 1, 3, 5, 6, 6], 0),  # three, a gap
    ],
)
def test_four_in_a_row_win(columns: list[int], winner: int) -> None:
    made, own = ConnectFour(1), np.arange(1)
    made.begin(own)
    told = [made.move(own, np.array([column])) for column in columns]
    assert [bool(over[0]) for over, _ in told] == [False] * (len(columns) - 1) + [bool(winner)]
    assert told[-1][1][0] == winner


def test_a_move_into_a_full_column_loses() -> None:
    made, own = game([3] * 6), np.arange(1)
    over, gain = made.move(own, np.array([3]))
    assert over[0] and gain[0] == -1


def test_players_of_known_strength_see_what_they_should() -> None:
    threat = game([0, 1, 0, 1, 0, 6])  # the player to move wins in column 0
    danger = game([0, 1, 0, 1, 0])  # the other one would
    chance = np.array([0.99])
    assert one_ply(threat.seen(np.arange(1)), chance)[0] == 0
    assert two_ply(danger.seen(np.arange(1)), chance)[0] == 0
    assert one_ply(danger.seen(np.arange(1)), chance)[0] != 0
    assert random_player(game([6] * 6).seen(np.arange(1)), chance)[0] != 6


def searched(columns: list[int], depth: int) -> int:
    """Plain twin of the solver: who wins with best play within so many moves (1, 0 or −1 for the player to move)."""
    best = -1
    for column in range(7):
        if columns.count(column) == 6:
            continue
        made, own = game(columns), np.arange(1)
        over, gain = made.move(own, np.array([column]))
        worth = int(gain[0]) if over[0] or depth == 1 else -searched([*columns, column], depth - 1)
        best = max(best, worth)
    return best


def test_the_solver_finds_what_plain_search_finds() -> None:
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(7):
        columns: list[int] = []
        while len(columns) < 12:
            column = int(rng.integers(7))
            if columns.count(column) < 6:
                columns.append(column)
        whole = [game(columns[:n]) for n in range(1, 13)]
        if any(_is_over(columns[:n]) for n in range(7, 13)):
            continue
        found = np.sign(scores(*_boards(whole[-1]), 3)[0].max())
        kinds.add(int(found))
        assert found == searched(columns, 3), columns
    assert len(kinds) > 1


def _is_over(columns: list[int]) -> bool:
    before = game(columns[:-1])
    return bool(before.move(np.arange(1), np.array([columns[-1]]))[0][0])


def _boards(made: ConnectFour) -> tuple[np.ndarray, np.ndarray]:
    return made.own, made.taken


def test_the_best_inventory_rule_costs_what_is_published() -> None:
    """Zipkin 2008: with a penalty of 4 and Poisson demand 4.04 at a lead time of 1, 4.40 at 2."""
    assert Inventory(1, lead=1, most_order=15).model().best()[0] == pytest.approx(4.04, abs=0.01)
    assert Inventory(1, lead=2, most_order=15).model().best()[0] == pytest.approx(4.40, abs=0.01)


def test_costs_without_sampling_are_those_of_a_simulation() -> None:
    own = Inventory(400, lead=2, periods=10_000)
    model = own.model()
    best, orders = model.best()
    assert model.cost(orders) == pytest.approx(best, abs=1e-4)
    slots, place = np.arange(400), np.array([own.most_order + 1, 1])
    own.reset(slots, slots)
    costs = []
    for _ in range(250):
        state = np.minimum(own.stock, [40, own.most_order]) @ place
        costs.append(-own.step(slots, orders[state][:, None])[1].mean() * 10)
    assert np.mean(costs[50:]) == pytest.approx(best, rel=0.02)


def test_no_rule_beats_the_best_one() -> None:
    model = Inventory(1, lead=1, most_order=9).model(20)
    best, orders = model.best()
    for base in range(4, 14):
        rule = np.clip(base - model.states[:, 0], 0, 9)
        assert model.cost(rule) >= best - 1e-6
    assert model.cost(orders) == pytest.approx(best, abs=1e-4)


def test_arms_pay_as_often_as_they_should() -> None:
    own = Bandit(20_000)
    slots = np.arange(20_000)
    contexts = own.reset(slots, slots).copy()
    for arm in (0, 3):
        own.reset(slots, slots)
        _, paid, over, cut = own.step(slots, np.full((len(slots), 1), arm))
        assert over.all() and not cut.any() and set(np.unique(paid)) == {0.0, 1.0}
        assert paid.mean() == pytest.approx(own.chances(contexts)[:, arm].mean(), abs=0.01)
    assert own.regret(contexts, own.chances(contexts).argmax(1)) == 0.0
    assert own.regret(contexts, np.zeros(len(slots), np.int64)) > 0.1


def test_tasks_are_decided_by_their_seeds() -> None:
    for made in (Bandit, Inventory):
        first, second = made(4), made(7)
        slots = np.arange(4)
        assert np.array_equal(first.reset(slots, slots + 9), second.reset(slots, slots + 9))
        told = [own.step(slots, np.ones((4, 1), np.int64)) for own in (first, second)]
        assert all(np.array_equal(a, b) for a, b in itertools.zip_longest(*told))
