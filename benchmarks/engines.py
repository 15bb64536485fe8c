"""Rollout engines over ranks of gloo: every product of `rollout.tp`, `dp`, `pp` and `ep` up to 8 ranks that a model's
sizes allow makes the tokens and log-probabilities of one rank; and experts that are laid out by their load.

Small random models of four kinds: dense, Qwen3-MoE, DeepSeek-V3 (latent attention, a shared expert) and GPT-OSS
(attention sinks, windows, biased experts). Prompts of several lengths, greedy, drawn and truncated samples, a pause
with everything resumed; mixtures record the routes of every token. `sample` runs that many products of each kind alone.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.balance import busiest
from tidemill.rollout.native.ranks.grid import Grid
from tidemill.rollout.native.ranks.links import Links
from tidemill.rollout.native.ranks.replicas import Replicas

ABOUT = "engines over ranks: every product of tp, dp, pp and ep against one rank, and experts laid out by their load"
OPTIONS: dict[str, Any] = {"families": "dense,qwen3_moe,deepseek_v3,gpt_oss", "ranks": 8, "sample": 0}

VOCABULARY, SEED, WAIT_S = 131, 5, 300.0
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 8,
    "num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 24, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3Config", {
        **EXPERTS, "n_routed_experts": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 1}),
    "gpt_oss": ("GptOssConfig", {
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 24, "num_experts_per_tok": 3,
        "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    grid: Grid
    layers: int = BASE["num_hidden_layers"]


Samples = dict[tuple[int, int], tuple[list[int], list[float], list[float] | None, list[int] | None]]


@dataclass
class Comparison:
    products: int = 0
    tokens: int = 0
    largest_gap: float = 0.0
    unequal: list[str] = field(default_factory=list)  # products with another token, route or kept mass

    def add(self, case: Case, made: Samples, alone: Samples) -> None:
        self.products += 1
        is_equal = made.keys() == alone.keys()
        for key in made.keys() & alone.keys():
            (tokens, logprobs, kept, routes), expected = made[key], alone[key]
            is_equal &= tokens == expected[0] and routes == expected[3] and (kept is None) == (expected[2] is None)
            if tokens != expected[0]:
                continue
            self.tokens += len(tokens)
            gaps = np.abs(np.array([*logprobs, *(kept or [])]) - np.array([*expected[1], *(expected[2] or [])]))
            self.largest_gap = max(self.largest_gap, float(gaps.max()))
        if not is_equal:
            self.unequal.append(f"{case.family}: {case.grid}")


def make_model(family: str, layers: int = BASE["num_hidden_layers"]) -> Any:
    import transformers

    from tidemill.models.attention import registry
    from tidemill.models.mixture import experts

    kind, changes = FAMILIES[family]
    config = getattr(transformers, kind)(**{**BASE, **changes, "num_hidden_layers": layers})
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=registry.NAME)
    with torch.no_grad():  # fresh weights are so small that logits hardly differ
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))  # biases and sinks that are 0 would hide mistakes
    experts.plug(model)
    return model.eval()


def requests(count: int = 5) -> list[Request]:
    rng = np.random.default_rng(SEED)
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 20, "temperature": 1.2}]
    return [
        Request(i, rng.integers(3, VOCABULARY, 3 + 9 * i).tolist(), Sampling(max_tokens=10 + i, **kinds[i % 5]), n=2)
        for i in range(count)
    ]


def samples(engine: Any, asked: Sequence[Request], pause_at: int = 4) -> Samples:
    """Roll out, with a pause on the way."""
    for request in asked:
        engine.submit(request)
    found: Samples = {}
    steps = 0
    while engine.has_work:
        for done in engine.step():
            found[done.request.id, done.index] = _sample(done)
        steps += 1
        if steps == pause_at:
            engine.resume(engine.pause())
    return found


def _sample(done: Completion) -> tuple[list[int], list[float], list[float] | None, list[int] | None]:
    assert done.error is None, done.error
    return done.tokens, done.logprobs, done.kept, None if done.routes is None else done.routes.tolist()


def make_engine(model: Any, links: Links | None = None) -> NativeEngine:
    replicas = 1 if links is None else links.grid.dp
    has_experts = hasattr(model.config, "num_experts_per_tok")
    return NativeEngine(
        model,
        eos_ids=[2],
        max_seqs=-(-8 // replicas),
        max_len=96,
        step_tokens=40,
        record_routes=has_experts,
        links=links,
    )


def cases(families: Sequence[str], ranks: int, sample: int = 0) -> list[Case]:
    """All products of so many ranks or fewer that the models allow; or some, spread over them."""
    found = []
    for family in families:
        own = [Case(family, grid) for grid in _grids(make_model(family), ranks, family != "dense")]
        found += own if not sample else [own[i * (len(own) - 1) // max(1, sample - 1)] for i in range(sample)]
    return found


def _grids(model: Any, ranks: int, has_experts: bool) -> Iterator[Grid]:
    from tidemill.errors import ModelError

    for count in range(2, ranks + 1):
        sizes = [n for n in range(1, count + 1) if count % n == 0]
        for pp, tp in ((pp, tp) for pp in sizes for tp in sizes if count % (pp * tp) == 0):
            dp = count // (pp * tp)
            for ep in [n for n in range(1, dp * tp + 1) if has_experts or n == dp * tp]:
                grid = Grid(tp, dp, pp, ep)
                try:
                    if (dp * tp) % ep == 0:
                        share.check_divides(model, grid)
                        yield grid
                except ModelError:
                    continue


def compare(chosen: Sequence[Case], seconds: float = WAIT_S) -> Comparison:
    """Every case by ranks of its own, against one rank."""
    found = Comparison()
    models = dict.fromkeys((case.family, case.layers) for case in chosen)
    alone = {model: samples(make_engine(make_model(*model)), requests()) for model in models}
    for ranks in sorted({case.grid.ranks for case in chosen}):
        own = [case for case in chosen if case.grid.ranks == ranks]
        for case, made in zip(own, over_ranks(ranks, _roll, own, seconds)):
            found.add(case, made, alone[case.family, case.layers])
        print(f"{ranks} ranks: {len(own)} products, largest gap {found.largest_gap:.1e}", file=sys.stderr, flush=True)
    return found


def over_ranks(ranks: int, work: Any, jobs: Sequence[Any], seconds: float = WAIT_S) -> Iterator[Any]:
    """What the first rank of a world makes of each job: `work(rank, job, groups)`, called by all ranks."""
    context = multiprocessing.get_context("fork")  # what is imported is not imported again
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "meet"
        processes = [context.Process(target=_rank, args=(r, ranks, place, work, jobs, sender)) for r in range(ranks)]
        for process in processes:
            process.start()
        sender.close()
        try:
            for _ in jobs:
                if not receiver.poll(seconds):
                    raise TimeoutError(f"{ranks} ranks gave nothing within {seconds:g} s")
                yield receiver.recv()
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()


def _rank(rank: int, ranks: int, place: Path, work: Any, jobs: Sequence[Any], sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks)
    groups = {tuple(range(ranks)): dist.group.WORLD}
    try:
        for job in jobs:
            made = work(rank, job, groups)
            if rank == 0:
                sender.send(made)
    finally:
        dist.destroy_process_group()


def _roll(rank: int, case: Case, groups: dict[tuple[int, ...], Any]) -> Samples:
    model = make_model(case.family, case.layers)
    share.cut(model, case.grid, rank)
    links = Links(case.grid, dist.group.WORLD, made=groups)
    return samples(Replicas(make_engine(model, links), links), requests())


# Experts laid out by their load


@dataclass(frozen=True)
class Skewed:
    """A router that prefers the first experts so much that one of the parts has most of the work."""

    grid: Grid
    spare: int = 1
    prefers: float = 4.0  # added to the logits of the first experts
    layers: int = 4


def balance(job: Skewed, seconds: float = WAIT_S) -> dict[str, Any]:
    """Busiest part over an even one before experts are laid out anew and after; whether tokens stay the same."""
    (found,) = over_ranks(job.grid.ranks, _balance, [job], seconds)
    alone = samples(make_engine(_skewed(job)), requests(8))
    made = found.pop("samples")
    assert made is not None
    found["tokens_unchanged"] = all(made[key][0] == alone[key][0] for key in alone)
    return dict(found)


def _skewed(job: Skewed) -> Any:
    model = make_model("gpt_oss", job.layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias.normal_(0.0, 0.3)
            layer.mlp.router.bias[:2] += job.prefers
    return model


def _balance(rank: int, job: Skewed, groups: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    from tidemill.models.buffers import carried
    from tidemill.reshard.layouts.layout import Layout, LayoutEntry, Mesh, Replicate
    from tidemill.reshard.move import BufferRing, GroupWire, Job, move
    from tidemill.reshard.plan import plan

    whole = {name: tensor.detach().clone() for name, tensor in carried(_skewed(job)).items()}
    model = _skewed(job)
    own = share.cut(model, job.grid, rank, job.spare)
    links = Links(job.grid, dist.group.WORLD, made=groups)
    engine = Replicas(make_engine(model, links), links)
    assert engine.balance is not None
    samples(engine, requests(8))
    loads = engine.balance.loads()
    was = {name: busiest(load, job.grid.ep, own.slots[name]) for name, load in loads.items()}
    samples(engine, requests(8))
    started = time.perf_counter()
    engine.balance.plan()
    one = Mesh(("one",), (1,), (0,))  # the learner of this benchmark: a whole model on the first rank
    held = Layout(tuple(LayoutEntry(n, tuple(t.shape), "float32", one, (Replicate(),)) for n, t in whole.items()))
    made = plan(held, own.layout())
    targets = {name: tensor.detach() for name, tensor in carried(model).items()}
    move(Job(made, rank, whole if rank == 0 else {}, targets, 1, "all"), GroupWire(BufferRing()))
    engine.load(None, 1)
    seconds = time.perf_counter() - started
    again = samples(engine, requests(8))
    now = {name: busiest(load, job.grid.ep, own.slots[name]) for name, load in engine.balance.loads().items()}
    hottest = [max(load) * len(load) / sum(load) for load in loads.values()]
    return {
        "hottest_expert_over_mean": max(hottest),
        "busiest_before": max(was.values()),
        "busiest_after": max(now.values()),
        "busiest_after_mean": sum(now.values()) / len(now),
        "seconds": seconds,
        "samples": again,
    }


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    families = str(options["families"]).split(",")
    found = compare(cases(families, int(options["ranks"]), int(options["sample"])))
    laid_out = balance(Skewed(Grid(tp=1, dp=int(options["ranks"]) // 2)))
    return {
        "products": found.products,
        "tokens": found.tokens,
        "largest_gap": found.largest_gap,
        "unequal": len(found.unequal),
        "unequal_products": found.unequal,
        "balance": laid_out,
    }
