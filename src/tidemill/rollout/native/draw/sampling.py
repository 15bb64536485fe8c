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
        z = (z ^ (int(part) & _MASK64)) + _GOLDEN & _MASK64  # a numpy number has no room for the mask
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
    tops: int = 0  # so many of the likeliest tokens are given too


@dataclass(frozen=True, slots=True)
class Drawn:
    tokens: Tensor  # (rows,) int64
    logprobs: Tensor  # (rows,) of the whole distribution at the row's temperature
    kept: Tensor | None  # (rows,) log of the mass that truncation left; None: nothing was truncated
    tops: tuple[Tensor, Tensor] | None = None  # (rows, tops) the likeliest tokens, and their log-probabilities

    def at(self, rows: Array) -> Drawn:
        index = torch.from_numpy(rows).to(self.tokens.device)
        kept = None if self.kept is None else self.kept[index]
        tops = None if self.tops is None else (self.tops[0][index], self.tops[1][index])
        return Drawn(self.tokens[index], self.logprobs[index], kept, tops)


def draw(logits: Tensor, how: Draw) -> Drawn:
    """One token per row of `logits` (rows, vocab). NaN logits give a NaN log-probability."""
    heated = _heated(logits, how.temperature)
    logprobs = torch.log_softmax(heated, -1)
    tops = likeliest(logprobs, how.tops) if how.tops else None
    if how.steered is None:
        drawn_from, weights = heated, logprobs.exp()
    else:
        drawn_from = _heated(how.steered, how.temperature)
        weights = torch.log_softmax(drawn_from, -1).exp()
    if how.all_greedy:
        tokens, kept = drawn_from.argmax(-1), None
    else:
        kept = None if how.truncated is None else _truncate(logprobs, drawn_from, weights, how.truncated, how)
        tokens = _invert(weights, uniform(how.key, how.position))
        if how.greedy is not None:
            tokens = torch.where(how.greedy, drawn_from.argmax(-1), tokens)
    return Drawn(tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), kept, tops)


def likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, count) the likeliest tokens, and their log-probabilities."""
    values, ids = logprobs.topk(min(count, logprobs.shape[1]))
    return ids, values


def _heated(logits: Tensor, temperature: Tensor | None) -> Tensor:
    return logits.float() if temperature is None else logits.float() / temperature.unsqueeze(1)


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds u of the total."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    found = torch.searchsorted(cumulative, u.unsqueeze(1) * total, right=True)
    # u * total can round up to the total; the last index with weight is then the right one.
    last = torch.searchsorted(cumulative, total.contiguous())
    return torch.minimum(found, last).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _truncate(logprobs: Tensor, drawn_from: Tensor, weights: Tensor, rows: Tensor, how: Draw) -> Tensor:
    """Sets the weights of what is left out to 0; (rows,) log of the mass that stays, 0 where nothing is truncated."""
    weights[rows] = weights[rows].masked_fill(drawn_from[rows] < threshold(drawn_from[rows], how), 0.0)
    kept = torch.zeros_like(weights[:, 0])
    kept[rows] = logprobs[rows].exp().masked_fill(weights[rows] == 0, 0.0).sum(-1).log()
    return kept


def threshold(heated: Tensor, how: Draw) -> Tensor:
    """The smallest logit (rows, 1) that is inside top-k, top-p of those, and min-p; equal ones are in or out together,
    so that what is kept does not hang on an order."""
    assert how.top_k is not None and how.top_p is not None and how.min_p is not None
    ordered = heated.sort(dim=-1, descending=True).values
    by_count = ordered.gather(1, (how.top_k.unsqueeze(1) - 1).clamp(max=heated.shape[1] - 1))
    weights = torch.softmax(ordered, -1).masked_fill(ordered < by_count, 0.0)
    before = weights.cumsum(-1) - weights
    inside = (before < how.top_p.unsqueeze(1) * weights.sum(-1, keepdim=True)) & (weights > 0)
    by_mass = ordered.gather(1, (inside.sum(-1, keepdim=True) - 1).clamp(min=0))
    by_share = ordered[:, :1] + how.min_p.unsqueeze(1).log()
    return torch.maximum(torch.maximum(by_count, by_mass), by_share)


def steer(logits: Tensor, how: Sampling, seen: list[int], made: list[int]) -> Tensor:
    """One row's logits (vocab,) after penalties, bias and allowed tokens; `seen` is the prompt and what was `made`."""
    out = logits.float().clone()
    if how.repetition_penalty != 1.0:
        index = torch.as_tensor(np.unique(np.asarray(seen, np.int64)), device=out.device)
        score = out[index]
        out[index] = torch.where(score > 0, score / how.repetition_penalty, score * how.repetition_penalty)
    if how.presence_penalty != 0.0 and made:
        out[torch.as_tensor(sorted(set(made)), device=out.device)] -= how.presence_penalty
    if how.frequency_penalty != 0.0 and made:
        tokens, counts = np.unique(np.asarray(made, np.int64), return_counts=True)
        times = torch.as_tensor(counts, device=out.device, dtype=out.dtype)
        out[torch.as_tensor(tokens, device=out.device)] -= how.frequency_penalty * times
    for token, bias in (how.logit_bias or {}).items():
        out[token] += bias
    if how.allowed_tokens is not None:
        allowed = torch.as_tensor(np.array([*how.allowed_tokens], np.int64), device=out.device)
        out = torch.full_like(out, float("-inf")).index_copy_(0, allowed, out[allowed])
    return out


def is_steered(how: Sampling) -> bool:
    return (
        how.repetition_penalty != 1
        or how.presence_penalty != 0
        or how.frequency_penalty != 0
        or bool(how.logit_bias)
        or how.allowed_tokens is not None
        or how.grammar is not None
    )


def is_truncated(how: Sampling) -> bool:
    """Whether tokens are drawn from a part of the distribution only (its mass is then recorded)."""
    bound = how.allowed_tokens is not None or how.grammar is not None
    return how.temperature > 0 and (how.top_k > 0 or how.top_p < 1 or how.min_p > 0 or bound)
