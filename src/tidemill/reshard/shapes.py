"""Shapes of published models, so that a plan can be made without devices or weights. From their config.json files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from tidemill.errors import ReshardError, did_you_mean
from tidemill.reshard.layout import Shape
from tidemill.reshard.parallel import LAYER, Model, decoder


@cache
def published(name: str, layers: int = 0) -> Model:
    """The model of that name; with `layers`, only its first so many."""
    key = name.lower().rsplit("/", 1)[-1]
    if key not in MODELS:
        raise ReshardError(
            f"the shapes of {name!r} are not on file{did_you_mean(key, MODELS)}", f"on file are {', '.join(MODELS)}"
        )
    model = MODELS[key]()
    if not layers:
        return model
    kept = {n: s for n, s in model.shapes.items() if (found := LAYER.search(n)) is None or int(found[1]) < layers}
    return replace(model, shapes=kept, layers=min(layers, model.layers))


def _qwen25(name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocabulary: int, tied: bool) -> Model:
    return decoder(
        name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=128 if hidden > 896 else 64, ffn=ffn,
        vocabulary=vocabulary, tied=tied, bias=True,
    )  # fmt: skip


def _qwen3_moe(name: str, layers: int, hidden: int, heads: int, kv: int, expert_ffn: int) -> Model:
    return decoder(
        name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv, head_dim=128, ffn=0, vocabulary=151_936,
        qk_norm=True, experts=128, expert_ffn=expert_ffn,
    )  # fmt: skip


def _latent_attention(at: str) -> Iterable[tuple[str, Shape]]:
    """DeepSeek-V3: queries and keys through low-rank projections; 128 heads of 128 + 64 rotary, values of 128."""
    hidden, heads = 7168, 128
    yield f"{at}.q_a_proj.weight", (1536, hidden)
    yield f"{at}.q_a_layernorm.weight", (1536,)
    yield f"{at}.q_b_proj.weight", (heads * 192, 1536)
    yield f"{at}.kv_a_proj_with_mqa.weight", (512 + 64, hidden)
    yield f"{at}.kv_a_layernorm.weight", (512,)
    yield f"{at}.kv_b_proj.weight", (heads * 256, 512)
    yield f"{at}.o_proj.weight", (hidden, heads * 128)


def _deepseek_v3() -> Model:
    return decoder(
        "DeepSeek-V3-671B", layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=128, ffn=18_432,
        vocabulary=129_280, experts=256, expert_ffn=2048, dense_layers=3, shared_ffn=2048, attention=_latent_attention,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Model]] = {
    "tiny": lambda: decoder("tiny", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocabulary=256),
    "qwen2.5-0.5b": lambda: _qwen25("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151_936, True),
    "qwen2.5-1.5b": lambda: _qwen25("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151_936, True),
    "qwen2.5-7b": lambda: _qwen25("Qwen2.5-7B", 28, 3584, 28, 4, 18_944, 152_064, False),
    "qwen2.5-32b": lambda: _qwen25("Qwen2.5-32B", 64, 5120, 40, 8, 27_648, 152_064, False),
    "qwen2.5-72b": lambda: _qwen25("Qwen2.5-72B", 80, 8192, 64, 8, 29_568, 152_064, False),
    "qwen3-30b-a3b": lambda: _qwen3_moe("Qwen3-30B-A3B", 48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": lambda: _qwen3_moe("Qwen3-235B-A22B", 94, 4096, 64, 4, 1536),
    "deepseek-v3-671b": _deepseek_v3,
}
