"""How near the fast paths are to the plain ones, on a CPU in float32: the figures behind what the tests only bound.

tidemill bench right --json
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

ABOUT = "float32 gaps to the plain paths: the learner's gradients, every architecture's tokens, drawn tokens' chances"
OPTIONS: dict[str, Any] = {"draws": 20_000}
PATHS: dict[str, dict[str, Any]] = {
    "packed": {"share_prompts": False},
    "shared prompts": {},
    "recompute full": {"recompute": "full"},
    "recompute every second layer": {"recompute": "full", "recompute_every": 2},
    "recompute mlp": {"recompute": "mlp"},
    "recompute selective": {"recompute": "selective"},
    "activations on the host": {"offload": "activations"},
    "optimizer on the host": {"optimizer_on_host": True, "moments": "float32"},
    "compiled": {"compile": "on"},
    "LoRA": {"lora_rank": 4},
    "DoRA": {"lora_rank": 4, "dora": True},
}
CUTS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top_k 7": {"top_k": 7},
    "top_p 0.6": {"top_p": 0.6},
    "min_p 0.2": {"min_p": 0.2},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {
        "gradients": {name: gradient_gap(learn) for name, learn in PATHS.items()},
        "architectures": architectures(),
        "draws": {name: drawn(how, int(options["draws"])) for name, how in CUTS.items()},
    }


def gradient_gap(learn: dict[str, Any]) -> dict[str, float]:
    """Loss and whole gradient of a GRPO step against the loss written out over one unpacked sample at a time, through
    transformers' own attention. Adapters' gradients are those of the merged weights by the chain rule."""
    import torch
    from tests.learn.grouped import grouped
    from tests.learn.plain import by_the_chain_rule, written_out

    from tidemill.algorithms.shared.registry import get
    from tidemill.learn import layers
    from tidemill.learn.engine import Learner
    from tidemill.models import lora
    from tidemill.models.load import make_tiny
    from tidemill.recipe.config import Config, TinyModel

    layers.OFFLOAD_BYTES = 0  # everything of a model this small
    batch = grouped(np.random.default_rng(0), 5, 4, words=40, logprob=-3.0)
    shape = TinyModel(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, window=64)
    model = make_tiny(shape, torch.float32, 0, torch.device("cpu")).model
    settings = {"algorithm": {"name": "grpo", "aggregation": "sample_mean"}, "learn": learn}
    learner = Learner(
        model, Config.model_validate({**settings, "train": {"tokens_per_microbatch": 60}}), get("grpo"), 1
    )
    if lora.is_attached(model):
        draw = torch.Generator().manual_seed(1)
        for p in learner.gradients.parameters:  # away from the start, where B is 0
            p.data += 0.05 * torch.randn(p.shape, generator=draw)
    loss, plain = written_out(model, batch)
    learner.accumulate(batch)
    whole = learner._whole
    pairs = []
    for name, m in model.named_modules():
        if isinstance(m, lora.LoraLinear):
            pairs += [(p.grad / whole, wanted) for p, wanted in by_the_chain_rule(m, plain[f"{name}.weight"])]
    if not pairs:
        pairs = [(learner.gradients.of(p) / whole, plain[n]) for n, p in model.named_parameters()]
    far = sum((ours - wanted).square().sum().item() for ours, wanted in pairs)
    long = sum(wanted.square().sum().item() for _, wanted in pairs)
    return {"gradient": (far / long) ** 0.5, "loss": abs(learner.update()["loss"] - loss), "tensors": len(pairs)}


def architectures() -> dict[str, dict[str, float]]:
    """Greedy samples of the native engine against the Hugging Face engine's: how many are equal, and the largest gap of
    a log-probability."""
    from tests.rollout.tiny import MODELS, VOCAB, roll, tiny_model

    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.hf import HFEngine
    from tidemill.rollout.native.engine import NativeEngine

    found = {}
    for name in MODELS:
        model, rng = tiny_model(name), np.random.default_rng(1)
        asked = [
            Request(i, rng.integers(3, VOCAB, length).tolist(), Sampling(temperature=0, max_tokens=14), n=2)
            for i, length in enumerate([1, 5, 5, 13, 30])
        ]
        wanted = roll(HFEngine(model, eos_ids=[2]), asked)
        made = roll(NativeEngine(model, eos_ids=[2], max_seqs=5, max_len=64, page_size=4, step_tokens=10), asked)
        gaps = [max(abs(a - b) for a, b in zip(made[key].logprobs, wanted[key].logprobs)) for key in wanted]
        equal = sum(made[key].tokens == wanted[key].tokens for key in wanted)
        found[name] = {"samples": len(wanted), "equal": equal, "logprob_gap": max(gaps)}
    return found


def drawn(how: dict[str, Any], draws: int) -> dict[str, float]:
    """First tokens of many samples of one prompt against the model's chances, truncated: chi-square."""
    import torch
    from tests.rollout.tiny import kept_chances, roll, tiny_model

    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine

    model, prompt = tiny_model("qwen3"), [5, 6, 7]
    engine = NativeEngine(model, eos_ids=[], max_seqs=64, max_len=64)
    done = roll(engine, [Request(0, prompt, Sampling(max_tokens=1, ignore_eos=True, **how), n=draws)])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].double()
    p = (logits / how.get("temperature", 1.0)).softmax(-1).numpy()
    expected = kept_chances(p, how) * draws
    counts = np.bincount([c.tokens[0] for c in done.values()], minlength=len(p))
    common = expected >= 5
    e = np.append(expected[common], expected[~common].sum())
    seen = np.append(counts[common], counts[~common].sum())
    statistic = float(((seen - e)[e > 0] ** 2 / e[e > 0]).sum())
    freedom = int((e > 0).sum()) - 1
    chance = torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2)).item()
    outside = int(counts[expected == 0].sum())
    return {"draws": draws, "chi_square": statistic, "freedom": freedom, "p": chance, "outside": outside}
