"""Library attention over pages makes the tokens of the plain walk. Neither library runs on a CPU, so stand-ins with
their signatures compute what their documentation says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model
from torch import Tensor

from tidemill.models.attention.registry import AttentionForm
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.pages import gathered, paged
from tidemill.rollout.native.pages.attention import causal_attention
from tidemill.rollout.native.pages.cache import TokenStore


def plainly(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: list[int], scale: float, left: int
) -> Tensor:
    """q (rows, heads, dim) over (pages, page_size, kv_heads, dim): the own position and `left` before it, -1: all."""
    out = torch.empty_like(q)
    for row, n in enumerate(length):
        held = table[row, : -(-n // keys.shape[1])].long()
        k, v = (x[held].flatten(0, 1)[:n].transpose(0, 1) for x in (keys, values))
        window = None if left < 0 else left + 1
        out[row] = causal_attention(q[row][None, :, None], k[None], v[None], n - 1, AttentionForm(scale, window))[
            0, :, 0
        ]
    return out


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    assert seqused_k is not None and block_table is not None and scale is not None
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert cu_seq_q.tolist() == list(range(len(query) + 1)) and max_q == 1 and max_k == int(seqused_k.max())
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[2])
    return plainly(query, key, value, block_table, seqused_k.tolist(), scale, window_size[0])


def fused_infer(
    query: Tensor, key: Tensor, value: Tensor, *, actual_seq_lengths_kv: list[int], block_table: Tensor,
    block_size: int, num_heads: int, num_key_value_heads: int, scale: float, input_layout: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert input_layout == "BSH" and query.shape[1] == 1 and query.is_contiguous() and key.is_contiguous()
    assert key.shape[1] == block_size and block_size % 16 == 0 and block_table.dtype == torch.int32
    assert isinstance(actual_seq_lengths_kv, list) and len(actual_seq_lengths_kv) == len(query) == len(block_table)
    pages = [x.unflatten(2, (num_key_value_heads, -1)) for x in (key, value)]
    q = query[:, 0].unflatten(1, (num_heads, -1))
    out = plainly(q, *pages, block_table, actual_seq_lengths_kv, scale, -1)
    return out.flatten(1).unsqueeze(1), torch.zeros(0)


@pytest.fixture(params=["varlen", "fused_infer"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library as if it were here, for float32 too, so that tokens can be compared exactly."""
    chosen = paged.KINDS[request.param]
    here = paged.PagedAttention(chosen.decode, lambda _: True, 16, chosen.most_dim, chosen.has_window)
    monkeypatch.setattr(paged, "KINDS", {request.param: here})
    monkeypatch.setattr(paged, "SIXTEEN_BITS", (torch.float32,))
    monkeypatch.setattr(paged, "_varlen_attn", lambda: varlen_attn)
    vendor = SimpleNamespace(npu_fused_infer_attention_score=fused_infer)
    monkeypatch.setattr(paged.vendor, "operators", lambda _: vendor)
    yield request.param


@pytest.mark.parametrize("name", ["qwen3", "mistral", "phi3", "qwen3-moe", "gemma2", "deepseek-v3"])
def test_tokens_are_those_of_the_plain_walk(kind: str, name: str) -> None:
    model = tiny_model(name)
    rng = np.random.default_rng(2)
    asked = [
        Request(i, rng.integers(3, VOCAB, 2 + 8 * i).tolist(), Sampling(max_tokens=20, seed=1), n=3) for i in range(4)
    ]
    options = {"eos_ids": [2], "max_seqs": 6, "max_len": 64, "cache_tokens": 256, "step_tokens": 24, "kernels": False}
    engine = NativeEngine(model, **options)
    # Values narrower than keys, capped scores, and a window where the library has none: the pages are walked.
    is_served = name in ("qwen3", "qwen3-moe") or (kind == "varlen" and name in ("mistral", "phi3"))
    assert isinstance(engine.store, TokenStore) == is_served == (engine.library is not None)
    found = roll(engine, asked)
    paged.KINDS.clear()
    wanted = roll(NativeEngine(model, **options), asked)
    assert {key: c.tokens for key, c in found.items()} == {key: c.tokens for key, c in wanted.items()}
    for key, completion in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)
    assert engine.pool.used == 0


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "deepseek-v3", "gpt-oss"])
def test_gathered_pages_give_the_tokens_of_the_walk(name: str, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    rng = np.random.default_rng(2)
    asked = [Request(i, rng.integers(3, VOCAB, 2 + 8 * i).tolist(), Sampling(max_tokens=20), n=3) for i in range(4)]
    options: dict[str, Any] = {"eos_ids": [2], "max_seqs": 6, "max_len": 64, "cache_tokens": 256, "kernels": False}
    wanted = roll(NativeEngine(model, cache_dtype=cache, **options), asked)
    monkeypatch.setattr(paged, "can_walk", lambda _: False)
    monkeypatch.setattr(gathered, "GATHERED_BYTES", 1)  # a page at a time
    found = roll(NativeEngine(model, cache_dtype=cache, **options), asked)
    assert {key: c.tokens for key, c in found.items()} == {key: c.tokens for key, c in wanted.items()}
    for key, completion in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)


def test_the_stand_in_has_the_signature_of_torchs_own() -> None:
    real = paged._varlen_attn()
    if real is None:
        pytest.skip("this torch has no block tables")
    assert list(inspect.signature(real).parameters) == list(inspect.signature(varlen_attn).parameters)


def test_nothing_is_chosen_on_a_cpu() -> None:
    model = tiny_model("qwen3")
    assert paged.choose(model, torch.device("cpu"), torch.bfloat16) is None
    assert paged.choose(model, torch.device("cpu"), torch.float32) is None
