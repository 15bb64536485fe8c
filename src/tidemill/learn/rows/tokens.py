"""A loss's view of a micro-batch, and its statistics: brought to the host, carried between ranks, metered."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Stat, Stats, TokenBatch
from tidemill.algorithms.shared.losses import extreme, mean_stat
from tidemill.batch import Batch
from tidemill.device.vendor import widest
from tidemill.learn.forward import Scores
from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.upload import upload


def token_batch(batch: Batch, packed: PackedBatch, scores: Scores, values: Tensor | None = None) -> TokenBatch:
    """The loss's view of a micro-batch: every column spread over its response tokens."""
    device = packed.row.device

    def spread(name: str) -> Tensor:
        column = batch[name]
        values = upload(column.gather(np.arange(batch.rows)).values, device, np.float32)
        return values[packed.row] if column.offsets is None else values

    def maybe(name: str) -> Tensor | None:
        return spread(name) if name in batch else None

    mask, now = spread("mask"), scores[0].detach()
    rollout, advantages = maybe("logprobs"), maybe("advantages")
    old = maybe("old_logprobs")
    if old is None:
        old = now if rollout is None else rollout
    own = {"tokens", "prompt", "mask", "logprobs", "old_logprobs", "ref_logprobs", "advantages", "weight", "versions"}
    return TokenBatch(
        logprobs=scores[0],
        entropy=scores[1],
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=maybe("ref_logprobs"),
        advantages=torch.zeros_like(now) if advantages is None else advantages,
        weights=spread("weight") * mask,
        mask=mask,
        row=packed.row,
        rows=packed.rows,
        values=values,
        group=upload(batch.values("group"), device),
        columns={n: spread(n) for n, c in batch.items() if n not in own and c.values.dtype.kind == "f"},
    )


def on_host(stats: list[Stats]) -> list[Stats]:
    """All numbers of all micro-batches in one copy: fetched one by one, each would wait for the device."""
    found = [x for s in stats for stat in s.values() for x in (stat.value, stat.count) if isinstance(x, Tensor)]
    if not found:
        return stats
    wide = widest(found[0].device)
    numbers = iter(torch.stack([x.detach().to(wide) for x in found]).tolist())

    def plain(x: Tensor | float) -> float:
        return next(numbers) if isinstance(x, Tensor) else x

    return [
        {name: dataclasses.replace(stat, value=plain(stat.value), count=plain(stat.count)) for name, stat in s.items()}
        for s in stats
    ]


def stats_to_plain(stats: list[Stats]) -> list[dict[str, list[Any]]]:
    """As JSON can carry them to other ranks."""
    return [{name: [float(s.value), float(s.count), s.reduce] for name, s in one.items()} for one in on_host(stats)]


def stats_from_plain(records: list[dict[str, list[Any]]]) -> list[Stats]:
    return [{name: Stat(*fields) for name, fields in one.items()} for one in records]


def mismatch(part: Batch, tokens: TokenBatch, version: int, engine: str) -> Stats:
    """How far the rollout engine's log-probabilities are from the learner's, for the same tokens and the same weights.

    Of the tokens that the weights of `version`, now scoring them, made themselves; of others the difference would
    also hold what was learned since. Nothing where there are none."""
    if "versions" not in part or tokens.rollout_logprobs is None:
        return {}
    made = part["versions"].values == version
    if not made.any():
        return {}
    ours = dataclasses.replace(tokens, mask=upload(made, tokens.mask.device).to(tokens.mask.dtype) * tokens.mask)
    gap = ours.made(tokens.logprobs.detach() - tokens.rollout_logprobs)
    found = {
        "mean": mean_stat(gap.abs(), ours),
        "max": extreme(gap.abs(), ours, "max"),
        "ratio_mean": mean_stat(gap.exp(), ours),
        "ratio_max": extreme(gap.exp(), ours, "max"),
    }
    return {f"mismatch/{engine}/{name}": stat for name, stat in found.items()}
