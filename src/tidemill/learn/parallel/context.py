"""Context parallel: the tokens of one packed row shared out over ranks, so that none ever holds the whole row.

Everything but attention works token by token, so a rank computes its own slices. In attention the ranks meet, in one of
two forms: *Ulysses* exchanges tokens for heads and back and lets any attention of the registry work on whole samples
with a share of the heads; *ring* (`ring.py`) lets keys and values travel. Log-probabilities of the targets are brought
together on every rank, where the loss is computed as if there were one rank. A weight's gradient on a rank is that of
its own tokens: the sum over ranks is one rank's gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.errors import ConfigError
from tidemill.learn.parallel.collectives import MeshLink
from tidemill.learn.parallel.ring import AttentionRing
from tidemill.learn.rows.packing import PackedBatch
from tidemill.models.attention.contexts import Attention
from tidemill.models.attention.flex import Sight
from tidemill.models.attention.registry import AttentionForm, Context
from tidemill.models.upload import upload

FORMS = ("auto", "ulysses", "ring")


@dataclass(frozen=True, slots=True)
class Shares:
    """Which tokens of a packed row each rank has: of 2n even slices the r-th from the front and the r-th from the back.

    A late token of a causal sequence sees many, an early one few: so paired, every rank has the same work.
    """

    slices: tuple[tuple[range, range], ...]  # of each rank

    @staticmethod
    def of(tokens: int, ranks: int) -> Shares:
        cuts = [i * tokens // (2 * ranks) for i in range(2 * ranks + 1)]
        parts = [range(a, b) for a, b in itertools.pairwise(cuts)]
        return Shares(tuple((parts[r], parts[-1 - r]) for r in range(ranks)))

    def tokens(self, rank: int) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(part.start, part.stop) for part in self.slices[rank]])

    @property
    def counts(self) -> list[int]:
        return [sum(map(len, parts)) for parts in self.slices]


@dataclass(frozen=True, slots=True)
class TokenCut:
    """One rank's part of a packed row, and the way back to the whole row's targets."""

    packed: PackedBatch
    own: Tensor  # (own tokens,) where each lies in the row
    places: Tensor  # (own targets,) where each lies among all targets
    targets: int  # of the whole row
    over: MeshLink

    def whole(self, x: Tensor) -> Tensor:
        """(own targets,) → (targets,) on every rank. Its gradient is the own part of what comes back: every rank
        computes the same loss from the same numbers, so nothing is summed."""
        joined: Tensor = _Join.apply(x, self.places, self.targets, self.over)  # type: ignore[no-untyped-call]
        return joined


def cut(packed: PackedBatch) -> TokenCut:
    """This rank's part of a row whose context was made by `parallel`."""
    context = packed.context
    assert isinstance(context, Ulysses | AttentionRing)
    device = packed.tokens.device
    own = upload(context.shares.tokens(context.over.rank), device)
    place = torch.full_like(packed.tokens, -1)  # of each token of the row, on this rank
    place[own] = torch.arange(len(own), device=device)
    predicts = place[packed.predicts]
    # Transformers wants one token at least; attention leaves it out, and it predicts nothing.
    given = own if len(own) else upload([0], device)
    places = torch.nonzero(predicts >= 0)[:, 0]
    part = dataclasses.replace(
        packed,
        tokens=packed.tokens[given],
        positions=packed.positions[given],
        predicts=predicts[places],
        targets=packed.targets[places],
        row=packed.row[places],
    )
    return TokenCut(part, own, places, len(packed.targets), context.over)


def parallel(attention: Attention, over: MeshLink, form: str, heads: int) -> Attention:
    """The registry's entry `attention`, for rows shared out over these ranks. `heads`: query heads on this rank."""
    form = check(form, heads, over.size)

    def make(whole: Any, sight: Sight, device: torch.device) -> Context:
        shares = Shares.of(len(sight.start), over.size)
        if form == "ring":
            return AttentionRing(sight, shares, over, device)
        return Ulysses(whole(), shares, over, device)

    def packed(lengths: Sequence[int], device: torch.device) -> Context:
        return make(lambda: attention.packed(lengths, device), Sight.packed(lengths), device)

    def shared(prompts: Sequence[int], responses: Sequence[int], owner: Sequence[int], device: torch.device) -> Context:
        sight = Sight.shared(prompts, responses, owner)
        return make(lambda: attention.shared(prompts, responses, owner, device), sight, device)

    return Attention(packed, shared)


def check(form: str, heads: int, ranks: int) -> str:
    """`auto` is ulysses where the heads can be shared out, as it moves less and keeps the device's own kernels."""
    if form == "auto":
        return "ring" if heads % ranks else "ulysses"
    if form == "ulysses" and heads % ranks:
        sizes = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"context parallel over {ranks} ranks by ulysses needs {heads} query heads (per tensor-parallel rank) "
            f"that {ranks} divides",
            f"use ring, or one of {sizes} ranks" if sizes else "use ring",
        )
    return form


class Ulysses:
    """All tokens of the row with a share of the heads, for the attention product alone."""

    def __init__(self, whole: Context, shares: Shares, over: MeshLink, device: torch.device) -> None:
        self.inner, self.shares, self.over = whole, shares, over
        self.rank, self.ranks = over.rank, over.size
        order = np.concatenate([shares.tokens(r) for r in range(self.ranks)])
        self.order = upload(order, device)  # rank after rank, as tokens arrive
        self.restore = upload(np.argsort(order), device)

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        own, given = self.shares.counts[self.rank], q.shape[0]
        wanted = upload(key_heads(q.shape[1], k.shape[1], self.ranks), k.device)
        k, v = k.index_select(1, wanted), v.index_select(1, wanted)
        q, k, v = (self._to_heads(x[:own]) for x in (q, k, v))
        if form.sinks is not None:
            form = form._replace(sinks=form.sinks.chunk(self.ranks)[self.rank])
        out = self._to_tokens(self.inner.attend(layer, q, k, v, form))
        return F.pad(out, (0, 0, 0, 0, 0, given - own))  # a rank without tokens computes one that none sees

    def _to_heads(self, x: Tensor) -> Tensor:
        """(own tokens, heads, dim) → (tokens, own heads, dim)"""
        counts = self.shares.counts
        own, heads, dim = x.shape
        rows = x.reshape(own, self.ranks, heads // self.ranks * dim).transpose(0, 1).flatten(0, 1)
        came = exchange(rows, [own] * self.ranks, counts, self.over)
        return came.view(sum(counts), heads // self.ranks, dim).index_select(0, self.restore)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """(tokens, own heads, dim) → (own tokens, heads, dim)"""
        counts = self.shares.counts
        tokens, heads, dim = x.shape
        own = counts[self.rank]
        rows = x.index_select(0, self.order).reshape(tokens, heads * dim)
        came = exchange(rows, counts, [own] * self.ranks, self.over)
        return came.view(self.ranks, own, heads, dim).transpose(0, 1).reshape(own, self.ranks * heads, dim)


def key_heads(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """Which key/value heads go to the ranks, as many to each. With fewer heads than ranks one head goes to several."""
    share, per_key = heads // ranks, heads // kv_heads
    if kv_heads % ranks == 0:
        return list(range(kv_heads))
    if ranks % kv_heads == 0:
        return [r * share // per_key for r in range(ranks)]
    return [h // per_key for h in range(heads)]  # no even split: one for each query head


def exchange(rows: Tensor, send: Sequence[int], receive: Sequence[int], over: MeshLink) -> Tensor:
    """send[r] rows to rank r, receive[r] rows from it, in the order of ranks. The gradient goes the other way."""
    came: Tensor = _Exchange.apply(rows, list(send), list(receive), over)  # type: ignore[no-untyped-call]
    return came


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], over: MeshLink) -> Tensor:
        ctx.splits, ctx.over = (send, receive), over
        return over.all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.splits
        return ctx.over.all_to_all(grad, receive, send), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, count: int, over: MeshLink) -> Tensor:
        ctx.save_for_backward(places)
        whole = x.new_zeros(count).index_copy_(0, places, x)
        return over.all_reduce(whole)  # one rank has each number, the others add 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None
