"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = x Vᵀ, V = W + (α / r) · B A, with W frozen.

With magnitudes (DoRA, Liu et al. 2024, arXiv:2402.09353) V's rows only give directions: y = (m / ‖V‖) · x Vᵀ, and m is
learned. B starts at 0 and m at ‖W‖, so a fresh adapter changes nothing; the reference policy is the model with its
adapters off. Parameters keep their names, so a checkpoint or an exported folder holds merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.errors import ModelError

Json = dict[str, Any]
SUFFIXES = (".lora_a", ".lora_b", ".lora_m")


class LoraLinear(nn.Linear):
    """A linear layer that was given an adapter in place."""

    lora_a: nn.Parameter  # (rank, in)
    lora_b: nn.Parameter  # (out, rank)
    lora_m: nn.Parameter | None  # (out,)
    factor: float
    is_on: bool
    multiply = staticmethod(F.linear)  # by the frozen weight while the adapter is on; `learn.fp8` puts its own here

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, self.bias)

    def through(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """With another bias than the layer's own."""
        if not self.is_on:
            return F.linear(x, self.weight, bias)
        change = F.linear(F.linear(x, self.lora_a), self.lora_b) * self.factor
        if self.lora_m is None:
            return self.multiply(x, self.weight, bias) + change
        # The paper's section 4.3: the norm counts as a constant in the backward pass.
        out = (self.multiply(x, self.weight, None) + change) * (self.lora_m / self.row_norms().to(self.lora_m.dtype))
        return out if bias is None else out + bias

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """(out,) ‖W + f B A‖ of each row in float32, from ‖W‖² + 2f ⟨W Aᵀ, B⟩ + f² ⟨B A Aᵀ, B⟩: V is never made."""
        a, b, w = self.lora_a.float(), self.lora_b.float(), self.weight
        cross = (w @ self.lora_a.t()).float()
        own = torch.linalg.vector_norm(w, dim=1, dtype=torch.float32) ** 2
        square: Tensor = own + 2 * self.factor * (cross * b).sum(1) + self.factor**2 * ((b @ (a @ a.t())) * b).sum(1)
        return square.sqrt()

    def merged(self) -> Tensor:
        return merge(self.weight, self.lora_a, self.lora_b, self.lora_m, self.factor)


def merge(weight: Tensor, a: Tensor, b: Tensor, magnitudes: Tensor | None, factor: float) -> Tensor:
    """W + f B A, its rows as long as `magnitudes` say. Of whole matrices, or of some rows of W and B."""
    whole = weight.float() + (b.float() @ a.float()) * factor
    if magnitudes is not None:
        whole *= (magnitudes.float() / torch.linalg.vector_norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)


def attach(model: Any, rank: int, alpha: float, seed: int = 0, magnitudes: bool = False) -> None:
    """Adapters on every matrix of the decoder's layers; everything else is frozen, but for a value model's head."""
    model.requires_grad_(False)
    for module in model.starts_from_nothing() if hasattr(model, "starts_from_nothing") else ():
        module.requires_grad_(True)
    first = first_values(model, rank, seed)
    if not first:
        raise ModelError("the decoder's layers have no linear modules to adapt", "set learn.lora_rank=0")
    for name, module in list(model.named_modules()):
        if name not in first:
            continue
        weight = module.weight
        module.__class__ = LoraLinear
        adapted: Any = module
        adapted.lora_a = nn.Parameter(first[name].to(weight))
        adapted.lora_b = nn.Parameter(weight.new_zeros(module.out_features, rank))
        adapted.factor, adapted.is_on = alpha / rank, True
        adapted.lora_m = nn.Parameter(adapted.row_norms().to(weight.dtype)) if magnitudes else None


def first_values(model: Any, rank: int, seed: int = 0) -> dict[str, Tensor]:
    """(rank, in) A of every linear layer that is to be adapted, by its name, in float32 on the host."""
    names = {id(m): name for name, m in model.named_modules()}
    draw = torch.Generator().manual_seed(seed)
    return {
        names[id(m)]: torch.empty(rank, m.in_features).uniform_(-1, 1, generator=draw) * m.in_features**-0.5
        for m in model.get_decoder().layers.modules()
        if type(m) is nn.Linear
    }


def detach(model: Any) -> None:
    """The model as it was before `attach`, everything learned again."""
    adapted: list[Any] = [m for m in model.modules() if isinstance(m, LoraLinear)]
    for linear in adapted:
        for name in ("lora_a", "lora_b", "lora_m"):
            delattr(linear, name)
        linear.__class__ = nn.Linear
    model.requires_grad_(True)


def is_attached(model: Any) -> bool:
    return any(isinstance(m, LoraLinear) for m in model.modules())


def adapters(model: Any) -> dict[str, Tensor]:
    """The adapters' own tensors; empty without any."""
    return {n: p.detach() for n, p in model.named_parameters() if n.endswith(SUFFIXES)}


def merged(model: Any) -> dict[str, Tensor]:
    """Every parameter under its usual name, with its adapter's change in it."""
    own = adapters(model)
    return {n: p.detach() for n, p in model.named_parameters() if n not in own} | adapted(model)


def adapted(model: Any) -> dict[str, Tensor]:
    """Of these the ones that have an adapter."""
    return {f"{n}.weight": m.merged().detach() for n, m in model.named_modules() if isinstance(m, LoraLinear)}


def peft_files(own: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> tuple[dict[str, Tensor], Json]:
    """`adapters` as peft's own files hold them: tensors, and what goes into adapter_config.json."""
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}
    tensors, targets = {}, set()
    for name, tensor in own.items():
        module, _, kind = name.rpartition(".")
        tensors[f"base_model.model.{module}.{names[kind]}"] = tensor.contiguous()
        targets.add(module.rpartition(".")[2])
    about: Json = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(targets),
        "use_dora": any(name.endswith(".lora_m") for name in own),
    }  # fmt: skip
    return tensors, about


class Reference:
    """The same model with its adapters off: the policy that learning started from, at no cost of memory."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@contextmanager
def without(model: Any) -> Iterator[None]:
    """Adapters off while a reference is asked; nothing for any other model."""
    switched = [m for m in model.modules() if isinstance(m, LoraLinear)] if isinstance(model, Reference) else []
    for m in switched:
        m.is_on = False
    try:
        yield
    finally:
        for m in switched:
            m.is_on = True
