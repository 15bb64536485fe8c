"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = x Vᵀ, V = W + (α / r) · B A, with W frozen.

With magnitudes (DoRA, Liu et al. 2024, arXiv:2402.09353) V's rows only give directions: y = (m / ‖V‖) · x Vᵀ, and m is
learned. B starts at 0 and m at ‖W‖, so a fresh adapter changes nothing; the reference policy is the model with its
adapters off. Parameters keep their names, so a checkpoint or an exported folder holds merged weights.

Each of a mixture's stacked experts has an A and a B of its own, stacked alike; magnitudes are of linear layers alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.errors import ModelError, did_you_mean
from tidemill.models.buffers import persistent
from tidemill.models.mixture.experts import STACKS, is_known, plug
from tidemill.models.parts import decoder_of, layers_of

Json = dict[str, Any]
SUFFIXES = ("lora_a", "lora_b", "lora_m")


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
    """W + f B A, its rows as long as `magnitudes` say. Of whole matrices, of some rows of W and B, or of stacks."""
    whole = weight.float() + (b.float() @ a.float()) * factor
    if magnitudes is not None:
        whole *= (magnitudes.float() / torch.linalg.vector_norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)


def attach(
    model: Any,
    rank: int,
    alpha: float,
    seed: int = 0,
    magnitudes: bool = False,
    experts: bool = True,
    modules: Sequence[str] = (),
) -> None:
    """Put adapters on every matrix of the decoder's layers, or on those that `modules` names; everything else is
    frozen, but for a value model's head."""
    model.requires_grad_(False)
    for module in model.starts_from_nothing() if hasattr(model, "starts_from_nothing") else ():
        module.requires_grad_(True)
    first = first_values(model, rank, seed, experts, modules)
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
    plug(decoder_of(model))  # another implementation would not know of adapters
    for name, module, stack in list(_stacks(model)):
        if name in first:
            weight = getattr(module, stack)
            shape = (*weight.shape[:2], rank)
            module.register_parameter(f"{stack}_lora_a", nn.Parameter(first[name].to(weight)))
            module.register_parameter(f"{stack}_lora_b", nn.Parameter(weight.new_zeros(shape)))
            module.lora_factor, module.lora_on = alpha / rank, True


def first_values(
    model: Any, rank: int, seed: int = 0, experts: bool = True, modules: Sequence[str] = ()
) -> dict[str, Tensor]:
    """A of everything that is to be adapted, in float32 on the host: (rank, in) of a linear layer, by its name, and
    (experts, rank, in) of a stack of experts."""
    names = {id(m): name for name, m in model.named_modules()}
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-1, 1, generator=draw) * float(shape[-1] ** -0.5)

    layers = layers_of(model)
    linears = {names[id(m)]: drawn(rank, m.in_features) for m in layers.modules() if type(m) is nn.Linear}
    stacks: list[tuple[str, Any]] = []
    if experts:
        _refuse_unknown(layers)
        stacks = [(name, getattr(module, stack).shape) for name, module, stack in _stacks(model)]
    found = linears | {name: drawn(shape[0], rank, shape[2]) for name, shape in stacks}
    return found if not modules else {name: found[name] for name in chosen(list(found), modules)}


def chosen(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    """The names that `learn.lora_modules` means: by their last part, by their whole name, or by a pattern."""
    for pattern in modules:
        if not any(_matches(name, pattern) for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ModelError(
                f"learn.lora_modules names {pattern!r}, which no module of the model is{did_you_mean(pattern, ends)}",
                f"its modules are {', '.join(ends)}; patterns such as *.self_attn.* are taken too",
            )
    return [name for name in names if any(_matches(name, pattern) for pattern in modules)]


def _matches(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatch.fnmatchcase(name, pattern)


def _refuse_unknown(layers: Any) -> None:
    for module in layers.modules():
        if isinstance(module, nn.Conv1d):  # short convolutions stay as they are
            continue
        if not is_known(module) and any(p.ndim == 3 for p in module.parameters(recurse=False)):
            raise ModelError(
                f"{type(module).__name__} stacks its experts in a form that adapters are not known for",
                "learn.lora_experts=false adapts the linear layers alone",
            )


def _stacks(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Every stack of experts in the decoder's layers: its name, its module, and what it is called there."""
    inside = {id(m) for m in layers_of(model).modules() if is_known(m)}
    for name, module in model.named_modules():
        if id(module) in inside:
            yield from ((f"{name}.{stack}", module, stack) for stack in STACKS)


def adapted_stacks(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Those that have adapters."""
    return ((name, m, stack) for name, m, stack in _stacks(model) if hasattr(m, f"{stack}_lora_a"))


def detach(model: Any) -> None:
    """The model as it was before `attach`, everything learned again."""
    adapted: list[Any] = [m for m in model.modules() if isinstance(m, LoraLinear)]
    for linear in adapted:
        for name in ("lora_a", "lora_b", "lora_m"):
            delattr(linear, name)
        linear.__class__ = nn.Linear
    for _, module, stack in list(adapted_stacks(model)):
        delattr(module, f"{stack}_lora_a")
        delattr(module, f"{stack}_lora_b")
        module.lora_on = False
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
    linears = {f"{n}.weight": m.merged().detach() for n, m in model.named_modules() if isinstance(m, LoraLinear)}
    stacks = {}
    for name, module, stack in adapted_stacks(model):
        weight, a, b = (getattr(module, f"{stack}{kind}").detach() for kind in ("", "_lora_a", "_lora_b"))
        stacks[name] = merge(weight, a, b, None, module.lora_factor)
    return linears | stacks


def peft_files(own: Mapping[str, Tensor], rank: int, alpha: float, base: str) -> tuple[dict[str, Tensor], Json]:
    """`adapters` as peft's own files hold them: tensors, and what goes into adapter_config.json."""
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "lora_m": "lora_magnitude_vector"}
    tensors, targets, stacks = {}, set(), set()
    for name, tensor in own.items():
        module, _, kind = name.rpartition(".")
        if kind in names:
            tensors[f"base_model.model.{module}.{names[kind]}"] = tensor.contiguous()
            targets.add(module.rpartition(".")[2])
            continue
        stack, kind = kind[: -len("_lora_a")], kind[-len("lora_a") :]
        # peft wraps a module once for each of its parameters, the later around the earlier.
        inner = "" if stack == STACKS[-1] else "base_layer."
        tensors[f"base_model.model.{module}.{inner}{names[kind]}"] = _peft_stack(tensor, kind)
        stacks.add(f"{module.rpartition('.')[2]}.{stack}")
    if stacks and any(name.endswith(".lora_m") for name in own):
        raise ModelError(
            "peft has no magnitudes (learn.dora) beside adapters of stacked experts", "export without --adapter"
        )
    about: Json = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(targets),
        "use_dora": any(name.endswith(".lora_m") for name in own),
    }  # fmt: skip
    return tensors, about | ({"target_parameters": sorted(stacks)} if stacks else {})


def _peft_stack(tensor: Tensor, kind: str) -> Tensor:
    """(experts · rank, in), expert by expert, and (out, rank · experts), rank by rank."""
    return (tensor.flatten(0, 1) if kind == "lora_a" else tensor.permute(1, 2, 0).flatten(1)).contiguous()


class Reference:
    """The same model with its adapters off: the policy that learning started from, at no cost of memory but for the
    buffers, which learning moves as well (the bias of a mixture's routers)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first = {name: buffer.clone() for name, buffer in persistent(model).items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@contextmanager
def without(model: Any) -> Iterator[None]:
    """Adapters off while a reference is asked; nothing for any other model."""
    if not isinstance(model, Reference):
        yield
        return
    moved = {name: buffer.clone() for name, buffer in persistent(model).items()} if model.first else {}
    _switch(model, False)
    _place(model, model.first)
    try:
        yield
    finally:
        _switch(model, True)
        _place(model, moved)


@torch.no_grad()
def _place(model: Any, values: Mapping[str, Tensor]) -> None:
    for name, buffer in persistent(model).items() if values else ():
        buffer.copy_(values[name])


def _switch(model: Any, on: bool) -> None:
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.is_on = on
    for _, module, _ in adapted_stacks(model):
        module.lora_on = on
