"""The Triton kernels of the gated delta rule against its plain torch; without a device in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_DEVICE = torch.accelerator.is_available()
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from tests.models import test_chunked_delta as plain  # noqa: E402

from tidemill.models.recurrent.chunked import conv, layer, rule, scan, triton_kernels  # noqa: E402
from tidemill.models.recurrent.chunked.plan import CHUNK, RowPlan, Segment  # noqa: E402

DEVICE = torch.accelerator.current_accelerator() if HAS_DEVICE else torch.device("cpu")
SEGMENTS = [Segment(70), Segment(2), Segment(9, parent=0), Segment(0, parent=1), Segment(CHUNK + 1, parent=0)]
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-3}


def both(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """What `run` gives with plain torch, and with the kernels."""
    found = []
    for chosen in (None, triton_kernels):
        for module in (conv, scan, rule, layer):
            monkeypatch.setattr(module, "kernels", lambda kind, chosen=chosen: chosen)
        found.append(run())
    return found[0], found[1]


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RowPlan(SEGMENTS, DEVICE)
    made = [x.detach().to(DEVICE).requires_grad_() for x in plain.inputs(plan.tokens)]
    weights = torch.randn(plan.tokens, 2, 32, device=DEVICE)

    def run() -> list[torch.Tensor]:
        out, ends = rule.gated_delta(*made, plan)
        return [out, ends, *torch.autograd.grad((out * weights).sum() + ends.square().sum(), made)]

    for theirs, ours in zip(*both(monkeypatch, run)):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RowPlan([*SEGMENTS, Segment(3, given=0)], DEVICE)
    x = torch.randn(3 + plan.tokens, 70, device=DEVICE).requires_grad_()
    weight = torch.randn(70, 4, device=DEVICE).requires_grad_()
    weights = torch.randn(plan.tokens, 70, device=DEVICE)

    def run() -> list[torch.Tensor]:
        out = conv.convolved(x, weight, None, plan.taps(4))
        return [out, *torch.autograd.grad((out * weights).sum(), [x, weight])]

    for theirs, ours in zip(*both(monkeypatch, run)):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("heads", [(2, 2), (2, 4)])
def test_one_token_of_each_of_many_sequences(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    config = plain.tiny.config("qwen3_5_text")
    config.linear_num_key_heads, config.linear_num_value_heads = heads
    config.linear_key_head_dim, config.linear_value_head_dim = 16, 32
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    module = Qwen3_5GatedDeltaNet(config, 0).to(DEVICE)
    channels = 2 * heads[0] * 16 + heads[1] * 32
    begun = torch.randn(5, channels, 4, device=DEVICE), torch.randn(5, heads[1], 16, 32, device=DEVICE)
    slots = torch.tensor([3, 0, 4], dtype=torch.int32, device=DEVICE)
    x = torch.randn(3, 32, device=DEVICE)

    def run() -> list[torch.Tensor]:
        states = [one.clone() for one in begun]
        with torch.no_grad():
            out = layer.step(module, x, *states, slots)
        return [out, *states]

    for theirs, ours in zip(*both(monkeypatch, run)):
        torch.testing.assert_close(ours, theirs, **CLOSE)
