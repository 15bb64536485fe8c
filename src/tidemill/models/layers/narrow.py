"""Frozen layers with 8-bit weights and a scale per row: half the memory of bfloat16, for a reference policy.

Both codes are exact in bfloat16 and float32, so products are computed as before and only the weights are rounded.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.models.layers.eight import DTYPES, Weights, encode
from tidemill.models.mixture import experts
from tidemill.models.parts import decoder_of, layers_of


class NarrowLinear(nn.Linear):
    """A linear layer whose weight was replaced in place."""

    code: Tensor  # (out, in)
    scale: Tensor  # (out,)

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.code.to(x.dtype)) * self.scale.to(x.dtype)
        return out if self.bias is None else out + self.bias


def narrow(model: Any, weights: Weights) -> Any:
    """Every matrix of the decoder's layers, stacked experts included; embeddings, norms, routers and the head stay."""
    experts.plug(decoder_of(model))
    for module in layers_of(model).modules():  # fused forms look for weights that are about to go
        vars(module).pop("forward", None)
    for module in [m for m in layers_of(model).modules() if experts.is_known(m)]:
        for stack in experts.STACKS:
            code, scale = encode(getattr(module, stack).detach(), DTYPES[weights])
            delattr(module, stack)
            module.register_buffer(f"{stack}_code", code)
            module.register_buffer(f"{stack}_scale", scale)
    for linear in [m for m in layers_of(model).modules() if type(m) is nn.Linear]:
        code, scale = encode(linear.weight.detach(), DTYPES[weights])
        del linear.weight
        linear.register_buffer("code", code)
        linear.register_buffer("scale", scale)
        linear.__class__ = NarrowLinear
    return model
