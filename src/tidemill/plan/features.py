"""What each phase of a step does, as features: seconds that the roofline asks for, and counts of what happens.

Shapes and lengths in, plain numbers out. A calibration's coefficients turn them into seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.models.shape import ModelShape
from tidemill.plan.calibration import Calibration, Cost
from tidemill.recipe.config import Config

SMALL = 1e-12


@dataclass(frozen=True, slots=True)
class Cut:
    """How one model lies over devices, as far as its arithmetic goes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1


def dense_products(shape: ModelShape, cut: Cut) -> Iterator[tuple[float, float]]:
    """(inner, outer) of each product of a layer's attention, on one device."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.is_latent:
        queries = q + shape.heads * shape.rotary
        if shape.q_rank:
            yield h, shape.q_rank
        yield shape.q_rank or h, queries / cut.tp
        yield h, shape.kv_rank + shape.rotary
        yield shape.kv_rank, 2 * q / cut.tp
        yield q / cut.tp, h
        return
    yield h, (q + 2 * kv) / cut.tp
    yield q / cut.tp, h


def mlp_products(shape: ModelShape, width: float, cut: Cut) -> Iterator[tuple[float, float]]:
    yield shape.hidden, 2 * width / cut.tp
    yield width / cut.tp, shape.hidden


def matmuls_s(made: Calibration, shape: ModelShape, tokens: float, width: int, cut: Cut, flops: float | None) -> Cost:
    """Forward, all layers of one device: dense products, and those of experts, each once."""
    layers, moe = shape.layers / cut.pp, shape.moe_layers / cut.pp
    attention = sum(made.matmul_s(tokens, k, n, width, flops) for k, n in dense_products(shape, cut))
    dense = sum(made.matmul_s(tokens, k, n, width, flops) for k, n in mlp_products(shape, shape.intermediate, cut))
    cost = {"matmul": layers * attention + (layers - moe) * dense}
    if moe:
        shared = 0.0
        if shape.shared_width:
            products = mlp_products(shape, shape.shared_width, cut)
            shared = sum(made.matmul_s(tokens, k, n, width, flops) for k, n in products)
        cost["matmul"] += moe * shared
        cost["experts"] = moe * experts_s(made, shape, tokens, width, cut, flops)
        cost["expert_layer"] = moe
    return cost


def experts_s(
    made: Calibration, shape: ModelShape, tokens: float, width: int, cut: Cut, flops: float | None = None
) -> float:
    """One layer's experts on one device. `tokens`: of each rank of an `ep` group, whose tokens meet at the experts.

    An accelerator computes all touched experts in one grouped product, a CPU one after the other. So the efficiency is
    that of all of their elements, or of one's."""
    held = shape.experts / cut.ep
    routed = tokens * shape.experts_per_token  # on average as many come as go
    touched = held * (1 - (1 - 1 / max(held, 1)) ** max(routed, SMALL)) if held > 1 else min(1.0, routed)
    work = 3 * shape.hidden * shape.expert_width / cut.tp
    flop = 2 * routed * work
    moved = (touched * work + routed * (2 * shape.hidden + 3 * shape.expert_width / cut.tp)) * width
    floor = max(flop / (flops or made.flops), moved / made.bytes_per_s)
    at_once = 1.0 if made.device == "cpu" else max(1.0, touched)
    return floor / made.matmul.at(max(1.0, routed / max(touched, 1)), at_once * work / 3)


def cache_bytes(shape: ModelShape, width: int, tp: int = 1) -> float:
    """Of one token in the cache of one device, all layers."""
    if shape.is_latent:
        return shape.layers * (shape.kv_rank + shape.rotary) * width
    return shape.layers * 2 * max(1.0, shape.kv_heads / tp) * shape.head_dim * width


def decode(made: Calibration, shape: ModelShape, rows: float, context: float, width: int, cut: Cut) -> Cost:
    """One decoding step of `rows` sequences that have `context` tokens in the cache together."""
    cost = matmuls_s(made, shape, rows, width, cut, None)
    read = context * cache_bytes(shape, width, cut.tp)
    head = made.matmul_s(rows, shape.hidden, shape.vocabulary / cut.tp, width)
    return _named(
        "decode",
        {
            **cost,
            "attention": read / made.bytes_per_s,
            "head": head,
            "draw": rows * shape.vocabulary * 4 / made.bytes_per_s,
            "once": 1.0,
            "layer": float(shape.layers),
            "rows": rows,
        },
    )


def prefill(
    made: Calibration, shape: ModelShape, tokens: float, pairs: float, ends: float, width: int, cut: Cut
) -> Cost:
    """Reading `tokens` of prompts, of which `ends` give a first token. `pairs`: of tokens that see one another."""
    cost = matmuls_s(made, shape, tokens, width, cut, None)
    heads = shape.heads * (shape.head_dim + shape.rotary) / cut.tp
    flop = 4 * shape.layers * heads * pairs
    head = made.matmul_s(ends, shape.hidden, shape.vocabulary / cut.tp, width)
    return _named(
        "prefill",
        {**cost, "attention": flop / made.flops, "head": head, "once": 1.0, "layer": float(shape.layers)},
    )


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch of learning or scoring, as one device computes it."""

    tokens: float  # computed, a shared prompt once
    targets: float  # tokens whose log-probability is asked for
    pairs: float  # of tokens that see one another
    again: float = 0.0  # share of the layers' forward pass that the backward pass makes again
    trains: bool = True  # else the forward pass alone
    lora: bool = False
    fp8: bool = False
    shared: float = 0.0  # tokens whose keys and values are gathered once more, where prompts are shared


def learn(made: Calibration, shape: ModelShape, work: Pass, width: int, cut: Cut) -> Cost:
    """A forward and a backward pass; forward alone without `trains`."""
    tokens = work.tokens / cut.cp
    rate = made.flops8 if work.fp8 and made.flops8 else None
    ahead = matmuls_s(made, shape, tokens, width, cut, rate)
    times = (1 + work.again + (1 if work.lora else 2)) if work.trains else 1.0
    heads = shape.heads * (shape.head_dim + shape.rotary) / cut.tp
    attention = 4 * shape.layers / cut.pp * heads * work.pairs / cut.cp
    kept = tokens * shape.layers / cut.pp * (8 * shape.hidden + 4 * shape.visited / cut.tp) * width
    words = made.matmul_s(min(4096.0, work.targets / cut.cp), shape.hidden, shape.vocabulary / cut.tp, width)
    chunks = max(1.0, work.targets / cut.cp / 4096) if work.targets else 0.0
    cost = {name: amount * times for name, amount in ahead.items() if name != "expert_layer"}
    cost |= {
        "attention": attention * (3.5 + work.again if work.trains else 1.0) / made.flops,
        "elements": kept * (3.0 + work.again if work.trains else 1.0) / made.bytes_per_s,
        "logprob": words * chunks * (4.0 if work.trains else 1.0) / cut.pp,
        "once": 1.0,
        "layer": shape.layers / cut.pp * (1.0 if work.trains else 0.34),
    }
    if "expert_layer" in ahead:
        cost["expert_layer"] = ahead["expert_layer"]
    if work.lora:
        cost["lora"] = (
            tokens * shape.layers / cut.pp * (6 * shape.hidden + 3 * shape.visited) * width / made.bytes_per_s
        )
    if work.fp8:
        cost["fp8"] = kept / made.bytes_per_s
    if work.shared:
        cost["shared"] = work.shared * cache_bytes(shape, width) / cut.pp / made.bytes_per_s
    return _named("learn", cost)


def pass_of(config: Config, prompts: Sequence[float], responses: Sequence[Sequence[float]]) -> Pass:
    """One micro-batch of whole groups: each prompt with its responses."""
    learn = config.learn
    shares = config.shares_prompts and config.train.samples_per_prompt > 1
    tokens = targets = pairs = shared = 0.0
    for prompt, made in zip(prompts, responses, strict=True):
        total = float(sum(made))
        targets += total
        tokens += total + (prompt if shares else prompt * len(made))
        pairs += prompt * prompt / 2 * (1 if shares else len(made)) + sum(r * prompt + r * r / 2 for r in made)
        shared += len(made) * prompt + total if shares else 0.0
    again = {"none": 0.0, "selective": 0.1, "mlp": 0.6, "full": 1.0}[learn.recompute] / learn.recompute_every
    return Pass(tokens, targets, pairs, again, True, learn.lora_rank > 0, learn.fp8 != "none", shared)


def update(
    made: Calibration, trained: float, bytes_each: float, host_bytes: float = 0.0, host_rate: float = 1.0
) -> Cost:
    """One optimizer update of weights that one device holds."""
    cost = {"bytes": trained * bytes_each / made.bytes_per_s, "once": 1.0}
    if host_bytes:
        cost["host"] = host_bytes / host_rate
    return _named("update", cost)


def _named(phase: str, cost: Cost) -> Cost:
    return {f"{phase}.{name}": amount for name, amount in cost.items()}
