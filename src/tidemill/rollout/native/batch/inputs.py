"""The tokens of one pass: one or more of each running sequence, then those of prompts being read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.upload import upload
from tidemill.models.vision.eyes.eyes import AXES
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.batch.sequences import Reading
from tidemill.rollout.native.pages.attention import PageChunk


@dataclass(frozen=True, slots=True)
class Inputs:
    ids: Tensor  # (tokens,)
    position: Tensor  # (tokens,), or (4, tokens) where a prompt shows something to a model that turns by its place
    page: Tensor  # where each token's key and value go
    offset: Tensor
    chunks: list[PageChunk]
    keep: Tensor | None  # tokens whose logits are wanted; None: all
    seen: Array  # (rows,) tokens that each running row sees, itself included


def inputs_of(
    scheduler: Scheduler, rows: Array, readings: Sequence[Reading], newest: Array, ahead: Array, device: torch.device
) -> Inputs:
    """`newest`: the token of each row, `ahead` places after the last one in the cache."""
    slots, size = scheduler.slots, scheduler.pool.page_size

    def tensor(array: Array) -> Tensor:
        return upload(array, device, array.dtype)

    at = slots.length[rows] + ahead
    ids, places = [newest], [at]
    positions = [at + slots.shift[rows]]
    pages = [slots.table[rows, at // size]]
    chunks: list[PageChunk] = []
    keep = list(range(len(rows)))
    first = len(rows)
    for reading in readings:
        trunk, where = reading.trunk, np.arange(reading.first, reading.last)
        table = np.asarray(trunk.pages, np.int64)
        ids.append(trunk.tokens[reading.first : reading.last])
        places.append(where)
        scene, until = trunk.scene, None
        if scene is not None and scene.until is not None:
            until = tensor(scene.until[reading.first : reading.last])
        is_flat = scene is None or scene.positions is None
        positions.append(where if is_flat else scene.positions[:, reading.first : reading.last])  # type: ignore[union-attr,index]
        pages.append(table[where // size])
        last = first + len(where)
        chunks.append(PageChunk(first, last, reading.first, tensor(table[: -(-reading.last // size)]), until))
        if reading.last == len(trunk.tokens):
            keep.append(last - 1)
        first = last
    if any(one.ndim > 1 for one in positions):
        positions = [one if one.ndim > 1 else np.broadcast_to(one, (AXES, len(one))) for one in positions]
    wanted = upload(keep, device) if readings else None
    return Inputs(
        ids=tensor(np.concatenate(ids)),
        position=tensor(np.concatenate(positions, -1)),
        page=tensor(np.concatenate(pages)),
        offset=tensor(np.concatenate(places) % size),
        chunks=chunks,
        keep=wanted,
        seen=at + 1,
    )
