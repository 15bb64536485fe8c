"""Each defect that an NPU once met, put back, is seen: by the stand-in's refusal, or by what is counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.learn.grouped import grouped
from tests.npu.test_decoding import OPTIONS, asked, same
from tests.npu.test_learning import a_learner
from tests.rollout.tiny import roll, tiny_model
from tidemill.device import vendor
from tidemill.learn import gradients
from tidemill.learn.rows import packing, tokens
from tidemill.models import upload
from tidemill.models.attention import packed
from tidemill.rollout.native.batch import inputs
from tidemill.rollout.native.draw import sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward import runner
from tidemill.rollout.native.pages import paged


def learn(npu: torch.device, counts: Any) -> None:
    learner, batch = a_learner("qwen3", npu), grouped(np.random.default_rng(0), 6, 4)
    learner.accumulate(batch)
    learner.update()
    counts.reset()
    learner.accumulate(batch)
    learner.update()
    assert counts.syncs <= 2 * len(learner._dealt(batch)) and counts.refusals == []


def decode(npu: torch.device, counts: Any, dtype: torch.dtype = torch.float32) -> None:
    model = tiny_model("qwen3").to(dtype)
    engine = NativeEngine(copy.deepcopy(model).to(npu), **OPTIONS)
    assert engine.decoder is not None, "decoding is not captured"
    counts.reset()
    found = roll(engine, asked())
    assert counts.refusals == []
    if dtype == torch.float32:
        same(found, roll(NativeEngine(model, **OPTIONS), asked()))


def decode_sixteen(npu: torch.device, counts: Any) -> None:
    decode(npu, counts, torch.bfloat16)


def decode_eagerly(npu: torch.device, counts: Any) -> None:
    """One wait for a step's tokens, none for its layers."""
    engine = NativeEngine(tiny_model("qwen3").to(npu, torch.bfloat16), **OPTIONS, graphs=False)
    steps, counts_before = 0, counts.reset()
    for request in asked():
        engine.submit(request)
    while engine.has_work:
        engine.step()
        steps += 1
    assert counts_before is None and counts.syncs <= 4 * steps


def float64_scalars(patch: pytest.MonkeyPatch) -> None:
    for module in (gradients, tokens):
        patch.setattr(module, "widest", lambda _: torch.float64)


def pageable_uploads(patch: pytest.MonkeyPatch) -> None:
    def pageable(array: Any, device: torch.device, dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    for module in (tokens, packing, packed):
        patch.setattr(module, "upload", pageable)


def no_kernels_without_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner.ascend_kernels, "works_on", lambda _: False)


def an_operator_left_to_the_host(patch: pytest.MonkeyPatch) -> None:
    def invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        cumulative = weights.cumsum(-1)
        below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(cumulative[:, -1:]))
        target = torch.minimum(u.unsqueeze(1) * cumulative[:, -1:], below)
        return torch.searchsorted(cumulative, target, right=True).squeeze(1)

    patch.setattr(sampling, "_invert", invert)


def lengths_read_from_the_device(patch: pytest.MonkeyPatch) -> None:
    library = paged.KINDS["fused_infer"]

    def asking(q: Any, keys: Any, values: Any, queries: paged.Queries) -> Any:
        told = paged.Queries(queries.table, queries.length, queries.length.tolist(), queries.scale, queries.window)
        return library.decode(q, keys, values, told)

    changed = {name: getattr(library, name) for name in ("works", "page_size", "most_dim", "has_window")}
    one = paged.PagedAttention(asking, **changed, host_argument=library.host_argument)
    patch.setattr(paged, "KINDS", {"fused_infer": one})


Check = Callable[[torch.device, Any], None]
DEFECTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "a scalar in float64": (float64_scalars, learn),
    "uploads that wait": (pageable_uploads, learn),
    "decoding that is captured only where Triton is": (no_kernels_without_triton, decode),
    "a draw by an operator that the device lacks": (an_operator_left_to_the_host, decode),
    "lengths read from the device inside a graph": (lengths_read_from_the_device, decode_sixteen),
    "lengths read from the device in every layer": (lengths_read_from_the_device, decode_eagerly),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_put_back_is_seen(
    defect: str, npu: torch.device, counts: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back, check = DEFECTS[defect]
    check(npu, counts)
    put_back(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(npu, counts)


def test_what_is_patched_is_what_is_used() -> None:
    assert upload.upload is inputs.upload and vendor.widest(torch.device("npu")) == torch.float32
