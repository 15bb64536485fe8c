"""GRPO against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from tidemill.algorithms.api import TokenBatch, total
from tidemill.algorithms.shared import registry
from tidemill.algorithms.shared.advantages import group_advantages
from tidemill.algorithms.shared.aggregate import local_weights, whole
from tidemill.batch import Batch, Column
from tidemill.errors import ConfigError
from tidemill.graph import Graph, GraphError, Stage
from tidemill.recipe.config import AlgorithmSettings, Config


def tokens_of(logprobs, old, advantages, weights, **more) -> TokenBatch:
    n = len(logprobs)
    as_tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    policy = as_tensor(logprobs).requires_grad_()
    row = torch.arange(n)
    return TokenBatch(
        policy, as_tensor(old), as_tensor(advantages), as_tensor(weights), torch.ones(n).double(), row, n, **more
    )


def test_advantages_by_hand() -> None:
    # Group 7: rewards 1, 0, 0, 1; mean 1/2; squares 4 · 1/4; sample variance 1/3.
    got = group_advantages([1, 0, 5, 0, 1, 5], [7, 7, 2, 7, 7, 2], std_eps=0.0)
    a = 0.5 / math.sqrt(1 / 3)
    assert got == pytest.approx([a, -a, 0, -a, a, 0])
    # Population: std 1/2, plus the epsilon.
    got = group_advantages([1, 0, 0, 1], [0, 0, 0, 0], std_bias="population", std_eps=0.1)
    assert got == pytest.approx([0.5 / 0.6, -0.5 / 0.6, -0.5 / 0.6, 0.5 / 0.6])
    # Leave one out: 3 − mean(0, 0) = 3, 0 − mean(3, 0) = −1.5.
    got = group_advantages([3, 0, 0], [1, 1, 1], baseline="leave_one_out", scale="none")
    assert got == pytest.approx([3, -1.5, -1.5])


def test_equal_rewards_and_groups_of_one_have_no_advantage_and_no_nan() -> None:
    got = group_advantages([0.1, 0.1, 0.1, 7.0], [1, 1, 1, 2], std_eps=0.0)
    assert got.tolist() == [0, 0, 0, 0]
    assert group_advantages([7.0], [0], group_of_one="reward").tolist() == [7.0]


def test_clipped_loss_by_hand() -> None:
    config = Config(algorithm={"clip_low": 0.2, "clip_high": 0.3})
    # Ratios 1.5 (A=+1: clipped to 1.3), 0.5 (A=−1: clipped to 0.8), 0.9 (A=2: free), 1.5 (A=−1: free, −1.5).
    ratio = [1.5, 0.5, 0.9, 1.5]
    tokens = tokens_of([math.log(r) - 1 for r in ratio], [-1.0] * 4, [1.0, -1.0, 2.0, -1.0], [0.25] * 4)
    loss, stats = registry.get("grpo").loss(tokens, config)
    assert loss.item() == pytest.approx(-(1.3 - 0.8 + 1.8 - 1.5) / 4)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs)
    assert gradient.tolist() == pytest.approx([0, 0, -0.25 * 0.9 * 2, 0.25 * 1.5])
    metrics = total([stats])
    assert metrics["clip_share_high"] == metrics["clip_share_low"] == 0.25
    assert metrics["ratio_mean"] == pytest.approx(sum(ratio) / 4)
    assert metrics["ratio_max"] == pytest.approx(1.5)


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    tokens = tokens_of([math.log(10.0)], [0.0], [-1.0], [1.0])
    assert registry.get("grpo").loss(tokens, Config())[0].item() == pytest.approx(10.0)
    assert registry.get("grpo").loss(tokens, Config(algorithm={"dual_clip": 3.0}))[0].item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("estimator", "by_hand"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5), ("abs", 0.5)]
)
def test_kl_to_the_reference_joins_the_loss(estimator: str, by_hand: float) -> None:
    config = Config(algorithm={"kl": {"coef": 0.1, "estimator": estimator}})
    tokens = tokens_of([-1.5], [-1.5], [2.0], [1.0], ref_logprobs=torch.tensor([-1.0], dtype=torch.float64))
    loss, stats = registry.get("grpo").loss(tokens, config)
    assert loss.item() == pytest.approx(-2.0 + 0.1 * by_hand)
    assert total([stats])["kl"] == pytest.approx(by_hand)


def test_kl_in_the_reward_is_taken_from_it_before_the_groups_mean() -> None:
    config = Config(algorithm={"advantage_scale": "none", "kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}})
    batch = Batch(
        {
            "group": np.array([1, 1]),
            "reward": np.array([1.0, 0.0], np.float32),
            "mask": Column.jagged([[1, 0], [1]], np.uint8),
            "logprobs": Column.jagged([[-1.0, -5.0], [-2.0]], np.float32),
            "ref_logprobs": Column.jagged([[-2.0, -1.0], [-1.0]], np.float32),
        }
    )
    # 1 − 0.1·1 = 0.9 and 0 − 0.1·(−1) = 0.1; the second token of the first row is not the model's.
    assert registry.get("grpo").advantages(batch, config).values("advantages") == pytest.approx([0.4, -0.4])


def weights_of(how: str, masks: list[list[int]], group: list[int]) -> list[float]:
    batch = Batch({"group": np.array(group), "mask": Column.jagged(masks, np.uint8)})
    config = Config(algorithm={"aggregation": how, "constant_length": 10})
    local = np.repeat(local_weights(batch, config), batch["mask"].lengths) * batch.values("mask")
    return (local / whole(batch, config)).tolist()


def test_token_weights_by_hand() -> None:
    masks, group = [[1, 1, 0, 1], [1], [1, 1]], [4, 4, 9]
    third, sixth = 1 / 3, 1 / 6
    assert weights_of("token_mean", masks, group) == pytest.approx([sixth, sixth, 0, sixth, sixth, sixth, sixth])
    sample = [third / 3, third / 3, 0, third / 3, third, third / 2, third / 2]
    assert weights_of("sample_mean", masks, group) == pytest.approx(sample)
    assert weights_of("group_mean", masks, group) == pytest.approx([1 / 8, 1 / 8, 0, 1 / 8, 1 / 8, 1 / 4, 1 / 4])
    assert weights_of("constant", masks, group) == pytest.approx([1 / 30, 1 / 30, 0, 1 / 30, 1 / 30, 1 / 30, 1 / 30])


def test_optional_columns_appear_only_when_settings_need_them() -> None:
    plain = registry.get("grpo").graph(Config())
    assert [s.name for s in plain.stages] == ["rollout", "reward", "advantage", "learn"]
    full = registry.get("grpo").graph(Config(algorithm={"old_logprobs": "recompute", "kl": {"coef": 0.1}}))
    assert [s.name for s in full.stages] == ["rollout", "reward", "old_logprobs", "reference", "advantage", "learn"]


def test_a_column_that_no_stage_writes_names_the_stage() -> None:
    with pytest.raises(GraphError, match="stage 'learn' reads column 'advantage', but no stage writes it"):
        Graph("mine", ("id",), (Stage("learn", "actor", ("advantage",)),))


def test_an_unknown_algorithm_shows_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*grpo"):
        registry.get("gpro")


def test_the_papers_choice_is_the_default_and_the_recipes_wins() -> None:
    assert AlgorithmSettings(name="grpo").aggregation == "sample_mean"
    assert Config().algorithm.aggregation == "sample_mean"
    assert AlgorithmSettings(name="grpo", aggregation="constant").aggregation == "constant"


def test_responses_cut_off_are_left_out_where_the_recipe_says_so() -> None:
    batch = Batch(
        {"group": np.array([1, 1, 2]), "reward": np.ones(3, np.float32), "finish": np.array([0, 1, 1], np.int8)}
    )
    assert registry.get("grpo").keep(batch, Config()).tolist() == [True, True, True]
    dropping = Config(algorithm={"overlong": {"drop_truncated": True}})
    assert registry.get("grpo").keep(batch, dropping).tolist() == [True, False, False]
    assert "finish" in registry.get("grpo").graph(dropping).stage("advantage").reads


@pytest.mark.parametrize("name", ["rejection", "distill"])
def test_responses_cut_off_are_left_out_by_those_who_keep_by_other_rules_too(name: str) -> None:
    batch = Batch(
        {
            "id": np.arange(3),
            "group": np.array([1, 1, 2]),
            "reward": np.array([0.1, 0.9, 0.5], np.float32),
            "correct": np.ones(3, np.uint8),
            "mask": Column.jagged([[1]] * 3, np.uint8),
            "finish": np.array([0, 1, 1], np.int8),
        }
    )
    dropping = Config(algorithm={"name": name, "overlong": {"drop_truncated": True}})
    assert registry.get(name).keep(batch, dropping).tolist() == [True, False, False]
    assert "finish" in registry.get(name).graph(dropping).stage("advantage").reads
    best = Config(algorithm={"name": "rejection", "keep_best": 1, "overlong": {"drop_truncated": True}})
    assert registry.get("rejection").keep(batch, best).tolist() == [True, False, False]  # the best was cut off


def test_of_the_correct_responses_only_the_best_are_imitated() -> None:
    batch = Batch(
        {
            "id": np.array([0, 1, 2, 3, 4]),
            "group": np.array([1, 1, 1, 2, 2]),
            "reward": np.array([0.5, 0.9, 0.9, 0.1, 0.8], np.float32),
            "correct": np.array([1, 1, 1, 1, 0], np.uint8),
            "mask": Column.jagged([[1]] * 5, np.uint8),
        }
    )
    assert registry.get("rejection").keep(batch, Config(algorithm="rejection")).tolist() == [1, 1, 1, 1, 0]
    best = Config(algorithm={"name": "rejection", "keep_best": 1})
    # Equal rewards: the lower id. In the second group a wrong response has the higher reward.
    assert registry.get("rejection").keep(batch, best).tolist() == [0, 1, 0, 1, 0]
