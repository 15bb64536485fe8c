"""From logits to tokens, on the device: truncation, one random number per row, log-probabilities.

The random number of a token is a hash of (its sample's key, its position), so a sample's tokens depend on nothing else
in the batch and no generator state has to be kept. Tokens are drawn by inverting the cumulative distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.rollout.engine import Sampling

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def stream_key(seed: int, request: int, sample: int) -> int:
    """The key of one sample's random stream, as a signed 64-bit number."""
    z = 0
    for part in (seed, request, sample):
        z = (z ^ (part & _MASK64)) + _GOLDEN & _MASK64
        z = (z ^ z >> 30) * _MIX_A & _MASK64
        z = (z ^ z >> 27) * _MIX_B & _MASK64
        z ^= z >> 31
    return _signed(z)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key: Tensor, position: Tensor) -> Tensor:
    """Float32 in [0, 1) from int64 keys and positions (splitmix64's output function)."""
    z = key + position * _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_A)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_B)
    return _shift(z ^ _shift(z, 31), 40).to(torch.float32) * 2.0**-24


def uniform_array(key: Array, position: Array) -> Array:
    """`uniform` for numpy: the same numbers."""
    with np.errstate(over="ignore"):
        z = key.view(np.uint64) + position.view(np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ z >> np.uint64(30)) * np.uint64(_MIX_A)
        z = (z ^ z >> np.uint64(27)) * np.uint64(_MIX_B)
    u: Array = ((z ^ z >> np.uint64(31)) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return u


@dataclass(frozen=True, slots=True)
class Draw:
    """How each row draws. A field that is None is off for the whole batch, which then pays nothing for it."""

    key: Tensor  # (rows,) int64
    position: Tensor  # (rows,) int64, tokens made before this one
    temperature: Tensor | None = None  # None: 1 everywhere
    greedy: Tensor | None = None  # (rows,) bool
    truncated: Tensor | None = None  # row numbers that use any of the next three
    top_k: Tensor | None = None  # of the truncated rows only; vocabulary size: off
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    all_greedy: bool = False
    steered: Tensor | None = None  # (rows, vocab) logits to draw from; log-probabilities stay those of the model


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: Tensor  # (rows,) int64
    logprobs: Tensor  # (rows,) of the whole distribution at the row's temperature
    kept: Tensor | None  # (rows,) log of the mass that truncation left; None: nothing was truncated

    def at(self, rows: Array) -> Drawn:
        index = torch.from_numpy(rows).to(self.tokens.device)
        kept = None if self.kept is None else self.kept[index]
        return Drawn(self.tokens[index], self.logprobs[index], kept)


def draw(logits: Tensor, how: Draw) -> Drawn:
    """One token per row of `logits` (rows, vocab). NaN logits give a NaN log-probability."""
    logprobs = _log_softmax(logits, how.temperature)
    drawn_from = logprobs if how.steered is None else _log_softmax(how.steered, how.temperature)
    if how.all_greedy:
        tokens, kept = drawn_from.argmax(-1), None
    else:
        tokens, kept = _sample(logprobs, drawn_from, how)
        if how.greedy is not None:
            tokens = torch.where(how.greedy, drawn_from.argmax(-1), tokens)
    return Drawn(tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), kept)


def _log_softmax(logits: Tensor, temperature: Tensor | None) -> Tensor:
    logits = logits.float()
    return torch.log_softmax(logits if temperature is None else logits / temperature.unsqueeze(1), -1)


def _sample(logprobs: Tensor, drawn_from: Tensor, how: Draw) -> tuple[Tensor, Tensor | None]:
    u = uniform(how.key, how.position)
    tokens = _invert(drawn_from.exp(), u)
    if how.truncated is None:
        return tokens, None
    rows = how.truncated
    order, weights = _truncate(drawn_from[rows], how)
    chosen = _invert(weights, u[rows])
    tokens[rows] = order.gather(1, chosen.unsqueeze(1)).squeeze(1)
    whole = logprobs[rows].exp().gather(1, order)
    kept = torch.zeros_like(u)
    kept[rows] = whole.masked_fill(weights == 0, 0.0).sum(-1).log()
    return tokens, kept


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds u of the total."""
    cumulative = weights.cumsum(-1)
    target = u.unsqueeze(1) * cumulative[:, -1:]
    # u * total can round up to the total; the last index with weight is then the right one.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1:], target.new_tensor(0.0)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _truncate(logprobs: Tensor, how: Draw) -> tuple[Tensor, Tensor]:
    """Token ids and probabilities, most likely first, with those outside top-k, then top-p, then min-p set to 0."""
    assert how.top_k is not None and how.top_p is not None and how.min_p is not None
    weights, order = logprobs.exp().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    weights = weights.masked_fill(rank >= how.top_k.unsqueeze(1), 0.0)
    before = weights.cumsum(-1) - weights
    beyond = before >= how.top_p.unsqueeze(1) * weights.sum(-1, keepdim=True)
    beyond[:, 0] = False
    weights = weights.masked_fill(beyond, 0.0)
    return order, weights.masked_fill(weights < how.min_p.unsqueeze(1) * weights[:, :1], 0.0)


def steer(logits: Tensor, how: Sampling, seen: list[int], made: list[int]) -> Tensor:
    """One row's logits (vocab,) after penalties, bias and allowed tokens; `seen` is the prompt and what was `made`."""
    out = logits.float().clone()
    if how.repetition_penalty != 1.0:
        index = torch.as_tensor(sorted(set(seen)), device=out.device)
        score = out[index]
        out[index] = torch.where(score > 0, score / how.repetition_penalty, score * how.repetition_penalty)
    if how.presence_penalty != 0.0 and made:
        out[torch.as_tensor(sorted(set(made)), device=out.device)] -= how.presence_penalty
    for token, bias in (how.logit_bias or {}).items():
        out[token] += bias
    if how.allowed_tokens is not None:
        allowed = torch.as_tensor(how.allowed_tokens, device=out.device)
        out = torch.full_like(out, float("-inf")).index_copy_(0, allowed, out[allowed])
    return out


def is_steered(how: Sampling) -> bool:
    return (
        how.repetition_penalty != 1
        or how.presence_penalty != 0
        or bool(how.logit_bias)
        or how.allowed_tokens is not None
    )


def is_truncated(how: Sampling) -> bool:
    """Whether tokens are drawn from a part of the distribution only (its mass is then recorded)."""
    return how.temperature > 0 and (how.top_k > 0 or how.top_p < 1 or how.min_p > 0 or how.allowed_tokens is not None)
