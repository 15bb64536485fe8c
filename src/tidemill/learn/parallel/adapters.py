"""Low-rank adapters over ranks: cut like the matrices they change, and merged piece by piece.

Under FSDP a rank has the same rows of B as of W, so its rows of W + f · B A need all of A, which is small. Under tensor
parallelism the adapter's matrix on the cut side is cut alike and the other is whole (`tensor`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.config import Learn
from tidemill.learn.parallel.cuts import local
from tidemill.models import lora


def attach(model: Any, learn: Learn, seed: int) -> dict[str, Tensor]:
    """Before the model is cut. Gives the values that adapters begin with, whole, for a model without memory."""
    first = lora.first_values(model, learn.lora_rank, seed)
    lora.attach(model, learn.lora_rank, learn.lora_alpha, seed)
    zero = torch.zeros(())
    begins = {f"{name}.lora_a": a for name, a in first.items()}
    return begins | {
        f"{name}.lora_b": zero.expand(model.get_submodule(name).out_features, learn.lora_rank) for name in first
    }


def is_adapter(name: str) -> bool:
    return name.endswith(lora.SUFFIXES)


@torch.no_grad()
def merged(model: Any, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's pieces under their usual names, with the adapters' change in them. All ranks call it together."""
    found = {name: piece for name, piece in pieces.items() if not is_adapter(name)}
    for name, module in model.named_modules():
        if isinstance(module, lora.LoraLinear):
            a = module.lora_a.detach()
            a = a.full_tensor() if isinstance(a, DTensor) else a
            weight, b = found[f"{name}.weight"], local(module.lora_b.detach())
            found[f"{name}.weight"] = (weight.float() + (b.float() @ a.float()) * module.factor).to(weight.dtype)
    return found
