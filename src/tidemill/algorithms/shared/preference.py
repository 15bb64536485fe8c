"""What the algorithms that learn from pairs share: implied rewards, pairs joined by group id, statistics.

A pair is two rows of one group; the column `chosen` is 1.0 on the tokens of the better one. Both rows are in the same
micro-batch. With aggregation group_mean the weights of a pair's tokens add up to 1, so a loss is a mean over pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.algorithms.api import Algorithm, Stat, Stats, TokenBatch, segment_sum
from tidemill.algorithms.shared import tables
from tidemill.algorithms.shared.losses import row_lengths
from tidemill.batch import Batch
from tidemill.graph import Graph, Stage
from tidemill.imports import torch
from tidemill.recipe.config import Config, Preference

PAIRS = (*tables.OFFLINE, "chosen")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Indices of the two rows of each pair, and the pair's weight in the loss."""

    chosen: torch.Tensor  # (pairs,)
    rejected: torch.Tensor  # (pairs,)
    weight: torch.Tensor  # (pairs,)


def pairs_of(tokens: TokenBatch) -> Pairs:
    """Pairs by group id, whatever the order of rows."""
    assert tokens.group is not None, "pairs are joined by the rows' group ids"
    is_chosen = row_values(tokens.columns["chosen"], tokens) > 0.5
    groups, index = torch.unique(tokens.group, return_inverse=True)
    count = len(groups)
    rows = torch.arange(tokens.rows, device=index.device)
    chosen = torch.full((count,), -1, device=index.device).index_put((index[is_chosen],), rows[is_chosen])
    rejected = torch.full((count,), -1, device=index.device).index_put((index[~is_chosen],), rows[~is_chosen])
    if tokens.rows != 2 * count or bool((chosen < 0).any() | (rejected < 0).any()):
        raise ValueError("a group of preference data is one chosen and one rejected response")
    weight = segment_sum(segment_sum(tokens.weights, tokens.row, tokens.rows), index, count)
    return Pairs(chosen, rejected, weight)


def row_values(per_token: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """(tokens,) → (rows,) of a value that is the same at all tokens of a row."""
    count = segment_sum(torch.ones_like(per_token), tokens.row, tokens.rows).clamp(min=1.0)
    return segment_sum(per_token, tokens.row, tokens.rows) / count


def row_sums(per_token: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    return segment_sum(tokens.made(per_token), tokens.row, tokens.rows)


def row_means(per_token: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    return row_sums(per_token, tokens) / row_lengths(tokens).clamp(min=1.0)


def reward_stats(chosen: torch.Tensor, rejected: torch.Tensor) -> Stats:
    """Rewards of both sides, their margin, and how often the chosen one wins."""
    count = float(len(chosen))
    return {
        "chosen_reward": Stat(chosen.sum(), count),
        "rejected_reward": Stat(rejected.sum(), count),
        "margin": Stat((chosen - rejected).sum(), count),
        "preference_accuracy": Stat((chosen > rejected).sum(), count),
    }


def pair_stats(chosen: torch.Tensor, rejected: torch.Tensor, logprobs: torch.Tensor, pairs: Pairs) -> Stats:
    """Of implied rewards, with the log-probabilities they come from."""
    with torch.no_grad():
        count = float(len(chosen))
        return {
            **reward_stats(chosen, rejected),
            "chosen_logprob": Stat(logprobs[pairs.chosen].sum(), count),
            "rejected_logprob": Stat(logprobs[pairs.rejected].sum(), count),
        }


class PairPolicy(Algorithm):
    """A response's implied reward is β times its log-probability, less the reference's where there is one. What an
    algorithm adds is a loss of the two rewards of a pair."""

    input_kind = "pairs"
    has_reference = False
    per_token = True  # log-probabilities are means over a response's tokens, not sums

    def graph(self, config: Config) -> Graph:
        learn = Stage("learn", "actor", (*PAIRS, "ref_logprobs") if self.has_reference else PAIRS, (), "group")
        return Graph(self.name, PAIRS, (tables.reference(), learn) if self.has_reference else (learn,))

    def advantages(self, batch: Batch, config: Config) -> Batch:
        return Batch({})

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        settings, pairs = config.algorithm.preference, pairs_of(tokens)
        per_row = row_means if self.per_token else row_sums
        logprobs = per_row(tokens.logprobs, tokens)
        reward = settings.beta * logprobs
        if self.has_reference:
            assert tokens.ref_logprobs is not None
            reward = reward - settings.beta * per_row(tokens.ref_logprobs, tokens)
        chosen, rejected = reward[pairs.chosen], reward[pairs.rejected]
        per_pair = self.pair_loss(chosen, rejected, settings)
        if settings.sft_coef:
            per_pair = per_pair - settings.sft_coef * row_means(tokens.logprobs, tokens)[pairs.chosen]
        return (pairs.weight * per_pair).sum(), pair_stats(chosen, rejected, logprobs, pairs)

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
        raise NotImplementedError


def logistic(chosen: torch.Tensor, rejected: torch.Tensor, settings: Preference) -> torch.Tensor:
    """−log σ(h), h = chosen − rejected − margin; with a share ε of wrong labels −(1 − ε) log σ(h) − ε log σ(−h)."""
    h, wrong = chosen - rejected - settings.margin, settings.label_smoothing
    return -(1.0 - wrong) * torch.nn.functional.logsigmoid(h) - wrong * torch.nn.functional.logsigmoid(-h)
