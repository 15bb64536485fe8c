"""AdamW's fused update, in Triton's interpreter where there is no device, against its plain form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tidemill.learn.optim import triton_adam
from tidemill.learn.optim.adam import Adam

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
HOW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SIZES = [(3,), (256,), (5, 300), (7, 256)]


def optimizer(p: torch.nn.Parameter, **settings: Any) -> Adam:
    return Adam([{"params": [p], "weight_decay": 0.1}], gradient=lambda p: p.grad, **HOW, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master", ["none", "float32"])
@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("shape", SIZES)
def test_a_fused_update_is_the_plain_one(shape: tuple[int, ...], moments: str, master: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype))
    one = optimizer(p, moments=moments, master=master)
    group, state = one.param_groups[0], one._fresh(p)
    for step in range(1, 4):
        grad = (torch.randn(shape, device=DEVICE) * 10.0**-step).to(dtype)
        ours, mine = p.detach().clone(), {k: v.clone() for k, v in state.items()}
        state = one._plain_step(p.data, grad.float(), state, step, group, None)
        triton_adam.step_(ours, grad, mine, step, group, None)
        assert mine.keys() == state.keys()
        for name, wanted in state.items():
            if wanted.dtype == torch.float32:
                torch.testing.assert_close(mine[name], wanted, rtol=1e-5, atol=1e-8, msg=name)
            else:  # a code may fall to its neighbour where it lies on the edge
                apart = (mine[name].int() - wanted.int()).abs()
                assert apart.max() <= 1 and apart.float().mean() < 0.01, name
        torch.testing.assert_close(
            ours.float(), p.detach().float(), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-7
        )


def test_fused_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.ones(20_000, device=DEVICE, dtype=torch.bfloat16))
    one = optimizer(p, master="stochastic")
    group = {**one.param_groups[0], "lr": 2.0**-11, "weight_decay": 0.0}
    grad = -torch.ones_like(p)
    first, again, other = p.detach().clone(), p.detach().clone(), p.detach().clone()
    for x, seed in ((first, 1), (again, 1), (other, 2)):
        triton_adam.step_(x, grad, one._fresh(p), 1, group, seed)
    exact = 1 + 2.0**-11  # a sixteenth of the way to bfloat16's next number
    assert set(first.float().unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert first.float().mean().item() == pytest.approx(exact, abs=1e-4)
    assert torch.equal(first, again) and not torch.equal(first, other)
