"""One forward pass: token ids, positions and an attention context in, logits of the wanted rows out.

`plain` calls the Hugging Face module itself and works for every decoder; `lean` runs the same
weights with fewer operations for the common family. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.device import has_triton
from tidemill.errors import ModelError
from tidemill.models import families, logits
from tidemill.models.attention.registry import Context
from tidemill.models.modes import at_rest
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import Eyes, Seen
from tidemill.rollout.native import ascend_kernels
from tidemill.rollout.native.ascend_kernels import AscendKernels
from tidemill.rollout.native.forward import latent, lean, mixture
from tidemill.rollout.native.forward.fused import FusedKernels, FusedRunner
from tidemill.rollout.native.kernels import Kernels
from tidemill.rollout.native.ranks.links import Links


class Runner(Protocol):
    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        """ids (tokens,), positions (tokens,) or (4, tokens); `keep`: which rows' logits are wanted, None for all;
        `seen`: the features of images in the places of some tokens → (kept, vocab)."""


class CapturableRunner(Runner, Protocol):
    """A runner whose passes never ask the host, so that a graph can hold them."""

    model: Any

    @property
    def device_kernels(self) -> FusedKernels: ...


class PlainRunner:
    """The module as it is."""

    def __init__(self, model: Any) -> None:
        self.model, self.eyes = model, eyes.of(model)
        # Of layers that are computed again the first is always one: so it tells of all of them.
        self.first = next((m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)), model)

    def forward(
        self, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None = None
    ) -> Tensor:
        # Computing layers again is the learner's business.
        with at_rest(self.model.modules()) if self.first.training else nullcontext():
            if self.eyes is not None:
                return self._looking(self.eyes, ids, positions, context, keep, seen)
            options: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
            out = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                tide=context,
                **options,
            )
        return cast(Tensor, out.logits[0])

    def _looking(
        self, eyes: Eyes, ids: Tensor, positions: Tensor, context: Context, keep: Tensor | None, seen: Seen | None
    ) -> Tensor:
        """The decoder of a model that looks, called with what its own forward pass would call it with."""
        given = eyes.inputs(ids, positions, seen)
        hidden = self.model.get_decoder()(**given, use_cache=False, tide=context).last_hidden_state[0]
        if keep is not None:
            hidden = hidden.index_select(0, keep)
        return logits.of(self.model, hidden)


def fused_kernels(model: Any, device: torch.device) -> Callable[[], FusedKernels] | None:
    """What makes the kernels that run the model on an accelerator; None where there are none for one of the two."""
    if not (lean.supports(model) or latent.supports(model)) or not mixture.has_plain_experts(model):
        return None
    if has_triton(device.type):
        from tidemill.rollout.native.triton_kernels import TritonKernels

        return TritonKernels
    return partial(AscendKernels, device) if ascend_kernels.works_on(device) else None


def make_runner(
    model: Any,
    max_len: int,
    kernels: Kernels | None,
    is_plain: bool,
    fused: Callable[[], FusedKernels] | None = None,
    links: Links | None = None,
) -> Runner:
    """`fused`: what makes an accelerator's kernels, where they may be used. `links`: to ranks that share the work."""
    is_latent = latent.supports(model)
    if is_plain or not (is_latent or lean.supports(model)):
        if links is not None:
            raise ModelError(
                f"{type(model).__name__} cannot be served by an engine over several ranks",
                f"this works for {', '.join(families.served_over_ranks())}",
            )
        return PlainRunner(model)
    if fused is not None:
        make = latent.FusedLatentRunner if is_latent else FusedRunner
        return make(model, max_len, fused())
    return (latent.LatentRunner if is_latent else lean.LeanRunner)(model, max_len, kernels, links)
