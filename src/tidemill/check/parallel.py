"""Which products of parallel sizes can work, by arithmetic alone: against the ranks there are, and against the model.

Every refusal names the key, what it got, and the sizes that would do. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidemill.estimate.memory import CRITICS
from tidemill.models.box import find
from tidemill.recipe.config import Config, ModelSettings, ParallelSettings, TinyModel

MOST_SUGGESTED = 256
SERVED = ("llama", "mistral", "qwen2", "qwen3")  # that a rollout engine over several ranks knows
VALUES = {*CRITICS, "reward_model"}  # algorithms that learn a value model


@dataclass(frozen=True, slots=True)
class Cuttable:
    """What parallel sizes must divide."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int  # of the dense layers
    experts: int = 0
    is_latent: bool = False  # multi-head latent attention: tensor parallelism leaves it whole


def cuttable(model: ModelSettings) -> Cuttable | None:
    """None when the model's folder does not tell."""
    if model.path is None and model.warm_start is not None:
        return None
    if model.path is None:
        tiny = model.tiny or TinyModel()
        experts = tiny.experts if tiny.architecture in ("qwen3_moe", "mixtral") else 0
        return Cuttable(tiny.layers, tiny.heads, tiny.kv_heads, tiny.intermediate, experts)
    try:
        raw = json.loads((find.look(model.path) / "config.json").read_text(encoding="utf-8"))
        return from_settings(raw.get("text_config", raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def from_settings(raw: dict[str, Any]) -> Cuttable:
    """Of a transformers config as JSON."""
    heads = int(raw["num_attention_heads"])
    experts = next((int(raw[k]) for k in ("num_experts", "n_routed_experts", "num_local_experts") if raw.get(k)), 0)
    return Cuttable(
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        intermediate=int(raw.get("intermediate_size") or 4 * int(raw["hidden_size"])),
        experts=experts,
        is_latent=bool(raw.get("kv_lora_rank")),
    )


def world_problem(parallel: ParallelSettings, world: int) -> str | None:
    """Why these sizes do not make a world of that many ranks, or None."""
    problem = next(_folding(parallel), None)
    if problem is not None or parallel.ranks == world:
        return problem
    product = " × ".join(f"{name} {getattr(parallel, name)}" for name in ("replicate", "fsdp", "cp", "tp", "pp"))
    rest = parallel.ranks // parallel.fsdp
    fit = (
        f"learn.parallel.fsdp={world // rest} would do"
        if world % rest == 0
        else f"the others come to {rest}, which must divide {world}"
    )
    return f"learn.parallel needs {parallel.ranks} ranks ({product}), but there are {world}; {fit}"


def problems(config: Config, model: ModelSettings) -> Iterator[str]:
    """`model` is the one that will be trained."""
    parallel = config.learn.parallel
    yield from _folding(parallel)
    yield from _sequence(config)
    yield from _pairs(config)
    shape = cuttable(model)
    if shape is not None:
        yield from model_problems(parallel, shape)
    for key, sizes in (("kl", config.algorithm.kl.parallel), ("critic", config.algorithm.critic.parallel)):
        yield from _beside(f"algorithm.{key}.parallel", sizes, parallel, shape)


def _beside(
    key: str, sizes: ParallelSettings | None, learners: ParallelSettings, shape: Cuttable | None
) -> Iterator[str]:
    """Another model on the learner's ranks, by sizes of its own."""
    if sizes is None:
        return
    if sizes.ranks != learners.ranks:
        yield (
            f"{key} comes to {sizes.ranks} ranks, but it lies on the learner's {learners.ranks}; sizes with the same "
            "product would do"
        )
    found = [*_folding(sizes), *(model_problems(sizes, shape) if shape is not None else ())]
    yield from (problem.replace("learn.parallel", key) for problem in found)


def _folding(parallel: ParallelSettings) -> Iterator[str]:
    shard = parallel.fsdp * parallel.cp
    if shard % parallel.ep:
        yield (
            f"learn.parallel.ep is {parallel.ep}, which does not divide fsdp × cp = {shard}, the ranks it lies over; "
            f"{either(divisors(shard))} would do"
        )
    if parallel.pp_schedule == "interleaved" and parallel.pp_chunks < 2:
        yield "learn.parallel.pp_schedule is interleaved, which needs several runs of layers per rank; pp_chunks=2"
    if parallel.pp_chunks > 1 and (parallel.pp_schedule != "interleaved" or parallel.pp == 1):
        yield (
            f"learn.parallel.pp_chunks is {parallel.pp_chunks}, which only an interleaved pipeline of several ranks "
            "uses; set pp_schedule=interleaved and pp above 1, or leave it 1"
        )


def model_problems(parallel: ParallelSettings, shape: Cuttable) -> Iterator[str]:
    tp = parallel.tp
    if not shape.is_latent:
        if shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp):
            yield (
                f"learn.parallel.tp is {tp}, but the model has {shape.heads} heads and {shape.kv_heads} key/value "
                f"heads; {either(head_cuts(shape))} would do"
            )
        if parallel.cp_form == "ulysses" and (shape.heads // max(1, min(tp, shape.heads))) % parallel.cp:
            yield (
                f"learn.parallel.cp is {parallel.cp} with cp_form ulysses, but {shape.heads} heads over tp {tp} leave "
                f"{shape.heads // tp}; {either(divisors(max(1, shape.heads // tp)))} would do, or cp_form=ring"
            )
    if shape.intermediate % tp:
        fit = [n for n in head_cuts(shape) if shape.intermediate % n == 0]
        width = f"the MLP's width {shape.intermediate}"
        yield f"learn.parallel.tp is {tp}, which does not divide {width}; {either(fit)} would do"
    if shape.experts and shape.experts % (parallel.ep * tp):
        fit = [n for n in divisors(shape.experts) if shape.experts % (n * parallel.ep) == 0]
        yield (
            f"learn.parallel.tp × ep is {tp * parallel.ep}, which does not divide the model's {shape.experts} experts; "
            f"with ep {parallel.ep}, tp {either(fit) if fit else 'cannot fit: lower ep'} would do"
        )
    if parallel.ep > 1 and not shape.experts:
        yield f"learn.parallel.ep is {parallel.ep}, but the model has no experts; 1 would do"
    stages = parallel.pp * parallel.pp_chunks
    if stages > shape.layers:
        yield (
            f"learn.parallel.pp × pp_chunks is {stages}, more than the model's {shape.layers} layers; "
            f"at most {shape.layers} would do"
        )


def engine_problems(tp: int, model: ModelSettings) -> Iterator[str]:
    """Of a rollout engine over `tp` ranks: each has whole key/value heads and an equal share of the MLP."""
    if (kind := _architecture(model)) is not None and kind not in SERVED:
        yield f"rollout.tp is {tp}, but engines over several ranks serve {', '.join(SERVED)}, not {kind}; 1 would do"
        return
    shape = cuttable(model)
    if shape is not None:
        yield from engine_shape_problems(tp, shape)


def engine_shape_problems(tp: int, shape: Cuttable) -> Iterator[str]:
    if shape.experts or shape.is_latent:
        yield f"rollout.tp is {tp}, but engines over several ranks serve dense decoders of the Llama family; 1 would do"
    elif shape.kv_heads % tp or shape.intermediate % tp:
        fit = [n for n in divisors(shape.kv_heads) if shape.intermediate % n == 0]
        yield (
            f"rollout.tp is {tp}, which does not divide the model's {shape.kv_heads} key/value heads and MLP width "
            f"{shape.intermediate}; {either(fit)} would do"
        )


def engine_sizes(config: Config, shape: Cuttable) -> list[int]:
    """What rollout.tp could be, from what it is on: sizes that the model and, colocated, the learner's ranks allow."""
    ranks = config.learn.parallel.ranks
    is_colocated = config.cluster.placement.rollout == "colocated"
    return [
        n
        for n in range(config.rollout.tp, max(config.rollout.tp, shape.kv_heads) + 1)
        if n == config.rollout.tp or (not any(engine_shape_problems(n, shape)) and (not is_colocated or ranks % n == 0))
    ]


def _architecture(model: ModelSettings) -> str | None:
    """As transformers calls it; None when the model's folder does not tell."""
    if model.path is None:
        return None if model.warm_start is not None else (model.tiny or TinyModel()).architecture
    try:
        raw = json.loads((find.look(model.path) / "config.json").read_text(encoding="utf-8"))
        return str(raw["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sequence(config: Config) -> Iterator[str]:
    """Every rank needs a token of each micro-batch: rows are filled up to a multiple of the ranks that share them."""
    parallel = config.learn.parallel
    multiple = parallel.cp * parallel.tp * (2 if parallel.cp > 1 else 1)
    if multiple > config.train.tokens_per_microbatch:
        yield (
            f"train.tokens_per_microbatch is {config.train.tokens_per_microbatch}, but sequences are cut into "
            f"multiples of {multiple} tokens (learn.parallel.cp {parallel.cp} × tp {parallel.tp}); at least {multiple} "
            "would do"
        )


def _pairs(config: Config) -> Iterator[str]:
    """Settings that do not go together with several ranks."""
    learn, parallel = config.learn, config.learn.parallel
    if parallel.ranks == 1:
        return
    if config.observe.dump:
        yield "observe.dump is set, but gradients and weights are shown by one rank only; leave it out"
    if config.train.profile:
        yield "train.profile is set, but the trace would show the driver and none of the ranks; leave it out"
    if learn.fp8 != "none":
        yield f"learn.fp8 is {learn.fp8}, whose products are one rank's only; none would do"
    if config.algorithm.kl.weights != "same":
        yield (
            f"algorithm.kl.weights is {config.algorithm.kl.weights}, but over ranks a reference keeps the weights' own "
            "dtype; same would do"
        )
    if config.rollout.batch_invariant:
        yield "rollout.batch_invariant is set, which one rank alone can promise; false would do"
    if learn.dora and parallel.tp > 1:
        yield f"learn.dora is set, whose norms need whole rows, but learn.parallel.tp is {parallel.tp}; 1 would do"
    if parallel.pp > 1 and learn.recompute == "mlp" and (learn.moe.replay or learn.moe.balance == "aux_loss"):
        yield (
            f"learn.recompute is mlp, but with learn.parallel.pp {parallel.pp} other micro-batches come in between, "
            "and learn.moe would route and weigh as their tokens say; learn.recompute=full would do"
        )
    critic = config.algorithm.critic
    if config.algorithm.name in CRITICS and critic.trunk == "shared":
        yield "algorithm.critic.trunk is shared, but over ranks a critic has a decoder of its own; own would do"
    if config.algorithm.name in VALUES and (critic.parallel or parallel).pp > 1:
        yield (
            f"learn.parallel.pp is {(critic.parallel or parallel).pp}, but a value model is not cut into stages; "
            "algorithm.critic.parallel with pp: 1 and the same product would do"
        )


def head_cuts(shape: Cuttable) -> list[int]:
    """Tensor-parallel sizes: divide the heads, and divide or are divided by the key/value heads."""
    return [n for n in divisors(shape.heads) if max(shape.kv_heads, n) % min(shape.kv_heads, n) == 0]


def divisors(n: int) -> list[int]:
    return [i for i in range(1, min(n, MOST_SUGGESTED) + 1) if n % i == 0] or [1]


def either(values: list[int]) -> str:
    words = [str(v) for v in values] or ["1"]
    if len(words) > 8:
        words = [*words[:4], "…", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
