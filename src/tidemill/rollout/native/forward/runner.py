"""One forward pass: token ids, positions and an attention context in, logits of the wanted rows out.

`plain` calls the Hugging Face module itself and works for every decoder; `lean` runs the same
weights with fewer operations for the common family. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.device import has_triton
from tidemill.errors import ConfigError, ModelError
from tidemill.models import families, logits
from tidemill.models.attention.registry import Context, is_dense
from tidemill.models.calling import hidden_states
from tidemill.models.layers.eight import DTYPES
from tidemill.models.modes import at_rest
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import Seen
from tidemill.rollout.native.forward import hybrid, latent, lean, mixture
from tidemill.rollout.native.forward.dense import DenseRunner
from tidemill.rollout.native.forward.fused import FusedKernels, FusedRunner
from tidemill.rollout.native.kernels import ascend as ascend_kernels
from tidemill.rollout.native.kernels.ascend import AscendKernels
from tidemill.rollout.native.kernels.compiled import Kernels
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
                given = self.eyes.inputs(ids, positions, seen)
            else:
                given = {"input_ids": ids[None], "position_ids": positions[None]}
            hidden = hidden_states(self.model, context, **given)
            return logits.of(self.model, hidden if keep is None else hidden.index_select(0, keep))


def fused_kernels(model: Any, device: torch.device) -> Callable[[], FusedKernels] | None:
    """What makes the kernels that run the model on an accelerator; None where there are none for one of the two."""
    if not mixture.has_plain_experts(model):
        return None
    has_form = lean.supports(model) or latent.supports(model)
    if has_triton(device.type) and (has_form or hybrid.supports(model)):
        from tidemill.rollout.native.kernels.triton_decode import TritonKernels

        return TritonKernels
    return partial(AscendKernels, device) if has_form and ascend_kernels.works_on(device) else None


def fused_form(model: Any) -> Any:
    """The runner that uses an accelerator's kernels."""
    if hybrid.supports(model):
        return hybrid.HybridRunner
    return latent.FusedLatentRunner if latent.supports(model) else FusedRunner


def eight_dtype(weights: str, cache_dtype: str, device: torch.device, batch_invariant: bool) -> torch.dtype | None:
    """The type of 8-bit weights on a device; None: weights stay as they are."""
    if batch_invariant and cache_dtype != "auto":
        raise ConfigError(f"cache_dtype {cache_dtype} rounds; the batch-invariant mode must not", "use auto")
    if weights == "same":
        return None
    if batch_invariant:
        raise ConfigError(f"weights {weights} round; the batch-invariant mode must not", "use same")
    if weights == "int8" and device.type != "cpu":
        raise ConfigError(f"int8 weights are for CPUs, and this engine is on {device.type}", "use rollout.weights=fp8")
    return DTYPES[weights]


def make_runner(
    model: Any,
    max_len: int,
    kernels: Kernels | None,
    is_plain: bool,
    fused: Callable[[], FusedKernels] | None = None,
    links: Links | None = None,
    eight: torch.dtype | None = None,
) -> Runner:
    """`fused`: what makes an accelerator's kernels, where they may be used. `links`: to ranks that share the work.
    `eight`: an 8-bit type for attention's and dense MLPs' products."""
    is_latent = latent.supports(model)
    has_form = not is_plain and (is_latent or lean.supports(model))
    if links is not None and not has_form:
        raise ModelError(
            f"{type(model).__name__} cannot be served by an engine over several ranks",
            f"this works for {', '.join(families.served_over_ranks())}",
        )
    if eight is not None and not has_form:
        raise ModelError(
            f"{type(model).__name__} cannot be served with 8-bit weights",
            f"use rollout.weights=same; 8 bits work for {', '.join(families.served_over_ranks())}",
        )
    if is_dense(model):
        return DenseRunner(model)
    if fused is not None:
        form, made = fused_form(model), fused()
        if eight is not None and not hasattr(made, "rms_rounded"):
            raise ModelError("this device's kernels have no 8-bit products", "use rollout.weights=same")
        runner: Runner = form(model, max_len, made) if eight is None else form(model, max_len, made, eight)
        return runner
    if not has_form:
        return PlainRunner(model)
    return (latent.LatentRunner if is_latent else lean.LeanRunner)(model, max_len, kernels, links, eight)


def refresh(runner: Runner) -> None:
    """Make what a runner derived from the parameters again, now that they have changed."""
    if isinstance(runner, lean.LeanRunner | FusedRunner):
        runner.refresh()


def no_grad_for(runner: Runner) -> type[torch.no_grad] | type[torch.inference_mode]:
    """Inference mode saves bookkeeping, but a foreign module may keep a tensor it makes."""
    return torch.no_grad if isinstance(runner, PlainRunner | DenseRunner) else torch.inference_mode
