"""The parts of a decode step that are not matrix products, by Ascend's fused operators, for captured decoding on NPUs.

| part | operator |
|---|---|
| norms | npu_rms_norm |
| rotary positions | npu_rotary_mul |
| gate | npu_swiglu |
| attention over pages | `paged.attend`: npu_fused_infer_attention_score, or `gathered` for what it does not take |
| routing | npu_moe_gating_top_k_softmax |
| experts | npu_moe_init_routing_v2, npu_grouped_matmul, npu_swiglu, npu_moe_token_unpermute |
| draw | torch operations (`draw.device_draw`) |

None asks the host, so a graph can hold them. The attention operator takes from the host how long each sequence is: a
captured graph is told that before each replay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.device import vendor
from tidemill.models import ascend
from tidemill.rollout.native.draw import device_draw

NEEDED = (
    "npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_grouped_matmul", "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2", "npu_moe_token_unpermute",
)  # fmt: skip
NO_QUANTISATION, GATHER_INDEX = -1, 0  # values of the operators' mode arguments


def works_on(device: torch.device) -> bool:
    """Whether the vendor's package brought every operator for this device."""
    return device.type != "cpu" and all(vendor.implements(device.type, f"{device.type}::{name}") for name in NEEDED)


class AscendKernels:
    """Implements `fused.FusedKernels` and `graphs.DrawKernels`."""

    def __init__(self, device: torch.device) -> None:
        self.operators: Any = vendor.operators(device)
        self.draw, self.draw_truncated = device_draw.draw, device_draw.draw_truncated
        self.draw_steered = device_draw.draw_steered

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self.operators.npu_rms_norm(x, weight, eps)[0]
        return normed

    def turns(self, cos: Tensor, sin: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's own cos and sin, (tokens, 1, dim). In the tables the first half of the sines is negative, as
        swapping halves wants it; the operator turns halves itself."""
        half = sin.shape[-1] // 2
        plain = sin.index_select(0, position)[..., half:]
        return cos.index_select(0, position), torch.cat([plain, plain], -1)

    def rotate(
        self, x: Tensor, heads: tuple[int, int], norms: tuple[Tensor, Tensor] | None, turns: tuple[Tensor, ...],
        eps: float,
    ) -> None:  # fmt: skip
        """x (tokens, width) in place: its first `heads` = (queries, keys) heads are normed and turned."""
        cos, sin = turns
        tokens, dim = x.shape[0], cos.shape[-1]
        both = x[:, : sum(heads) * dim].view(tokens, -1, dim)
        if norms is not None:
            parts = torch.split(both, list(heads), 1)
            both = torch.cat([self.rms(part, weight, eps) for part, weight in zip(parts, norms)], 1)
        turned = self.operators.npu_rotary_mul(both.contiguous(), cos, sin)
        x[:, : sum(heads) * dim].copy_(turned.view(tokens, -1))

    def gate(self, x: Tensor) -> Tensor:
        """x (tokens, 2 * width): silu(first half) * second half."""
        gated: Tensor = self.operators.npu_swiglu(x)
        return gated

    # -- mixtures --------------------------------------------------------------------------------------------------

    def route(self, logits: Tensor, bias: Tensor | None, k: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
        """logits (tokens, experts) → the experts chosen (tokens, k), int32, and their shares, float32."""
        if bias is None:
            shares, chosen, _ = self.operators.npu_moe_gating_top_k_softmax(logits.float(), None, k)
        else:
            scores = logits.float().softmax(-1)
            chosen = torch.topk(scores + bias, k).indices
            shares, chosen = scores.gather(1, chosen), chosen.int()
        return chosen, shares / shares.sum(-1, keepdim=True) if sums_to_one else shares

    def add_experts(self, x: Tensor, h: Tensor, chosen: Tensor, shares: Tensor, stacks: tuple[Tensor, Tensor]) -> None:
        """x += Σ share · expert(h) over the chosen experts of each token."""
        gate_up, down = stacks
        rows, place, counts, _ = self.operators.npu_moe_init_routing_v2(
            h, chosen, active_num=chosen.numel(), expert_num=len(down), expert_tokens_num_type=ascend.COUNTS,
            expert_tokens_num_flag=True, quant_mode=NO_QUANTISATION, active_expert_range=[0, len(down)],
            row_idx_type=GATHER_INDEX,
        )  # fmt: skip
        made = self.gate(ascend.product(rows, gate_up.transpose(1, 2), counts, ascend.COUNTS))
        made = ascend.product(made, down.transpose(1, 2), counts, ascend.COUNTS)
        x.add_(self.operators.npu_moe_token_unpermute(made, place, shares.to(made.dtype)))
