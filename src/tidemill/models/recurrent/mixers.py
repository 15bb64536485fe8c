"""Which modules of a model carry a state along the sequence, and how a forward pass's context comes to call them.

A mixer is found by what its code asks a cache for, so a new family needs no entry here. It is called with a dense batch
of sequences of one length and the state that each begins with, and gives what it makes of their tokens and the state
that each ends with. Who the sequences are, the context knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tidemill.models.attention.registry import Context, serving
from tidemill.models.recurrent.states import State, States

ASKED = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache"})  # of a cache
CACHES = ("cache_params", "past_key_values", "past_key_value")  # what the argument is called
MASKS = ("attention_mask", "conv_mask")  # of padding, which there is none of
TIDE_NUMBER = "tide_mixer"
# Scans that transformers starts from nothing, whatever the cache holds. Single tokens do go on from it.
FROM_NOTHING = frozenset({"mamba_selective_scan"})

Cut = Callable[[Tensor], Tensor]  # (tokens, …) → (sequences, tokens of each, …)
Join = Callable[[list[Tensor]], Tensor]


class Recurring(Context, Protocol):
    """A context that also knows how states go along the sequences of its pass."""

    def recur(self, call: Call) -> Any:
        """What the layer gives for the pass's tokens, in their order."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a mixer, with what it was given for the tokens of a pass."""

    module: Any
    forward: Callable[..., Any]  # the module's own
    number: int  # of the mixer in its model
    given: dict[str, Any]
    cache: str  # the name of the argument that takes a cache
    tokens: int

    @property
    def hidden(self) -> Tensor:
        """(tokens, width)"""
        found: Tensor = self.given["hidden_states"][0]
        return found

    @property
    def goes_on(self) -> bool:
        """Whether the module can read several tokens behind a state."""
        return not any(FROM_NOTHING & set(code.co_names) for code in _codes(_kind(self.module)))

    def on(self, cut: Cut, begins: State | None) -> tuple[Any, State]:
        """Call the module with some sequences; no state: from nothing."""
        states = States(begins)
        given = {name: self._cut(value, cut) for name, value in self.given.items()}
        made = self.forward(self.module, **{**given, self.cache: states})
        held = {id(state) for state in states.now.values()}  # some give their state beside what they make of tokens
        return pytree.tree_map(lambda x: None if id(x) in held else x, made), states.now

    def _cut(self, value: Any, cut: Cut) -> Any:
        return pytree.tree_map(lambda x: cut(x[0]) if self._is_of_tokens(x) else x, value)

    def _is_of_tokens(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] == self.tokens


@dataclass(frozen=True, slots=True)
class Made:
    """What one call gave."""

    out: Any
    shape: tuple[int, int]  # sequences, and the tokens of each
    packed: Cut  # (sequences, tokens of each, …) → (tokens, …)


def joined(parts: Sequence[Made], join: Join) -> Any:
    """What calls gave, in one: every tensor that has tokens joined, of others what the first gave."""
    flat = [pytree.tree_flatten(part.out) for part in parts]
    found = []
    for i, first in enumerate(flat[0][0]):
        if isinstance(first, Tensor) and tuple(first.shape[:2]) == parts[0].shape:
            found.append(join([part.packed(leaves[i]) for part, (leaves, _) in zip(parts, flat)]))
        else:
            found.append(first)
    return pytree.tree_unflatten(found, flat[0][1])


def call_of(module: Any, hidden: Tensor) -> Call:
    """A call of a plugged mixer by whoever runs the model's layers itself: hidden (tokens, width)."""
    kind: Any = next(one for one in type(module).__mro__ if not issubclass(one, _Plugged))
    return Call(
        module,
        kind.forward,
        getattr(module, TIDE_NUMBER),
        {"hidden_states": hidden[None]},
        _cache_name(kind),
        len(hidden),
    )


def _kind(module: Any) -> Any:
    return type(module)


def plug(model: Any) -> int:
    """Let the contexts of forward passes call the model's mixers; how many there are."""
    number = 0
    for module in model.modules():
        if is_mixer(kind := _kind(module)):
            if not issubclass(kind, _Plugged):
                module.__class__ = _plugged(kind)
            setattr(module, TIDE_NUMBER, number)
            number += 1
    return number


def has_some(model: Any) -> bool:
    return any(isinstance(module, _Plugged) for module in model.modules())


@cache
def is_mixer(kind: Any) -> bool:
    """Whether methods of the class itself ask a cache for states."""
    if issubclass(kind, _Plugged):
        return True
    if kind.forward is nn.Module.forward or not _cache_name(kind):
        return False
    return any(ASKED & set(code.co_names) for code in _codes(kind))


@cache
def _codes(kind: Any) -> list[CodeType]:
    """Of all methods, and of functions inside them."""
    own = [one for one in kind.__mro__ if issubclass(one, nn.Module) and one is not nn.Module]
    methods = [method for one in own for method in vars(one).values()]
    todo = [inspect.unwrap(m).__code__ for m in methods if inspect.isfunction(m) or hasattr(m, "__wrapped__")]
    found: list[CodeType] = []
    while todo:
        found.append(todo.pop())
        todo += [one for one in found[-1].co_consts if isinstance(one, CodeType)]
    return found


@cache
def _parameters(kind: Any) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(kind.forward))


@cache
def _cache_name(kind: Any) -> str:
    named = _parameters(kind).parameters
    return next((name for name in CACHES if name in named), "")


def _named(kind: Any, module: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments of a call by name, those that the signature does not name among them."""
    signature = _parameters(kind)
    _, *named = signature.bind(module, *args, **kwargs).arguments.items()
    rest = {name for name, one in signature.parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD}
    found = {name: value for name, value in named if name not in rest}
    return found | {k: v for name, values in named if name in rest for k, v in values.items()}


class _Plugged:
    """Marks classes that `_plugged` made."""


@cache
def _plugged(kind: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = serving(kwargs)
        if context is None:  # transformers' own business
            return kind.forward(self, *args, **kwargs)
        return recur(context, self, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of a compiled layer: it counts tokens on the host
    def recur(context: Any, self: Any, args: Any, kwargs: Any) -> Any:
        given = {k: v for k, v in _named(kind, self, args, kwargs).items() if k != "tide"}
        given |= {mask: None for mask in MASKS if mask in given}
        tokens = next(iter(given.values())).shape[1]
        call = Call(self, kind.forward, getattr(self, TIDE_NUMBER), given, _cache_name(kind), tokens)
        return context.recur(call)

    return type(kind.__name__, (_Plugged, kind), {"forward": forward, "__module__": kind.__module__})
