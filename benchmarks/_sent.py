"""What a rank sends in one update by the textbook's ring algorithms: no exchange of the same kind can send less."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.estimate.run import BYTES
from tidemill.models.shape import ModelShape
from tidemill.recipe.config import Config


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that each rank sends in one micro-batch."""

    shard: int  # weights gathered twice, gradients reduce-scattered once
    replicate: int  # gradients all-reduced between copies
    tensor: int  # tokens gathered and reduce-scattered round each block, forward and backward

    @property
    def total(self) -> int:
        return self.shard + self.replicate + self.tensor


def sent(config: Config, shape: ModelShape, tokens: int) -> Sent:
    """`tokens`: of the micro-batch, filled up to a multiple of tp. Dense models, no pipeline."""
    learn, parallel, width = config.learn, config.learn.parallel, BYTES[config.model.dtype]
    shard, tp = parallel.fsdp * parallel.cp, parallel.tp
    reduce_width = 2 if learn.reduce_dtype == "bfloat16" else 4 if learn.reduce_dtype == "float32" else width
    held = shape.total // tp
    fraction = (shard - 1) / shard
    between = (parallel.replicate - 1) / parallel.replicate
    # Per layer two blocks, each one gather and one reduce-scatter, forward and backward; embedding and head as a block.
    exchanges = 8 * shape.layers + 4
    return Sent(
        shard=int(fraction * held * (2 * width + reduce_width)),
        replicate=int(2 * between * held / shard * reduce_width),
        tensor=int((tp - 1) / tp * exchanges * tokens * shape.hidden * width),
    )
