"""What the algorithms that learn from pairs share: sums over responses, pairs joined by group id, statistics.

A pair is two rows of one group; the column `chosen` is 1.0 on the tokens of the better one. Both rows are in the same
micro-batch. With aggregation group_mean the weights of a pair's tokens add up to 1, so a loss is a mean over pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.algorithms import tables
from tidemill.algorithms.api import Stat, Stats, TokenBatch, segment_sum
from tidemill.algorithms.losses import row_lengths
from tidemill.graph import Graph, Stage

PAIRS = (*tables.OFFLINE, "chosen")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Indices of the two rows of each pair, and the pair's weight in the loss."""

    chosen: Tensor  # (pairs,)
    rejected: Tensor  # (pairs,)
    weight: Tensor  # (pairs,)


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


def row_values(per_token: Tensor, tokens: TokenBatch) -> Tensor:
    """(tokens,) → (rows,) of a value that is the same at all tokens of a row."""
    count = segment_sum(torch.ones_like(per_token), tokens.row, tokens.rows).clamp(min=1.0)
    return segment_sum(per_token, tokens.row, tokens.rows) / count


def row_sums(per_token: Tensor, tokens: TokenBatch) -> Tensor:
    return segment_sum(per_token * tokens.mask, tokens.row, tokens.rows)


def row_means(per_token: Tensor, tokens: TokenBatch) -> Tensor:
    return row_sums(per_token, tokens) / row_lengths(tokens).clamp(min=1.0)


def pair_stats(chosen: Tensor, rejected: Tensor, logprobs: Tensor, pairs: Pairs) -> Stats:
    """Implied rewards of both sides, their margin, and how often the chosen one wins."""
    with torch.no_grad():
        count = float(len(chosen))
        return {
            "chosen_reward": Stat(chosen.sum(), count),
            "rejected_reward": Stat(rejected.sum(), count),
            "margin": Stat((chosen - rejected).sum(), count),
            "preference_accuracy": Stat((chosen > rejected).sum(), count),
            "chosen_logprob": Stat(logprobs[pairs.chosen].sum(), count),
            "rejected_logprob": Stat(logprobs[pairs.rejected].sum(), count),
        }


def graph(name: str, needs_reference: bool) -> Graph:
    reads = PAIRS
    stages: tuple[Stage, ...] = (
        Stage("learn", "actor", (*reads, "ref_logprobs") if needs_reference else reads, (), "group"),
    )
    if needs_reference:
        stages = (tables.reference(), *stages)
    return Graph(name, PAIRS, stages)
