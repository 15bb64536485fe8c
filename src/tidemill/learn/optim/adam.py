"""AdamW for 16-bit weights: a float32 copy of them or stochastic rounding, moments in 8 bits, state on the host.

torch's fused AdamW serves everything else; with float32 weights, float32 moments and no copy the two are the same, and
a test says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from tidemill.learn.logprob.tokens import can_fuse
from tidemill.learn.optim.pinned import Pinned

Master = Literal["none", "float32", "stochastic"]
Moments = Literal["float32", "int8"]
Gradient = Callable[[Parameter], Tensor | None]

CODE_BLOCK = 256  # values that share one scale
MOMENTS, SCALE = ("exp_avg", "exp_avg_sq"), "_scale"
ROUNDING = 1e-3  # of a code: what was a code once becomes the same code again
HOST = torch.device("cpu")


class Adam(torch.optim.Optimizer):
    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        gradient: Gradient,
        master: Master = "none",
        moments: Moments = "float32",
        on_host: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.gradient, self.master, self.moments, self.on_host, self.seed = gradient, master, moments, on_host, seed
        self.host = Pinned()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                grad = self.gradient(p)
                if grad is not None:
                    self._step(p, grad, group)

    def home(self, p: Tensor, key: str) -> torch.device:
        """Where a piece of state lives between steps."""
        return HOST if key == "step" or self.on_host else p.device

    def _step(self, p: Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        kept = self.state[p]
        if not kept:
            kept.update(self._keep(p, self._fresh(p)))
        kept["step"] += 1
        step = int(kept["step"])
        at_work = {k: v.to(p.device, non_blocking=True) for k, v in kept.items() if k != "step"}
        seed = self._rounding(p, step)
        if can_fuse(p) and all(x.is_contiguous() for x in (p, grad, *at_work.values())):
            from tidemill.learn.optim import triton_adam

            triton_adam.step_(p, grad, at_work, step, group, seed)
            made = at_work
        else:
            made = self._plain_step(p, grad.float(), at_work, step, group, seed)
        self._put_back(kept, made)

    def _rounding(self, p: Parameter, step: int) -> int | None:
        """The seed of this step's stochastic rounding, where there is one."""
        if self.master != "stochastic" or p.dtype != torch.bfloat16:
            return None
        return hash((self.seed, step, sum(1 for _ in _before(self.param_groups, p))))

    @staticmethod
    def _put_back(kept: dict[str, Tensor], made: Mapping[str, Tensor]) -> None:
        """What was worked on, to where it lives."""
        for name, value in made.items():
            if kept[name] is not value:
                kept[name].copy_(value, non_blocking=True)

    def _plain_step(
        self, p: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int, group: dict[str, Any], seed: int | None
    ) -> dict[str, Tensor]:
        """The new state; `p` in place. `seed`: round it stochastically."""
        m, v = (decode(state, name, p.shape) for name in MOMENTS)
        weight = state["master"] if "master" in state else p.float()
        adam_(weight, grad, m, v, step, group)
        p.copy_(weight if seed is None else stochastic_bfloat16(weight, seed))
        made = {**_encode("exp_avg", m, self.moments), **_encode("exp_avg_sq", v, self.moments)}
        return {**made, "master": weight} if self.master == "float32" else made

    def _fresh(self, p: Parameter) -> dict[str, Tensor]:
        zero = torch.zeros_like(p, dtype=torch.float32)
        made = {**_encode("exp_avg", zero, self.moments), **_encode("exp_avg_sq", zero.clone(), self.moments)}
        if self.master == "float32":
            made["master"] = p.detach().float().clone()
        return made

    def _keep(self, p: Parameter, made: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.on_host and p.device != HOST:
            made = {k: self.host.like(v).copy_(v) for k, v in made.items()}
        return {"step": torch.zeros((), dtype=torch.int64), **made}

    def plain(self, p: Parameter) -> dict[str, Tensor]:
        """What is kept for a parameter, each value where the parameter's own lies: blocks belong to one cut of it."""
        kept = self.state.get(p, {})
        return {k: decode(kept, k, p.shape) for k in kept if not k.endswith(SCALE)}

    def coded(self, p: Parameter, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`plain`'s values, or blocks of this very cut, in the form that is kept here."""
        is_coded = any(k.endswith(SCALE) for k in given)
        if is_coded == (self.moments == "int8"):
            return dict(given)
        if is_coded:
            return {k: decode(given, k, p.shape) for k in given if not k.endswith(SCALE)}
        return {k: v for name, x in given.items() for k, v in _encode(name, x, self._form(name)).items()}

    def _form(self, name: str) -> Moments:
        return self.moments if name in MOMENTS else "float32"


def adam_(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """Loshchilov and Hutter 2019, algorithm 2, in place and in float32."""
    (b1, b2), lr = group["betas"], group["lr"]
    m.lerp_(grad, 1 - b1)
    v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
    root = (v / (1 - b2**step)).sqrt_().add_(group["eps"])
    weight.mul_(1 - lr * group["weight_decay"]).addcdiv_(m, root, value=-lr / (1 - b1**step))


def stochastic_bfloat16(x: Tensor, seed: int) -> Tensor:
    """Round to one of the two nearest, with chances that keep the mean: small updates are not lost for good."""
    draw = torch.Generator(x.device).manual_seed(seed & 0x7FFFFFFF)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=draw)
    return ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32).to(torch.bfloat16)


def _before(groups: Iterable[dict[str, Any]], p: Parameter) -> Iterable[Parameter]:
    for group in groups:
        for other in group["params"]:
            if other is p:
                return
            yield other


def _encode(name: str, x: Tensor, moments: Moments) -> dict[str, Tensor]:
    """Eight bits per value and one float32 scale per block.

    Values are companded first, for moments span many orders of magnitude: the first by a square root, with its sign;
    the second by a fourth root, rounded up, so that no value but 0 becomes 0 and no step is divided by nothing.
    """
    if moments == "float32":
        return {name: x}
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % CODE_BLOCK)).view(-1, CODE_BLOCK)
    scale = flat.abs().amax(1, keepdim=True)
    share = flat / scale.clamp(min=torch.finfo(torch.float32).tiny)
    if name == "exp_avg":
        code = (share.abs().sqrt() * share.sign() * 127).round_().to(torch.int8)
    else:
        least = (share > 0).to(torch.uint8)
        code = (share.sqrt_().sqrt_() * 255 - ROUNDING).ceil_().to(torch.uint8).maximum(least)
    return {name: code, f"{name}{SCALE}": scale}


def decode(state: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    if f"{name}{SCALE}" not in state:
        return state[name]
    code, scale = state[name].float(), state[f"{name}{SCALE}"]
    share = (code / 127) * (code / 127).abs() if name == "exp_avg" else (code / 255) ** 4
    return (share * scale).view(-1)[: math.prod(shape)].view(shape)
