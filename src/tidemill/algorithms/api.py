"""What an algorithm is: a table of stages, an advantage per sample or token, and a loss over packed tokens.

A loss is a weighted sum over response tokens, `sum(weights * per_token)`. The weights carry the aggregation (what the
mean is taken over) and are worked out once for a whole update, so the loss does not depend on how the update is cut
into micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tidemill.batch import Batch
from tidemill.graph import Graph
from tidemill.imports import torch
from tidemill.recipe.config import Config

Kept = npt.NDArray[np.bool_]
Reduce = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Stat:
    """One metric of one micro-batch, in a form that adds up: `value` is a sum (for mean and sum) or an extreme."""

    value: torch.Tensor | float
    count: torch.Tensor | float = 1.0  # what a mean divides by; of an extreme: 0 where there was nothing to look at
    reduce: Reduce = "mean"


Stats = dict[str, Stat]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The response tokens of one micro-batch, packed: every tensor is (tokens,). No sample is split."""

    logprobs: torch.Tensor  # of the policy being learned; carries gradient
    old_logprobs: torch.Tensor  # of the policy the ratio compares with
    advantages: torch.Tensor
    weights: torch.Tensor  # of each token in the update's loss; 0 for tokens the model did not make
    mask: torch.Tensor  # 1.0 for tokens the model made, else 0.0
    row: torch.Tensor  # index of the token's sample in this micro-batch
    rows: int
    entropy: torch.Tensor | None = None  # carries gradient when the loss asks for it
    ref_logprobs: torch.Tensor | None = None
    rollout_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None  # a critic's new values; carries gradient
    group: torch.Tensor | None = None  # (rows,) group id of each sample
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # other columns, one value per token

    def made(self, x: torch.Tensor) -> torch.Tensor:
        """x at the tokens that the model made, 0 elsewhere. Selects: a value that is not finite times 0 is not 0."""
        return torch.where(self.mask > 0, x, torch.zeros_like(x))

    def weighted(self, per_token: torch.Tensor) -> torch.Tensor:
        """The sum over the tokens that the model made, each with its weight in the update."""
        return self.made(self.weights * per_token).sum()


# What rows an algorithm learns from. prompts: rollout makes the responses. The others come with their tokens:
# responses (to imitate), pairs (chosen and rejected, one group each), judged (each response good or bad).
InputKind = Literal["prompts", "responses", "pairs", "judged"]


class Algorithm(Protocol):
    """One file in algorithms/, called as its `name`: table, loss, and its facts. Stateless: settings come in with the
    config. The defaults below suit most. Which roles it needs (critic, reference, …) its table says."""

    name: str
    about: str  # one line, for lists
    input_kind: InputKind = "prompts"
    paper: Mapping[str, Any] = {}  # settings of `algorithm` that its paper chose otherwise than the defaults
    own_settings: tuple[str, ...] = ()  # settings of `algorithm` that no other one reads
    compares_samples: bool = False  # advantages compare the samples of one prompt: one alone teaches nothing
    credits_turns: bool = False  # it knows `credit.by: turn`
    has_critic: bool = False  # a value model is learned beside the policy, with `value_loss`
    learns_values: bool = False  # the model learned is itself a value model: `loss` reads `tokens.values`
    policies: tuple[str, ...] = ("decoder",)  # what it can teach: a decoder, a network
    judges: Literal["states", "actions", "nothing"] = "nothing"  # of a network: what its critic gives values to
    is_replayed: bool = False  # of a network: samples stay in the dock, and are learned from many times
    greedy_rows: int = 0  # samples of each group decoded greedily, to compare the others with

    def graph(self, config: Config) -> Graph: ...

    def unused(self, config: Config) -> dict[str, str]:
        """Shared settings of `algorithm` that change nothing here, each with the reason: they are refused."""
        return {}

    def advantages(self, batch: Batch, config: Config) -> Batch:
        """For complete groups: what the stage `advantage` writes; `advantages` is one float32 per sample or token."""

    def loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]: ...

    def closed_form(self, config: Config) -> Mapping[str, float] | None:
        """What `loss` comes to for a network, where it is one that `models/network/network.c` computes; else None."""
        return None

    def value_loss(self, tokens: TokenBatch, config: Config) -> tuple[torch.Tensor, Stats]:
        """What the critic learns from, for an algorithm that has one."""
        return 0.0 * tokens.weights.sum(), {}

    def explores(self, config: Config, decisions: int) -> float:
        """Share of a network's decisions that are drawn evenly, once so many were made."""
        return 0.0

    def keep(self, batch: Batch, config: Config) -> Kept:
        """Which rows go on from `advantage` to `learn`; the others end there, are counted, and new prompts replace
        groups of which nothing is left."""
        return np.ones(batch.rows, np.bool_)

    def teaches(self, batch: Batch, config: Config) -> Kept:
        """Which rows can have a gradient. The others are scored for the metrics and spared the backward pass."""
        return np.ones(batch.rows, np.bool_)

    def wants_whole_step(self, config: Config) -> bool:
        """Whether `advantages` and `keep` must see all groups of a step at once."""
        return False


def total(stats: list[Stats]) -> dict[str, float]:
    """Metrics of many micro-batches (of one or many ranks) as one number each."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(n for s in stats for n in s):
        parts = [s[name] for s in stats if name in s]
        if parts[0].reduce in ("max", "min"):
            parts = [p for p in parts if float(p.count)]
            if not parts:
                continue
        values = [float(p.value) for p in parts]
        match parts[0].reduce:
            case "mean":
                count = sum(float(p.count) for p in parts)
                merged[name] = sum(values) / count if count else 0.0
            case "sum":
                merged[name] = sum(values)
            case "max":
                merged[name] = max(values)
            case "min":
                merged[name] = min(values)
    return merged


def segment_sum(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """(tokens,) → (rows,): the sum over each sample's tokens."""
    return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add_(0, row, values)
