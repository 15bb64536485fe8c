"""Credit by turn: rewards by turn, discounted, compared over trajectories of different lengths."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.algorithms.shared import credit
from tidemill.algorithms.shared.registry import get
from tidemill.batch import GROUP, ID, Batch, Column
from tidemill.check.rules import problems
from tidemill.recipe.config import Config

# Two turns, one, and three; answers of others (mask 0) in between.
MASKS = [[1, 1, 0, 1], [1, 1, 1], [1, 0, 1, 0, 0, 1, 1]]
TURNS = [[0, 3], [0], [0, 2, 5]]
REWARDS = [[1.0, 2.0], [4.0], [0.0, 0.0, 3.0]]


def batch(masks=MASKS, turns=TURNS, rewards=REWARDS, extra=0.0, **columns):
    return Batch(
        {
            ID: np.arange(len(masks)),
            GROUP: np.zeros(len(masks), np.int64),
            "reward": np.array([sum(r) + extra for r in rewards], np.float32),
            "mask": Column.jagged(masks, np.uint8),
            "turns": Column.jagged(turns, np.int32),
            "turn_rewards": Column.jagged(rewards, np.float32),
            **columns,
        }
    )


def config(name="grpo", by="turn", **settings):
    own = {"discount": settings.pop("discount", 1.0), "baseline": settings.pop("compared", "turn")}
    return Config.model_validate(
        {
            "environment": {"name": "nim"},
            "rewards": "environment",
            "algorithm": {"name": name, "credit": {"by": by, **own}, **settings},
        }
    )


def rows(column):
    return [column[i].tolist() for i in range(len(MASKS))]


def test_returns_are_compared_with_those_of_trajectories_that_came_so_far():
    made = rows(credit.compared(batch(), config(advantage_scale="none")))
    # Returns: 3 2 | 4 | 3 3 3. First turns 3 4 3, second ones 2 3, one third turn alone.
    first = np.array([3, 4, 3]) - 10 / 3
    assert made[0] == pytest.approx([first[0], first[0], 0, -0.5])
    assert made[1] == pytest.approx([first[1]] * 3)
    assert made[2] == pytest.approx([first[2], 0, 0.5, 0, 0, 0, 0])


def test_a_discount_of_nothing_leaves_each_turn_its_own_reward():
    made = rows(credit.compared(batch(), config(advantage_scale="none", baseline="none", discount=0.0)))
    assert made == [[1, 1, 0, 2], [4, 4, 4], [0, 0, 0, 0, 0, 3, 3]]


def test_later_rewards_count_less():
    made = rows(credit.compared(batch(), config(advantage_scale="none", baseline="none", discount=0.5)))
    assert made == [[2, 2, 0, 2], [4, 4, 4], [0.75, 0, 1.5, 0, 0, 3, 3]]


def test_all_turns_of_a_group_may_be_compared():
    made = credit.compared(batch(), config(advantage_scale="none", compared="group"))
    mean = (3 + 2 + 4 + 3 + 3 + 3) / 6
    assert made[0].tolist() == pytest.approx([3 - mean, 3 - mean, 0, 2 - mean])


def test_what_other_rewards_give_belongs_to_the_last_turn():
    made = rows(credit.compared(batch(extra=10.0), config(advantage_scale="none", baseline="none", discount=0.0)))
    assert made[0] == [1, 1, 0, 12] and made[2][-1] == 13


def test_one_turn_by_turn_is_the_trajectorys_advantage():
    one = batch([[1, 1], [1], [1, 1, 1]], [[0], [0], [0]], [[1.0], [0.0], [2.0]])
    by_turn = credit.compared(one, config())
    whole = credit.compared(one, config(by="trajectory"))
    for i in range(3):
        assert set(by_turn[i].tolist()) == {whole.values[i]}


def test_turns_of_several_trajectories_are_counted_in_the_order_they_were_said():
    made = batch([[1, 1, 1, 0, 1]], [[0, 4, 2]], [[1.0, 2.0, 4.0]])  # the second turn lies last
    found = credit.compared(made, config(advantage_scale="none", baseline="none", discount=0.5))[0].tolist()
    assert found == [3.0, 3.0, 4.0, 0.0, 4.0]


def test_a_seat_is_compared_with_its_own():
    four = batch([[1]] * 4, [[0]] * 4, [[1.0], [-1.0], [3.0], [-3.0]], seat=np.array([0, 1, 0, 1], np.int8))
    made = credit.compared(four, config(by="trajectory", advantage_scale="none")).values
    assert made.tolist() == [-1.0, 1.0, 1.0, -1.0]


def test_token_rewards_stand_at_the_last_token_of_each_turn():
    found = credit.token_rewards(batch(), config("ppo"))
    assert found.tolist() == [0, 1, 0, 2, 0, 0, 4, 0, 0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_every_algorithm_that_takes_it_gives_tokens_of_different_turns_different_advantages(name):
    made = get(name).advantages(batch(), config(name, discount=1.0))["advantages"]
    values = made[0].tolist()
    assert values[0] == values[1] != values[3] and values[2] == 0.0


def test_what_cannot_take_it_is_refused():
    refused = [text for text in problems(config("remax")) if "algorithm.credit.by" in text]
    assert len(refused) == 1 and "one advantage per sample" in refused[0]
    assert any("discount" in text for text in problems(config("reinforce_pp", discount=0.5)))
    assert not any("credit" in text for text in problems(config("grpo", discount=0.5)))
