"""The mismatch meter: in every run, how far the rollout engine's log-probabilities are from the learner's for the same
tokens and the same weights, and what that does to the importance ratio."""

from __future__ import annotations

from dataclasses import replace

from tidemill.algorithms.api import Stats, TokenBatch
from tidemill.algorithms.shared.losses import extreme, mean_stat
from tidemill.batch import Batch
from tidemill.models.upload import upload


def mismatch(part: Batch, tokens: TokenBatch, version: int, engine: str) -> Stats:
    """Of the tokens that the weights of `version`, now scoring them, made themselves; of others the difference would
    also hold what was learned since. Nothing where there are none."""
    if "versions" not in part or tokens.rollout_logprobs is None:
        return {}
    made = part["versions"].values == version
    if not made.any():
        return {}
    ours = replace(tokens, mask=upload(made, tokens.mask.device).to(tokens.mask.dtype) * tokens.mask)
    gap = ours.made(tokens.logprobs.detach() - tokens.rollout_logprobs)
    found = {
        "mean": mean_stat(gap.abs(), ours),
        "max": extreme(gap.abs(), ours, "max"),
        "ratio_mean": mean_stat(gap.exp(), ours),
        "ratio_max": extreme(gap.exp(), ours, "max"),
    }
    return {f"mismatch/{engine}/{name}": stat for name, stat in found.items()}
