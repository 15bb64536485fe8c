"""Low-rank adapters over ranks: cut like the matrices they change, and merged piece by piece.

Under FSDP a rank has the same rows of B as of W, so its rows of W + f · B A need all of A, which is small. Under tensor
parallelism the adapter's matrix on the cut side is cut alike and the other is whole (`tensor`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.learn.parallel.cuts import local
from tidemill.models import lora
from tidemill.recipe.config import Learn


def attach(model: Any, learn: Learn, seed: int, is_empty: bool = True) -> dict[str, Tensor]:
    """Before the model is cut. Gives the values that adapters begin with, whole, for a model without memory."""
    chosen = (learn.lora_experts, learn.lora_modules)
    first = lora.first_values(model, learn.lora_rank, seed, *chosen) if is_empty else {}
    lora.attach(model, learn.lora_rank, learn.lora_alpha, seed, learn.dora, *chosen)
    zero, begins = torch.zeros(()), dict[str, Tensor]()
    for name, a in first.items():
        joint = "." if a.ndim == 2 else "_"  # a stack's adapter lies beside it, not inside
        begins |= {f"{name}{joint}lora_a": a}
        begins |= {f"{name}{joint}lora_b": zero.expand(model.get_parameter(f"{name}{joint}lora_b").shape)}
    return begins


def is_adapter(name: str) -> bool:
    return name.endswith(lora.SUFFIXES)


@torch.no_grad()
def begin_magnitudes(model: Any) -> None:
    """As `lora.attach` does, from weights that came later. A rank has whole rows: tp, which cuts some, is refused."""
    for module in model.modules():
        if isinstance(module, lora.LoraLinear) and module.lora_m is not None:
            local(module.lora_m).copy_(torch.linalg.vector_norm(local(module.weight), dim=1, dtype=torch.float32))


@torch.no_grad()
def merged(model: Any, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's pieces under their usual names, with the adapters' change in them. All ranks call it together."""
    return {name: piece for name, piece in pieces.items() if not is_adapter(name)} | adapted(model, pieces)


@torch.no_grad()
def adapted(model: Any, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of these the ones that have an adapter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, lora.LoraLinear):
            a = module.lora_a.detach()
            a = a.full_tensor() if isinstance(a, DTensor) else a
            weight, b = pieces[f"{name}.weight"], local(module.lora_b.detach())
            magnitudes = None if module.lora_m is None else local(module.lora_m.detach())
            found[f"{name}.weight"] = lora.merge(weight, a, b, magnitudes, module.factor)
    for name, module, stack in lora.adapted_stacks(model):
        a, b = (getattr(module, f"{stack}_lora_{side}").detach() for side in "ab")
        # Cut by experts, a rank has the same of all three; cut by rows, it has these of W and B and needs all of A.
        a = a.full_tensor() if _is_cut_by_rows(getattr(module, stack)) and isinstance(a, DTensor) else local(a)
        found[name] = lora.merge(pieces[name], a, local(b), None, module.lora_factor)
    return found


def _is_cut_by_rows(stack: Tensor) -> bool:
    return isinstance(stack, DTensor) and any(place.is_shard(1) for place in stack.placements)
