"""Ring attention over a packed row: queries stay, blocks of keys and values travel round the ranks.

Who sees whom is two intervals per token (`models.flex.Sight`), so samples may be cut anywhere and shared prompts need
nothing more. Scores exist one tile at a time: forward they are merged by the online softmax, backward they are computed
again from the kept log of the normaliser, and a block's gradient travels with it until both are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tidemill.learn.parallel.collectives import MeshLink
from tidemill.models.attention.flex import Sight
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.upload import upload

if TYPE_CHECKING:
    from tidemill.learn.parallel.context import Shares

# Tokens of a side of a tile of scores: what fits a processor's cache, and what keeps an accelerator busy.
TILE, ACCELERATOR_TILE = 128, 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """Some own queries against some keys of one rank's block: places in each, and where the keys lie in the row."""

    queries: slice
    keys: slice
    key_at: int  # of the first, in the row
    is_full: bool  # every query sees every key


@dataclass(frozen=True, slots=True)
class RingPlan:
    """What a rank computes when each block comes by, and the intervals that its queries see."""

    tiles: tuple[tuple[Tile, ...], ...]  # by the rank whose block it is
    counts: tuple[int, ...]  # tokens of each block
    at: Tensor  # (own tokens,) place in the row
    start: Tensor  # sees [start, at] …
    prompt_start: Tensor  # … and [prompt_start, prompt_end)
    prompt_end: Tensor

    def mask(self, tile: Tile) -> Tensor | None:
        """(queries, keys): who is seen."""
        if tile.is_full:
            return None
        at, start, first, last = (
            x[tile.queries, None] for x in (self.at, self.start, self.prompt_start, self.prompt_end)
        )
        k = torch.arange(tile.key_at, tile.key_at + tile.keys.stop - tile.keys.start, device=at.device)
        return ((start <= k) & (k <= at)) | ((first <= k) & (k < last))


class AttentionRing:
    """The attention context of a row that is shared out over these ranks."""

    def __init__(
        self, sight: Sight, shares: Shares, over: MeshLink, device: torch.device, tile: int | None = None
    ) -> None:
        self.sight, self.shares, self.over, self.device = sight, shares, over, device
        self.tile = tile or (TILE if device.type == "cpu" else ACCELERATOR_TILE)
        self._plans: dict[tuple[int | None, int | None], RingPlan] = {}

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        key = (form.window, form.chunk)
        if key not in self._plans:
            sight = within(self.sight, *key)
            self._plans[key] = make_plan(sight, self.shares, self.over.rank, self.device, self.tile)
        plan = self._plans[key]
        own = len(plan.at)
        out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
            q[:own], k[:own], v[:own], form.sinks, plan, self.over, form.scale, form.softcap
        )
        return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - own))  # a rank without tokens computes one that none sees


def within(sight: Sight, window: int | None, chunk: int | None = None) -> Sight:
    """The same with a sliding window or in chunks: intervals begin later."""
    if window is None and chunk is None:
        return sight
    at = np.arange(len(sight.start))
    back = sight.position % chunk if chunk is not None else np.full_like(at, (window or 1) - 1)  # tokens before it
    nearest = sight.prompt_start + sight.position - back  # in the prompt, whose own positions begin at 0
    return replace(
        sight,
        start=np.maximum(sight.start, at - back),
        prompt_start=np.minimum(np.maximum(sight.prompt_start, nearest), sight.prompt_end),
    )


def make_plan(sight: Sight, shares: Shares, rank: int, device: torch.device, side: int) -> RingPlan:
    own = shares.tokens(rank)
    queries = list(_runs(shares.slices[rank], side))
    tiles = tuple(
        tuple(
            Tile(slice(qa, qa + len(q)), slice(ka, ka + len(k)), k.start, is_full)
            for qa, q in queries
            for ka, k in _runs(parts, side)
            if (is_full := _sees(sight, q, k)) is not None
        )
        for parts in shares.slices
    )
    intervals = (upload(x[own], device) for x in (sight.start, sight.prompt_start, sight.prompt_end))
    return RingPlan(tiles, tuple(shares.counts), upload(own, device), *intervals)


def _runs(parts: tuple[range, range], side: int) -> Iterator[tuple[int, range]]:
    """A rank's tokens in runs of at most `side`: (where the run begins on the rank, its tokens in the row)."""
    at = 0
    for part in parts:
        for first in range(part.start, part.stop, side):
            run = range(first, min(first + side, part.stop))
            yield at, run
            at += len(run)


def _sees(sight: Sight, q: range, k: range) -> bool | None:
    """Whether all of `q` see all of `k`; None: none sees any."""
    rows = slice(q.start, q.stop)
    at, start = np.arange(q.start, q.stop), sight.start[rows]
    first, last = sight.prompt_start[rows], sight.prompt_end[rows]
    own = (np.maximum(start, k.start) <= np.minimum(at, k.stop - 1)).any()
    prompt = (np.maximum(first, k.start) < np.minimum(last, k.stop)).any()
    if not (own or prompt):
        return None
    all_own = start.max() <= k.start and k.stop - 1 <= q.start
    all_prompt = first.max() <= k.start and k.stop <= last.min()
    return bool(all_own or all_prompt)


class _RingAttention(torch.autograd.Function):
    """q (own tokens, heads, dim), k and v (own tokens, kv_heads, dim) → (own tokens, heads, v_dim)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: RingPlan, over: MeshLink, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        scores = RingScores(plan, scale, softcap)
        queries = _by_key_head(q, k.shape[1])  # (kv_heads, repeats, tokens, dim)
        merge = RingMerge(queries, v.shape[-1], sinks)
        rank, ranks = over.rank, over.size
        block = torch.cat([k, v], -1)
        for step in range(ranks):
            source = (rank - step) % ranks
            coming = _pass_on(block, plan.counts[(source - 1) % ranks], over) if step + 1 < ranks else None
            keys, values = _keys_and_values(block, k.shape[-1])
            for tile in plan.tiles[source]:
                merge.absorb(tile, scores(tile, queries, keys), values[:, tile.keys])
            block = coming.arrived() if coming else block
        dense, log_z = merge.result()
        out = _by_token(dense).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, log_z)
        ctx.plan, ctx.over, ctx.settings = plan, over, (scale, softcap)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, log_z = ctx.saved_tensors
        plan, over = ctx.plan, ctx.over
        scores = RingScores(plan, *ctx.settings)
        queries, grad_out = _by_key_head(q, k.shape[1]), _by_key_head(grad, k.shape[1])
        delta = _by_key_head((grad.float() * out).sum(-1, keepdim=True), k.shape[1])
        grad_q = torch.zeros_like(queries, dtype=torch.float32)
        rank, ranks = over.rank, over.size
        block, carried = torch.cat([k, v], -1), None
        for step in range(ranks):
            source = (rank - step) % ranks
            coming = _pass_on(block, plan.counts[(source - 1) % ranks], over) if step + 1 < ranks else None
            keys, values = _keys_and_values(block, k.shape[-1])
            grad_k, grad_v = torch.zeros_like(keys, dtype=torch.float32), torch.zeros_like(values, dtype=torch.float32)
            for tile in plan.tiles[source]:
                s = scores(tile, queries, keys)
                slope = scores.slope(s)
                p = s.sub_(_tile(log_z.unsqueeze(-1), tile)).exp_()  # in place: a tile is the largest thing here
                g = _tile(grad_out, tile)
                grad_v[:, tile.keys] += torch.bmm(p.to(g.dtype).transpose(1, 2), g)
                grad_s = torch.bmm(g, values[:, tile.keys].transpose(1, 2)).float()
                grad_s = grad_s.sub_(_tile(delta, tile)).mul_(p).mul_(slope).to(q.dtype)
                grad_q[:, :, tile.queries] += torch.bmm(grad_s, keys[:, tile.keys]).view(
                    *queries.shape[:2], -1, q.shape[-1]
                )
                grad_k[:, tile.keys] += torch.bmm(grad_s.transpose(1, 2), _tile(queries, tile))
            own = torch.cat([grad_k, grad_v], -1).transpose(0, 1).contiguous()
            if carried is not None:
                own += carried.arrived()
            # The gradient goes where its block goes; after the last step the next rank is the block's own.
            carried = _pass_on(own, plan.counts[(source - 1) % ranks], over)
            block = coming.arrived() if coming else block
        assert carried is not None
        home = carried.arrived()
        grad_k, grad_v = home[..., : k.shape[-1]], home[..., k.shape[-1] :]
        grad_sinks = None
        if sinks is not None:  # the share of the softmax that went there
            share = (_of_heads(sinks, log_z) - log_z).exp() * delta.squeeze(-1)
            grad_sinks = -share.sum(-1).flatten().to(sinks.dtype)
        given = _by_token(grad_q).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
        return *given, grad_sinks, None, None, None, None


@dataclass(frozen=True, slots=True)
class RingScores:
    """Scaled, capped and masked scores of a tile, (kv_heads, repeats · queries, keys) in float32."""

    plan: RingPlan
    scale: float
    softcap: float | None

    def __call__(self, tile: Tile, queries: Tensor, keys: Tensor) -> Tensor:
        s = torch.bmm(_tile(queries, tile), keys[:, tile.keys].transpose(1, 2)).float().mul_(self.scale)
        if self.softcap is not None:
            s.div_(self.softcap).tanh_().mul_(self.softcap)
        mask = self.plan.mask(tile)
        if mask is not None:
            s.view(queries.shape[0], queries.shape[1], *mask.shape).masked_fill_(~mask, float("-inf"))
        return s

    def slope(self, s: Tensor) -> Tensor | float:
        """Of the scores over the plain product."""
        if self.softcap is None:
            return self.scale
        return self.scale * (1 - (s.clamp(min=-self.softcap) / self.softcap) ** 2)  # masked scores are -inf


class RingMerge:
    """The online softmax: what was seen so far, relative to the largest score so far."""

    def __init__(self, queries: Tensor, dim: int, sinks: Tensor | None = None) -> None:
        self.largest = queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
        self.total = torch.zeros_like(self.largest)
        if sinks is not None:  # seen by all, and worth nothing
            self.largest, self.total = _of_heads(sinks, self.largest).clone(), torch.ones_like(self.total)
        self.out = queries.new_zeros((*queries.shape[:3], dim), dtype=torch.float32)

    def absorb(self, tile: Tile, scores: Tensor, values: Tensor) -> None:
        rows = tile.queries
        before = self.largest[:, :, rows]
        s = scores.view(*before.shape, -1)
        largest = torch.maximum(before, s.amax(-1))
        base = largest.masked_fill(largest == float("-inf"), 0.0)  # has seen nothing yet
        p = s.sub_(base.unsqueeze(-1)).exp_()  # in place: a tile is the largest thing here
        shrink = (before - base).exp()
        product = torch.bmm(p.view(scores.shape).to(values.dtype), values).view(*before.shape, -1)
        self.largest[:, :, rows] = largest
        self.total[:, :, rows] = self.total[:, :, rows] * shrink + p.sum(-1)
        self.out[:, :, rows] = self.out[:, :, rows] * shrink.unsqueeze(-1) + product

    def result(self) -> tuple[Tensor, Tensor]:
        """The output and the log of the normaliser of every query."""
        return self.out.div_(self.total.unsqueeze(-1)), self.largest + self.total.log()


def _of_heads(sinks: Tensor, like: Tensor) -> Tensor:
    """(heads,) → (kv_heads, repeats, tokens)"""
    return sinks.float().view(*like.shape[:2], 1).expand_as(like)


def _by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """(tokens, heads, dim) → (kv_heads, repeats, tokens, dim): a key head's queries side by side, keys not repeated."""
    tokens, heads, dim = x.shape
    return x.reshape(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).contiguous()


def _by_token(x: Tensor) -> Tensor:
    kv_heads, repeats, tokens, dim = x.shape
    return x.permute(2, 0, 1, 3).reshape(tokens, kv_heads * repeats, dim)


def _tile(x: Tensor, tile: Tile) -> Tensor:
    """(kv_heads, repeats, tokens, dim) → (kv_heads, repeats · queries, dim)"""
    return x[:, :, tile.queries].flatten(1, 2)


def _keys_and_values(block: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    by_head = block.transpose(0, 1)  # (kv_heads, tokens, dims)
    return by_head[..., :key_dim].contiguous(), by_head[..., key_dim:].contiguous()


@dataclass(frozen=True, slots=True)
class _Coming:
    block: Tensor
    sent: Tensor  # kept until it has gone
    works: list[Any]
    over: MeshLink

    def arrived(self) -> Tensor:
        if self.works:
            self.over.wait("pass round the ring", self.block, self.works)
        return self.block


def _pass_on(block: Tensor, rows: int, over: MeshLink) -> _Coming:
    """Send a block to the next rank and begin to receive one of `rows` from the rank before."""
    if over.size == 1:
        return _Coming(block, block, [], over)
    block = block.contiguous()
    came = block.new_empty((rows, *block.shape[1:]))
    after, before = (over.ranks[(over.rank + d) % over.size] for d in (1, -1))
    moves = []
    if block.numel():  # both ends know the sizes, and an empty block is not sent
        moves.append(dist.P2POp(dist.isend, block, after, over.group))
    if came.numel():
        moves.append(dist.P2POp(dist.irecv, came, before, over.group))
    return _Coming(came, block, dist.batch_isend_irecv(moves) if moves else [], over)
