"""What a packed row asks of a mixture's routers: the experts that rollout chose, and which tokens count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Batch
from tidemill.errors import DataError
from tidemill.learn.rows.packing import PackedBatch, input_places
from tidemill.models.mixture.routing import Routed, Routers
from tidemill.models.upload import upload


def routed(
    part: Batch, packed: PackedBatch, routers: Routers | None, share_prompts: bool, own: PackedBatch | None = None,
    at: Tensor | None = None,
) -> PackedBatch:  # fmt: skip
    """`packed`, the row of `part`, with routes in its context. `own`: what this rank computes of it, where that is not
    all: the tokens `at` of the row, and maybe others behind them that count for nothing."""
    row = own or packed
    if routers is None:
        return row
    count = packed.tokens.shape[0] if at is None else at.shape[0]
    routes = _routes(part, packed, routers, share_prompts) if routers.settings.replay and "routes" in part else None
    is_learning = "weight" in part  # or else these samples are scored
    counts = _added(part, packed, "mask") if is_learning else None
    weights = _added(part, packed, "mask", "weight") if is_learning else None
    more = row.tokens.shape[0] - count
    counts, routes, weights = (_own(x, at, more, fill) for x, fill in ((counts, 0), (routes, -1), (weights, 0)))
    return replace(row, context=Routed(row.context, counts, routes, weights))


def _routes(part: Batch, packed: PackedBatch, routers: Routers, share_prompts: bool) -> Tensor:
    """(tokens, layers, k)"""
    column, width = part["routes"], routers.layers * routers.k
    if not np.array_equal(column.lengths, (part["tokens"].lengths - 1) * width):
        raise DataError(
            f"the routes of a sample are not {routers.layers} layers × {routers.k} experts for each token but the last",
            "rollout and learner must have the same model; set learn.moe.replay to false otherwise",
        )
    assert column.offsets is not None
    row, place = input_places(part, share_prompts)
    found = column.values[(column.offsets[:-1][row] + place * width)[:, None] + np.arange(width)]
    return upload(found, packed.tokens.device).view(-1, routers.layers, routers.k)


def _added(part: Batch, packed: PackedBatch, *names: str) -> Tensor:
    """(tokens,) the product of these columns over targets, added up where each target is predicted."""
    device = packed.tokens.device
    product = torch.ones(packed.targets.shape[0], device=device)
    for name in names:
        column = part[name].gather(np.arange(part.rows))
        values = upload(column.values, device, np.float32)
        product = product * (values[packed.row] if column.offsets is None else values)
    return torch.zeros(packed.tokens.shape[0], device=device).index_add_(0, packed.predicts, product)


def _own(x: Tensor | None, at: Tensor | None, more: int, fill: int) -> Tensor | None:
    if x is None:
        return None
    x = x if at is None else x.index_select(0, at)
    return torch.cat([x, x.new_full((more, *x.shape[1:]), fill)]) if more else x
