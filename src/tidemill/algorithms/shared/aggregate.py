"""What a loss is a mean over. Every choice is `sum(local · loss) / whole`: `local` is known per sample or group, and
`whole` only once the update's last sample is in. So gradients are added up sample by sample and divided at the end.

| aggregation | local weight of a token | whole |
|---|---|---|
| token_mean  | 1                            | tokens of the update |
| sample_mean | 1 / tokens of its sample     | samples |
| group_mean  | 1 / tokens of its group      | groups |
| constant    | 1 / constant length          | samples |
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.batch import GROUP, Batch
from tidemill.recipe.config import Config

Floats = npt.NDArray[np.float32]


def made_tokens(batch: Batch) -> npt.NDArray[np.int64]:
    """Tokens the model made, per sample."""
    mask = batch["mask"]
    if mask.offsets is None:
        return mask.values.astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    return np.asarray(sums[mask.offsets[1:]] - sums[mask.offsets[:-1]], np.int64)


def local_weights(batch: Batch, config: Config) -> Floats:
    """One weight per sample, for each of its tokens. Groups must be complete for group_mean."""
    tokens = np.maximum(made_tokens(batch), 1)
    match config.algorithm.aggregation:
        case "token_mean":
            weights = np.ones(batch.rows)
        case "sample_mean":
            weights = 1.0 / tokens
        case "group_mean":
            _, member = np.unique(batch.values(GROUP), return_inverse=True)
            weights = 1.0 / np.bincount(member, tokens)[member]
        case "constant":
            length = config.algorithm.constant_length or config.rollout.max_new_tokens
            weights = np.full(batch.rows, 1.0 / length)
    return weights.astype(np.float32)


def whole(batch: Batch, config: Config) -> float:
    """This batch's part of the divisor; parts of one update add up."""
    match config.algorithm.aggregation:
        case "token_mean":
            return float(made_tokens(batch).sum())
        case "sample_mean" | "constant":
            return float(batch.rows)
        case "group_mean":
            return float(len(np.unique(batch.values(GROUP))))
