"""How much memory one rank of a parallel learner needs, worked out from sizes alone.

`benchmarks/parallel.py` holds it against what ranks measure; docs/parallelism.md explains the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tidemill.algorithms.shared import registry
from tidemill.estimate.memory import PLAIN_LOGITS, adapter_parameters, optimizer_bytes
from tidemill.estimate.run import BYTES, cache_tokens, microbatch_tokens
from tidemill.models.shape import ModelShape
from tidemill.recipe.config import Config, ParallelSettings
from tidemill.rollout.native.ranks.grid import Grid

GATHERED_LAYERS = 2  # the one at work and the one fetched ahead
SHORT = 256  # tokens of a sample whose attention needs no blocks on a CPU (`models.short`)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on the fullest rank at the peak of a step, in the order they are shown."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # weights of the layers at work, whole
    reducing: int  # their gradients, whole, and the buffer that sends them
    activations: int
    logits: int
    reference: int  # at rest: its layers are gathered while the learner's are not
    critic: int
    mean: int = 0  # of the weights, for evaluations

    @property
    def total(self) -> int:
        return sum(n for _, n in self.parts())

    def parts(self) -> Iterator[tuple[str, int]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)


def per_rank(
    config: Config, shape: ModelShape, tokens: int | None = None, *, on_accelerator: bool = False
) -> RankMemory:
    """`tokens`: of one micro-batch; None: as many as the recipe allows."""
    learn, parallel, width = config.learn, config.learn.parallel, BYTES[config.model.dtype]
    whole, responses = (tokens, tokens) if tokens is not None else microbatch_tokens(config)
    held = parameters_per_rank(shape, parallel)
    trained = trained_per_rank(config, shape, parallel)
    is_sharded = parallel.fsdp * parallel.cp > 1 or parallel.replicate > 1
    layer = _layer_at_work(shape, parallel)
    ends = shape.embedding // parallel.tp
    wide_gradient = 4 if learn.master == "float32" else width
    reduce_width = 2 if learn.reduce_dtype == "bfloat16" else 4 if learn.reduce_dtype == "float32" else width
    logit = 4 + width if on_accelerator else PLAIN_LOGITS
    head = ends * (8 + (width if width == 2 else 0))  # its gradient is summed in float32
    return RankMemory(
        weights=held * width,
        gradients=trained * wide_gradient,
        optimizer=0 if learn.optimizer_on_host else int(trained * optimizer_bytes(learn, width)),
        gathered=(GATHERED_LAYERS * layer + ends) * width if parallel.fsdp * parallel.cp > 1 else 0,
        reducing=layer * (width + reduce_width) if is_sharded else 0,
        activations=activations(shape, config, -(-whole // parallel.cp), width, on_accelerator),
        logits=min(learn.logprob_chunk, responses) * (shape.vocabulary // parallel.tp) * logit + head,
        reference=_reference(config, shape) * width,
        critic=_critic(config, shape, width + wide_gradient, width),
        mean=4 * trained if learn.ema else 0,
    )


def engine_share(config: Config, shape: ModelShape, grid: Grid) -> tuple[int, int]:
    """Bytes that the fullest rank of an engine holds: of the weights, and of its replica's cache. The embedding lies
    whole on each rank of the first stage; an output layer of its own is cut."""
    width = BYTES[config.model.dtype]
    layers, moe = (-(-n // grid.pp) for n in (shape.layers, shape.moe_layers))
    whole = shape.hidden * (shape.q_rank + shape.kv_rank + shape.rotary) if shape.is_latent else 0
    each = shape.expert_parameters // max(1, shape.experts)
    held = shape.experts // grid.ep + (config.rollout.experts.spare if shape.experts else 0)
    experts = moe * held * -(-each // grid.widths)
    head = 0 if shape.is_tied or grid.pp > 1 else -(-shape.embedding // grid.tp)
    weights = shape.embedding + shape.hidden + head + layers * (whole + -(-(shape.layer - whole) // grid.tp)) + experts
    kept = shape.kv_rank + shape.rotary if shape.is_latent else 2 * max(1, shape.kv_heads // grid.tp) * shape.head_dim
    codes = layers * -(-shape.layer // grid.tp) if config.rollout.weights != "same" else 0  # one byte each
    return weights * width + codes, -(-cache_tokens(config) // grid.dp) * layers * kept * width


def trained_per_rank(config: Config, shape: ModelShape, parallel: ParallelSettings) -> int:
    """All that is held, or adapters: one side of each is cut by tp, the other is not."""
    adapters = adapter_parameters(shape, config.learn)
    return -(-adapters // (parallel.fsdp * parallel.cp * parallel.pp)) or parameters_per_rank(shape, parallel)


def _reference(config: Config, shape: ModelShape) -> int:
    if "reference" not in registry.roles_of(config):
        return 0
    return parameters_per_rank(shape, config.algorithm.kl.parallel or config.learn.parallel)


def _critic(config: Config, shape: ModelShape, each: int, width: int) -> int:
    """`each`: bytes of a weight and its gradient."""
    if "critic" not in registry.roles_of(config):
        return 0
    parallel = config.algorithm.critic.parallel or config.learn.parallel
    held, trained = parameters_per_rank(shape, parallel), trained_per_rank(config, shape, parallel)
    state = 0 if config.learn.optimizer_on_host else int(trained * optimizer_bytes(config.learn, width))
    return held * width + trained * (each - width) + state


def parameters_per_rank(shape: ModelShape, parallel: ParallelSettings) -> int:
    """On the fullest rank."""
    shard = parallel.fsdp * parallel.cp
    layers, moe = (-(-n // parallel.pp) for n in (shape.layers, shape.moe_layers))
    cut = (shape.layer - _whole_attention(shape)) // parallel.tp + _whole_attention(shape)
    ends = shape.embedding if parallel.pp > 1 or shape.is_tied else 2 * shape.embedding
    dense = -(-(layers * cut + ends // parallel.tp) // shard)
    # ep, and what is left of the ranks, share the experts out between them: fsdp × cp ranks in all, either way.
    return dense + -(-moe * shape.expert_parameters // (shard * parallel.tp))


def _whole_attention(shape: ModelShape) -> int:
    """Parameters of one layer's attention, where tensor parallelism leaves it whole."""
    return shape.attention if shape.is_latent else 0


def _layer_at_work(shape: ModelShape, parallel: ParallelSettings) -> int:
    """Parameters of one layer that a rank holds while it computes it."""
    dense = (shape.layer - _whole_attention(shape)) // parallel.tp + _whole_attention(shape)
    return dense + shape.expert_parameters // (parallel.tp * parallel.ep)


def activations(shape: ModelShape, config: Config, tokens: int, width: int, on_accelerator: bool) -> int:
    """What the forward pass leaves for the backward pass, of all micro-batches under way in a pipeline."""
    learn, parallel = config.learn, config.learn.parallel
    is_short = config.data.max_prompt_tokens + config.rollout.max_new_tokens - 1 <= SHORT  # the last is no input
    h, wide, tp = shape.hidden, shape.visited, parallel.tp
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The stream and its norms' inputs are cut along the sequence; the two blocks' inputs are gathered and kept whole.
    if learn.compile == "on" or (learn.compile == "auto" and on_accelerator):
        stream, inside = 2 * h, 2 * q + 2 * kv + 3 * wide
    elif on_accelerator or width != 4 or learn.fp8 != "none":
        stream, inside = 4 * h + (4 * h if width == 2 else 0), 4 * q + 6 * kv + 4 * wide  # norms compute in float32
    else:  # norms and gates in one pass; attention in blocks keeps its inputs and output twice
        stream, inside = 2 * h, (2 if is_short else 4) * (q + kv) + 3 * wide
    inside += q + kv if shape.has_head_norms else 0
    layer = stream // tp + 2 * h + inside // tp
    layers = -(-shape.layers // parallel.pp)
    # A pipeline's first stage has as many micro-batches under way as there are stages.
    if learn.recompute == "full":
        kept = layers * (h // tp) * parallel.pp + layer
    else:
        kept = layers * layer * parallel.pp
    return tokens * width * (kept + 4 * h)
