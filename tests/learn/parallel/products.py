"""One rank against many: `product` runs two updates of the same samples both ways and compares everything.

A case names a model and parallel sizes. Every rank makes the same model from the same seed; rank 0 also learns alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.learn.grouped import grouped
from tidemill.algorithms.shared.registry import get
from tidemill.batch import Batch, Column
from tidemill.learn.engine import Learner
from tidemill.models import lora
from tidemill.models.attention import registry as attention
from tidemill.recipe.config import Config

COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 8, "norm_topk_prob": True}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1,    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 4,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (Qwen3Config, {"vocab_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "untied": (LlamaConfig, {"vocab_size": 61, "num_key_value_heads": 8, "tie_word_embeddings": False}),
    "biased": (Qwen2Config, {"vocab_size": 63, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "few_keys": (Qwen3Config, {"vocab_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "one_key": (Qwen3Config, {"vocab_size": 64, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "deep": (Qwen3Config, {"vocab_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": True,
                           "num_hidden_layers": 4}),
    "experts": (Qwen3MoeConfig, {"vocab_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": False, **EXPERTS}),
    "mixtral": (MixtralConfig, {"vocab_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": True,
                                  "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "latent": (DeepseekV3Config, {"vocab_size": 64, "num_key_value_heads": 8, "tie_word_embeddings": False, **LATENT}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    parallel: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)  # of the recipe, beside learn.parallel

    @property
    def ranks(self) -> int:
        sizes = [self.parallel.get(n, 1) for n in ("replicate", "fsdp", "cp", "tp", "pp")]
        return int(np.prod(sizes))

    def __str__(self) -> str:
        sizes = "·".join(f"{n}{v}" for n, v in self.parallel.items())
        return f"{self.model}-{sizes}" + "".join(f"-{k}" for k in self.settings.get("name", []))


def make_model(name: str, seed: int = 0) -> Any:
    kind, own = MODELS[name]
    config = kind(**{**COMMON, **own})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        for p in model.parameters():  # gains and biases that are not all alike
            if p.ndim == 1:
                p.data += 0.1 * torch.randn_like(p)
        for module in model.modules():  # the routers' own start is all zeros: every expert would be the same
            if "Router" in type(module).__name__:
                torch.nn.init.normal_(module.weight, std=0.3)
    model.eval()
    return model


def samples(seed: int = 0, groups: int = 5, each: int = 3, longest: int = 12) -> Batch:
    rng = np.random.default_rng(seed)
    batch = grouped(rng, groups, each, longest=longest, spread=0.3)
    # Two of eight experts in two layers: what rollout chose, for cases that replay it.
    routes = [np.argsort(rng.random((2 * n - 2, 8)), 1)[:, :2].reshape(-1) for n in batch["tokens"].lengths]
    return batch.merge({"routes": Column.jagged(routes, np.int16)})


def recipe(parallel: dict[str, Any], settings: dict[str, Any]) -> Config:
    own = {k: v for k, v in settings.items() if k != "name"}
    # AdamW divides by a gradient's own size: a small epsilon would make a whole step of rounding around 0.
    learn = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.1, **own.pop("learn", {}), "parallel": parallel}
    base = {"algorithm": {"name": "grpo", "entropy_coef": 0.01}, "train": {"tokens_per_microbatch": 48}}
    return Config.model_validate({**base, **own, "learn": learn})


def product(case: Case, updates: int = 2) -> dict[str, float]:
    """On every rank of a world of `case.ranks`. Gives, on rank 0, how far many ranks are from one."""
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe(case.parallel, case.settings)
    model = make_model(case.model)
    alone = _learn_alone(copy.deepcopy(model), recipe({}, case.settings), updates) if dist.get_rank() == 0 else None
    learner = Learner(model, config, get(config.algorithm.name), updates, mesh.build(config.learn.parallel))
    found: dict[str, Any] = {"logprobs": [learner.logprobs(samples(9)).values]}
    for i in range(updates):
        learner.accumulate(samples(i))
        grads = gathered(learner, {n: g for n in learner.gradients.named if (g := _summed(learner, n)) is not None})
        found.setdefault("gradients", []).append({n: g / learner._whole for n, g in grads.items()})
        found.setdefault("metrics", []).append(learner.update())
        found.setdefault("weights", []).append(gathered(learner, learner.pieces()))
    learner.close()
    return {} if alone is None else differences(alone, found)


def _summed(learner: Any, name: str) -> Any:
    """A gradient as it will be once `finish` has added up its parts; `finish` is not to be called twice."""
    gradients = learner.gradients
    kind, grad = learner.cuts[name].adds, gradients.of(gradients.named[name])
    if grad is not None and gradients.replicas is not None:
        grad = gradients.replicas.all_reduce(grad.clone())
    if grad is None or kind not in learner.links:
        return grad
    return learner.links[kind].all_reduce(grad.clone())


def _learn_alone(model: Any, config: Config, updates: int) -> dict[str, Any]:
    learner = Learner(model, config, get(config.algorithm.name), updates)
    found: dict[str, Any] = {"logprobs": [learner.logprobs(samples(9)).values]}
    for i in range(updates):
        learner.accumulate(samples(i))
        held = {n: learner.gradients.of(p) for n, p in model.named_parameters()}
        grads = {n: g.clone() / learner._whole for n, g in held.items() if g is not None}
        found.setdefault("gradients", []).append(grads)
        found.setdefault("metrics", []).append(learner.update())
        found.setdefault("weights", []).append({n: p.detach().clone() for n, p in lora.merged(model).items()})
    return found


def gathered(learner: Any, pieces: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors, put together from every rank's pieces by the learner's layout."""
    own = {n.removeprefix(prefix): t for n, t in pieces.items() if n.startswith(prefix)}
    own = {n: t for n, t in own.items() if n in learner.cuts}  # buffers are whole everywhere
    told = [(p.box, n, own[n]) for n in own for p in learner.layout().pieces(n) if p.rank == dist.get_rank()]
    shapes = {n: learner.cuts[n].shape for n in own}
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (told, shapes))
    out: dict[str, torch.Tensor] = {}
    for rank_told, rank_shapes in everything:
        for box, name, tensor in rank_told:
            target = out.setdefault(name, torch.full(rank_shapes[name], float("nan")))
            target[tuple(slice(*b) for b in box)] = tensor
    return out


def differences(alone: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """Largest difference of each kind; gradients are compared with the largest gradient of the update."""
    out: dict[str, float] = {"logprobs": float(np.abs(alone["logprobs"][0] - found["logprobs"][0]).max())}
    for kind in ("gradients", "weights"):
        for a, b in zip(alone[kind], found[kind]):
            assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
            scale = max(1.0, max(float(t.abs().max()) for t in a.values()))
            for name in a:
                difference = float((a[name] - b[name]).abs().max()) / scale
                assert difference == difference, f"{kind} of {name} were not all there"
                if difference > out.get(kind, -1.0):
                    out[kind], out[f"{kind}_at"] = difference, name  # type: ignore[assignment]
    for a, b in zip(alone["metrics"], found["metrics"]):
        assert a.keys() <= b.keys(), sorted(a.keys() - b.keys())
        for name in a:
            out[name] = max(out.get(name, 0.0), abs(a[name] - b[name]) / max(1.0, abs(a[name])))
    return out
