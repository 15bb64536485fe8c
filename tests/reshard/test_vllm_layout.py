"""The engine's layout against vLLM's own tensors: names, what is fused into what, and shapes.

`make test-vllm` runs this where vLLM is installed; elsewhere it is skipped, and the names are held by the test below.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from tidemill.estimate.weight_flow import published
from tidemill.reshard.layouts.parallel import Model, ParallelSizes, decoder, engine

TINY: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocabulary": 512}


def dense() -> Model:
    return decoder("dense", **TINY, ffn=128, tied=False, bias=True)


def mixture() -> Model:
    return decoder("mixture", **TINY, ffn=128, experts=4, expert_ffn=32, qk_norm=True)


def tensors(model: Model, expert_module: str = "") -> dict[str, tuple[int, ...]]:
    """Each local tensor of one rank that holds everything, with its shape."""
    layout = engine(model, ParallelSizes(), expert_module=expert_module)
    ends: dict[str, list[int]] = {}
    for name in layout.by_name:
        for piece in layout.pieces(name):
            reach = [at + high - low for at, (low, high) in zip(piece.at, piece.box, strict=True)]
            known = ends.setdefault(piece.home, reach)
            ends[piece.home] = [max(a, b) for a, b in zip(known, reach, strict=True)]
    return {home: tuple(reach) for home, reach in ends.items()}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own")
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_layout_has_the_tensors_that_vllm_makes(kind: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

    import tidemill.models.attention.registry  # noqa: F401  registers the attention
    from tidemill.rollout.vllm.engine import start

    shape = {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": False, "eos_token_id": 2,
        "max_position_embeddings": 128, "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen2Config(**shape) if kind == "dense" else Qwen3MoeConfig(**shape, **experts)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=torch.float32)
    served = start(model, eos_ids=[2], max_len=64, max_seqs=4, enforce_eager=True)
    try:
        (own,) = served.llm.apply_model(named_shapes)
    finally:
        served.close()
    module = "routed_experts" if any(".routed_experts." in name for name in own) else ""
    wanted = tensors(dense() if kind == "dense" else mixture(), module)
    assert sorted(own) == sorted(wanted)
    # On a CPU vLLM packs matrices away and leaves nothing under their names.
    assert {n: s for n, s in own.items() if s != (0,) and s != wanted[n]} == {}


def named_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_fused_and_stacked_tensors_have_vllms_names() -> None:
    """vLLM 0.2x: `packed_modules_mapping` of its models, and `make_expert_params_mapping` of its experts."""
    layer = "model.layers.0"
    own = {n.removeprefix(f"{layer}.") for n in tensors(dense()) if n.startswith(layer)}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    attention = {"self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "self_attn.o_proj.weight"}
    assert own == norms | attention | {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
    own = {n.removeprefix(f"{layer}.mlp.") for n in tensors(mixture()) if n.startswith(f"{layer}.mlp")}
    assert own == {"gate.weight", "experts.w13_weight", "experts.w2_weight"}
    assert tensors(mixture())[f"{layer}.mlp.experts.w13_weight"] == (4, 64, 128)
    deepseek = {n for n in tensors(published("deepseek-v3-671b", layers=1)) if "self_attn" in n}
    assert f"{layer}.self_attn.fused_qkv_a_proj.weight" in deepseek
    assert not any("q_a_proj" in n or "kv_a_proj_with_mqa" in n for n in deepseek if "fused" not in n)
