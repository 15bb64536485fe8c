"""How much memory a run's device needs at its peak, worked out from settings alone.

`benchmarks/gpu_learn.py` prints this estimate beside what the device measured; docs/results/learn.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from tidemill.algorithms.shared import registry
from tidemill.estimate.run import BYTES, cache_tokens, microbatch_tokens, tokens_computed
from tidemill.learn.logprob.chunks import words_at_once
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import Config, Learn

INT8_MOMENT = 1 + 4 / 256  # a byte each, and a float32 scale per block of 256
INT8_TEMPORARY, STOCHASTIC_TEMPORARY = 16, 8  # bytes per weight at work: decoded moments, codes, noise
PLAIN_LOGITS = 20  # bytes per logit without the fused kernel: five float32 copies at once


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of a step, in the order they are shown."""

    weights: int
    gradients: int
    optimizer: int
    critic: int
    reference: int
    activations: int
    logits: int
    layer: int  # one layer's backward pass, as far as it exceeds the logits it comes after
    update: int  # what the optimizer needs while it works, as far as it exceeds all that came before it
    cache: int
    copies: int = 0  # the weights that a separated rollout serves, and the next ones beside them; those in 8 bits
    mean: int = 0  # of the weights, for evaluations
    reward_model: int = 0  # a trained one, where it is beside the learner
    host_cache: int = 0  # of evicted samples, where the device is the host

    @property
    def total(self) -> int:
        return sum(n for _, n in self.parts())

    def parts(self) -> Iterator[tuple[str, int]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)


def memory(
    config: Config, shape: ModelShape, parameters: int | None = None, *, on_accelerator: bool = False
) -> MemoryEstimate | None:
    count = parameters or shape.parameters
    if count is None:
        return None
    learn, algorithm, width = config.learn, config.algorithm, BYTES[config.model.dtype]
    adapters = adapter_parameters(shape, learn)
    trained = adapters or count
    gradients = trained * (4 if learn.master == "float32" else width)
    optimizer = int(trained * optimizer_bytes(learn, width))
    roles = registry.roles_of(config)
    frozen = "reference" in roles and not adapters
    held = width if algorithm.kl.weights == "same" else 1  # the head and the embeddings, which stay, are not told apart
    has_critic = "critic" in roles and algorithm.critic.trunk == "own"
    critic = count * width + trained * width + optimizer if has_critic else 0
    if registry.of(config).learns_values:  # beside the model that it began as, whose gradients and optimizer it has
        critic = count * width
    tokens, responses = microbatch_tokens(config)
    is_compiled = learn.compile == "on" or (learn.compile == "auto" and on_accelerator)
    activations = activation_bytes(shape, tokens, width, learn, is_compiled) + shared_bytes(
        config, shape, tokens, width
    )
    logits = logit_bytes(shape, responses, learn.logprob_chunk, width, not adapters, on_accelerator)
    # The output layer's gradient waits for that of the embeddings, which are the same weights in most models.
    head = 0 if adapters else shape.vocabulary * shape.hidden * width
    layer = max(0, tokens * width * layer_elements(shape, learn, is_compiled) + head - logits)
    largest = shape.vocabulary * shape.hidden if not adapters else learn.lora_rank * shape.visited
    update = max(0, int(largest * update_bytes(learn, width, on_accelerator)) - activations - logits - layer)
    if tokens >= tokens_computed(config):
        # All in one pass: gradients come while activations and logits go.
        gradients = max(0, gradients - activations - logits - layer)
    return MemoryEstimate(
        weights=(count + adapters) * width,
        gradients=gradients,
        optimizer=0 if learn.optimizer_on_host else optimizer,
        critic=critic,
        reference=frozen * count * held + _teacher_parameters(config, count) * width,
        activations=activations,
        logits=logits,
        layer=layer,
        update=update,
        cache=cache_tokens(config) * shape.layers * 2 * shape.kv_heads * shape.head_dim * width,
        copies=(2 * count * width if config.flow.is_separated else 0) + eight_bit_bytes(config, shape),
        reward_model=reward_model_bytes(config),
        mean=4 * trained if learn.ema else 0,
        host_cache=0 if on_accelerator else host_cache_bytes(config),
    )


def eight_bit_bytes(config: Config, shape: ModelShape) -> int:
    """Of the codes that rollout multiplies by, where `rollout.weights` asks for 8 bits."""
    return shape.layers * shape.layer if config.rollout.weights != "same" else 0


def _teacher_parameters(config: Config, otherwise: int) -> int:
    """Of distillation's, by its folder; as many as the policy has where that does not tell."""
    if config.algorithm.teacher is None:
        return 0
    shape = shape_of(config.model.model_copy(update={"path": config.algorithm.teacher}))
    return shape.parameters if shape is not None and shape.parameters is not None else otherwise


def reward_model_bytes(config: Config) -> int:
    """The weights of trained reward models on the learner's device: as large as their files."""
    cluster = config.cluster
    if cluster.executor != "local" and cluster.placement.reward_model == "separated":
        return 0
    folders = [Path(path).expanduser() for path in config.rewards.models]
    return sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))


def host_cache_bytes(config: Config) -> int:
    """Of samples that engines have evicted, should all engines be on one machine."""
    cluster, engines = config.cluster, 1
    if cluster.executor != "local":
        is_separated = cluster.placement.rollout == "separated"
        engines = cluster.rollouts if is_separated else max(1, config.learn.parallel.ranks // config.rollout.ranks)
    return engines * int(config.rollout.cache_on_host_gb * 1e9)


def host_bytes(config: Config, shape: ModelShape, parameters: int | None = None) -> int:
    """What the host holds in the device's place: the optimizer's state, activations, caches of evicted samples."""
    learn, width = config.learn, BYTES[config.model.dtype]
    count = adapter_parameters(shape, learn) or parameters or shape.parameters or 0
    state = int(count * optimizer_bytes(learn, width)) if learn.optimizer_on_host else 0
    state += host_cache_bytes(config)
    if learn.offload == "none":
        return state
    kept = learn.model_copy(update={"offload": "none"})
    return state + activation_bytes(shape, microbatch_tokens(config)[0], width, kept, is_compiled=True)


def checkpoint_bytes(config: Config, shape: ModelShape, parameters: int | None = None) -> int:
    """On disk: what is learned (weights, or adapters alone), the optimizer's state, the critic's own, a running mean, a
    reference that moves."""
    learn, algorithm, width = config.learn, config.algorithm, BYTES[config.model.dtype]
    count, adapters = parameters or shape.parameters or 0, adapter_parameters(shape, learn)
    trained = adapters or count
    # Moments of 8 bits have scales by block; on disk they are plain numbers, which any cut can take up.
    plain = learn.model_copy(update={"moments": "float32"}) if learn.moments == "int8" else learn
    one = trained * width + int(trained * optimizer_bytes(plain, width))
    has_critic = "critic" in registry.roles_of(config) and algorithm.critic.trunk == "own"
    mean = 4 * trained
    return (1 + has_critic) * one + bool(learn.ema) * mean + bool(algorithm.kl.reset_every) * count * width


def adapter_parameters(shape: ModelShape, learn: Learn) -> int:
    """Of low-rank adapters on every matrix of the layers: the two sides of each, times the rank. An expert has two, its
    gate and the way up being one."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = 2 * (shape.hidden + q) + 2 * (shape.hidden + kv)
    if not shape.experts:
        sides += 3 * (shape.hidden + shape.intermediate)
    elif learn.lora_experts:
        sides += shape.experts * (2 * shape.hidden + 3 * shape.expert_width)
    return shape.layers * learn.lora_rank * sides


def optimizer_bytes(learn: Learn, width: int) -> float:
    """Per trained weight."""
    if learn.optimizer == "muon":  # one float32 momentum; the few weights with AdamW's two are not told apart here
        return 8 if learn.master == "float32" else 4
    is_plain = learn.master == "none" and not learn.optimizer_on_host
    moments = {"same": 2 * width if is_plain else 8, "float32": 8, "int8": 2 * INT8_MOMENT}[learn.moments]
    return moments + (4 if learn.master == "float32" else 0)


def update_bytes(learn: Learn, width: int, is_fused: bool) -> float:
    """Per weight of the largest matrix, while the optimizer works on it."""
    is_plain = learn.master == "none" and learn.moments == "same" and not learn.optimizer_on_host
    fetched = optimizer_bytes(learn, width) if learn.optimizer_on_host else 0
    if learn.optimizer == "adamw" and (is_plain or is_fused):
        return fetched  # one kernel works in place
    copies = 0 if learn.master == "float32" or width == 4 else 8  # gradient and weight in float32
    quotient = 4
    return (
        copies
        + quotient
        + fetched
        + (INT8_TEMPORARY if learn.moments == "int8" else 0)
        + (STOCHASTIC_TEMPORARY if learn.master == "stochastic" else 0)
    )


def activation_bytes(shape: ModelShape, tokens: int, width: int, learn: Learn, is_compiled: bool) -> int:
    """What the forward pass leaves for the backward pass."""
    whole = _layer_keeps(shape, "none", is_compiled, width)
    if learn.offload == "activations":
        return tokens * width * (whole + 4 * shape.hidden)  # of the layer at work; the rest is on the host
    again = -(-shape.layers // learn.recompute_every) if learn.recompute != "none" else 0
    kept = again * _layer_keeps(shape, learn.recompute, is_compiled, width) + (shape.layers - again) * whole
    if learn.fp8 != "none" and is_compiled and learn.recompute != "full":  # factors of products are kept in one byte
        factors = 2 * shape.hidden + shape.heads * shape.head_dim
        factors += shape.visited if learn.recompute == "none" else 0
        kept -= shape.layers * factors * (width - 1) // width
    if learn.dora and learn.recompute != "full":  # outputs that a magnitude then scales and nothing else would keep
        kept += shape.layers * (2 * shape.hidden + shape.heads * shape.head_dim)
    # Beside the layers: the last norm's input and output, the response tokens' states and their gradient.
    return tokens * width * (kept + 4 * shape.hidden)


def _layer_keeps(shape: ModelShape, recompute: str, is_compiled: bool, width: int) -> int:
    """Elements per token that one layer keeps."""
    h, wide = shape.hidden, shape.visited
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if recompute == "full":
        return h
    if is_compiled:
        # Inputs of both norms, and outputs too where they are not made again; q, k, v and attention's output; gate, up
        # and their product.
        norms = 4 * h if recompute == "none" else 2 * h
        outside, inside, activation = norms + 2 * q + 2 * kv, 3 * wide, wide
        outside += q + kv if shape.has_head_norms else 0
    else:
        # Norms keep a scaled input too (in float32 beside 16-bit weights), heads are turned and repeated.
        outside, inside, activation = 6 * h + 4 * q + 6 * kv, 4 * wide, 2 * wide
        outside += 4 * h if width == 2 else 0
    return outside + {"none": inside, "selective": inside - activation, "mlp": 0}[recompute]


def shared_bytes(config: Config, shape: ModelShape, tokens: int, width: int) -> int:
    """What sharing prompts keeps more: keys and values gathered for each response, and the two outputs joined."""
    learn, each = config.learn, config.train.samples_per_prompt
    if not config.shares_prompts or each == 1 or learn.recompute == "full" or learn.offload != "none":
        return 0
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    seen = each * (prompt + response) / (prompt + each * response)
    kept = shape.heads * shape.head_dim + 2 * seen * shape.kv_heads * shape.head_dim
    return int(shape.layers * tokens * width * kept)


def layer_elements(shape: ModelShape, learn: Learn, is_compiled: bool) -> int:
    """Elements per token at work in one layer's backward pass: what is computed again, and gradients."""
    whole = _layer_keeps(shape, "none", is_compiled, 2)
    if learn.recompute == "full":
        return whole + 3 * shape.hidden  # what was kept goes as gradients come
    again = {"none": 0, "selective": shape.visited, "mlp": 3 * shape.visited}
    return 3 * shape.visited + 2 * shape.hidden + again[learn.recompute]


def logit_bytes(shape: ModelShape, targets: int, chunk: int, width: int, trains_head: bool, is_fused: bool) -> int:
    """Logits of a chunk in float32, their gradient, and sums over chunks (`learn.logprob`)."""
    h, words = shape.hidden, shape.vocabulary
    head = words * h if trains_head else 0
    if not is_fused:  # the head's gradient in float32, and a chunk's part of it
        return min(chunk, targets) * words * PLAIN_LOGITS + 8 * head
    if targets < words:  # all tokens and some words: the head's gradient as it is, that of the states in float32
        return targets * words_at_once(targets, words, chunk) * (4 + width) + width * head + 8 * targets * h
    first = min(chunk, targets)
    second = min(chunk, targets - first)
    return words * max(first * (4 + width), first * width + second * (4 + width)) + 4 * head
