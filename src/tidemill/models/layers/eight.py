"""Numbers of 8 bits with a scale per row, and products of them: integers, or floats (e4m3).

Weights have a scale for each output, inputs one for each token. Sums are exact (integers) or in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Literal["int8", "fp8"]
FP8 = torch.float8_e4m3fn
DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": FP8}
LEAST_SCALE = 1e-12  # of a row that is 0 everywhere


class Rounded(NamedTuple):
    """Rows in 8 bits, each with its scale; `dtype` is the one that products of them have."""

    code: Tensor  # (rows, in)
    scale: Tensor  # (rows,)
    dtype: torch.dtype


class EightWeight:
    """A weight in 8 bits whose rows are those of `parts`, one after another. It does not follow them by itself."""

    __slots__ = ("code", "parts", "scale")

    def __init__(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        rows, first = sum(len(part) for part in parts), parts[0]
        self.parts = tuple(parts)
        self.code = torch.empty(rows, first.shape[1], dtype=dtype, device=first.device)  # (out, in)
        self.scale = torch.empty(rows, dtype=torch.float32, device=first.device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Make it again from what its parts now are, in the same memory: captured graphs know its address."""
        at = 0
        for part in self.parts:
            code, scale = encode(part.detach(), self.code.dtype)
            self.code[at : at + len(part)] = code
            self.scale[at : at + len(part)] = scale
            at += len(part)

    def multiply(self, x: Tensor | Rounded, bias: Tensor | None = None) -> Tensor:
        """x (rows, in) → (rows, out)."""
        return product(x if isinstance(x, Rounded) else rounded(x, self.code.dtype), self.code, self.scale, bias)


def encode(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(…, out, in) → the same in 8 bits, and (…, out) scales."""
    most = 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)
    scale = weight.abs().amax(-1).float().clamp(min=LEAST_SCALE) / most
    share = weight.float() / scale[..., None]
    return (share.round() if dtype == torch.int8 else share).to(dtype), scale


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """Rows of a product's input (rows, in), each with a scale of its own."""
    return Rounded(*encode(x, dtype), x.dtype)


def product(x: Rounded, code: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """(rows, in) by (out, in), both in 8 bits → (rows, out)."""
    if code.device.type != "cpu":
        out = torch._scaled_mm(
            x.code, code.t(), scale_a=x.scale[:, None], scale_b=scale[None], out_dtype=x.dtype, use_fast_accum=True
        )
    elif code.dtype == torch.int8:
        out = (torch._int_mm(x.code, code.t()).float() * x.scale[:, None]).mul_(scale).to(x.dtype)
    else:  # no product of 8-bit floats on a CPU: the same numbers, summed in float32
        out = (F.linear(x.code.float(), code.float()) * x.scale[:, None]).mul_(scale).to(x.dtype)
    return out if bias is None else out.add_(bias)
