"""One forward pass: token ids, positions and an attention context in, logits of the wanted rows out.

`plain` calls the Hugging Face module itself and works for every decoder; `tidemill.rollout.native.lean` runs the same
weights with fewer operations for the common family. A test holds the two together.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol, cast

from torch import Tensor

from tidemill.models.attention import Context
from tidemill.rollout.native import lean
from tidemill.rollout.native.kernels import Kernels


class Runner(Protocol):
    def forward(self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None) -> Tensor:
        """ids, positions (tokens,); `keep`: which rows' logits are wanted, None for all → (kept, vocab)."""


class PlainRunner:
    """The module as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None) -> Tensor:
        options: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
        training = self.model.training
        if training:  # dropout is the learner's business
            self.model.eval()
        try:
            out = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                tide=context,
                **options,
            )
        finally:
            if training:
                self.model.train()
        return cast(Tensor, out.logits[0])


def make_runner(model: Any, max_len: int, kernels: Kernels | None, is_plain: bool, fused: bool) -> Runner:
    """`fused`: the model is on an accelerator whose kernels may be used."""
    if not is_plain and lean.supports(model):
        if fused and importlib.util.find_spec("triton") is not None:
            from tidemill.rollout.native.fused import FusedRunner
            from tidemill.rollout.native.triton_kernels import TritonKernels

            return FusedRunner(model, max_len, TritonKernels())
        return lean.LeanRunner(model, max_len, kernels)
    return PlainRunner(model)
