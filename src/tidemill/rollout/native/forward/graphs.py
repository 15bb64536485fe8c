"""Decoding on an accelerator: one captured graph per batch size, from the latest token ids to the next ones. Batches
in which a row truncates or steers its distribution have graphs of their own, captured when first needed.

What a step needs that the host knows (slots, lengths, pages) goes over in one small copy; token ids never leave the
device between steps. Results come back in the background, and the host prepares the next step meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device.graph import CapturedGraph
from tidemill.models.attention.registry import AttentionForm
from tidemill.models.recurrent.chunked import layer
from tidemill.models.recurrent.mixers import Call
from tidemill.models.upload import upload
from tidemill.models.vision.eyes import eyes
from tidemill.rollout.native.batch.sequences import Sequence as Tenant
from tidemill.rollout.native.check import MOST_TOPS
from tidemill.rollout.native.draw.sampling import Drawn, likeliest
from tidemill.rollout.native.draw.steering import Steering
from tidemill.rollout.native.forward.fused import FusedKernels, WalkingKernels
from tidemill.rollout.native.forward.routes import RouteRecorder
from tidemill.rollout.native.forward.runner import CapturableRunner
from tidemill.rollout.native.pages import paged
from tidemill.rollout.native.pages.cache import PageStore
from tidemill.rollout.native.pages.paged import PagedAttention, Queries
from tidemill.rollout.native.pages.states import StateStore
from tidemill.rollout.native.pending import Fetch, Made

# A batch is padded to the next of these; padding rows decode a dummy token into a page of their own.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
BUCKET_STEP = 128  # beyond the last
# Host buffers in turn: one being filled, one being copied, one being read.
BUFFERS = 3
# Of passes with drafts: few sizes, for each is captured when it is first needed.
DRAFT_BUCKETS = (8, 16, 32, 64, 128, 256, 512)
TOP_K_OFF = (1 << 31) - 1  # more than any vocabulary
CONTROL = 4  # rows of a control block before the page table: slot, length, position, token id


class DrawKernels(FusedKernels, Protocol):
    def draw_truncated(
        self, logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def draw_steered(
        self, logits: Tensor, steered: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class GraphKey(NamedTuple):
    """What tells graphs apart."""

    rows: int
    has_drafts: bool = False  # rows of one slot may follow one another, with tokens given by the host
    is_truncated: bool = False  # draws from what top-k, top-p and min-p keep, and gives the mass kept
    is_steered: bool = False  # the same, after penalties, bias and allowed tokens
    has_tops: bool = False  # gives the likeliest tokens too


class SlotState:
    """What drawing needs of each sequence, on the device; the last slot is for padding."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.temperature = torch.ones(slots + 1, device=device)
        self.top_k = torch.full((slots + 1,), TOP_K_OFF, dtype=torch.int32, device=device)
        self.top_p = torch.full((slots + 1,), 2.0, device=device)
        self.min_p = torch.zeros(slots + 1, device=device)
        self.greedy = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.key = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.latest = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.shift = torch.zeros(slots + 1, dtype=torch.int64, device=device)  # from a place in the cache to a position


def _host_buffer(device: torch.device, *shape: int) -> Tensor:
    """Memory that the device can copy to and from in the background."""
    return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type != "cpu")


def _event(device: torch.device) -> torch.Event | None:
    return None if device.type == "cpu" else torch.Event(device=device)


class Bucket:
    """The buffers of one batch size, and its graph once captured."""

    def __init__(self, kind: GraphKey, pages: int, device: torch.device) -> None:
        self.kind, rows = kind, kind.rows
        size = rows * (CONTROL + pages)
        self.control = torch.zeros(size, dtype=torch.int32, device=device)
        self.slot, self.length, self.position, self.ids = self.control[: CONTROL * rows].view(CONTROL, rows)
        self.table = self.control[CONTROL * rows :].view(rows, pages)
        self.staging = [_host_buffer(device, size) for _ in range(BUFFERS)]
        self.source = torch.arange(rows, dtype=torch.int32, device=device)
        self.graph: CapturedGraph | None = None


class _Context:
    """Implements `models.attention.Context` for one token per row, by kernels that walk pages or by a library."""

    def __init__(
        self,
        store: PageStore,
        walking: WalkingKernels | None,
        library: PagedAttention | None,
        bucket: Bucket,
        states: StateStore | None = None,
    ) -> None:
        self.store, self.walking, self.library, self.bucket, self.states = store, walking, library, bucket, states
        self.place: tuple[Tensor, Tensor] | None = None
        if walking is None or bucket.kind.has_drafts:  # rows of one sequence must see each other, and run together
            self.place = _place(bucket, store.page_size)

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        assert layer is not None  # captured passes number their layers themselves
        keys, values = self.store.layer(layer, k, v)
        if self.place is None and self.walking is not None and self.walking.reads_cache(k, v):
            self.place = _place(self.bucket, self.store.page_size)
        if self.place is not None:
            self.store.write(layer, k, v, *self.place)
        bucket, scales = self.bucket, self.store.scales.get(layer)
        if self.walking is not None:
            return self.walking.attend(q, k, v, keys, values, bucket.table, bucket.length, form, scales=scales)
        queries = Queries(bucket.table, bucket.length, [1] * len(q), form.scale, form.window)  # told before each replay
        return paged.attend(self.store, layer, q, queries, form, self.library)

    def recur(self, call: Call) -> Tensor:
        """Of a gated delta net, whose states are changed where they lie."""
        assert self.states is not None
        for key, (shape, dtype) in layer.states_of(call.module).items():
            self.states.make_room((call.number, key), shape, dtype)
        conv, delta = (self.states.held[call.number, key] for key in (layer.CONV_STATE, layer.DELTA_STATE))
        return layer.step(call.module, call.hidden, conv, delta, self.bucket.slot)[None]


def _place(bucket: Bucket, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of each row's newest token."""
    last = (bucket.length - 1).long()
    page = bucket.table.gather(1, (last // page_size).unsqueeze(1)).squeeze(1)
    return page.long(), last % page_size


class GraphDecoder:
    def __init__(
        self,
        runner: CapturableRunner,
        store: PageStore,
        slots: Any,
        vocab: int,
        routes: RouteRecorder | None = None,
        library: PagedAttention | None = None,
        states: StateStore | None = None,
    ) -> None:
        self.runner, self.store, self.slots, self.vocab = runner, store, slots, vocab
        self.routes, self.states = routes, states
        self.kernels = cast(DrawKernels, runner.device_kernels)
        self.walking = cast(WalkingKernels, self.kernels) if hasattr(self.kernels, "attend") else None
        self.library = library
        # What a graph is told of each replay must not change while the one before may still read it.
        self.follows_results = library is not None and bool(library.host_argument)
        self.device = store.device
        self.most = len(slots.active)
        self.state = SlotState(self.most, self.device)
        looks = eyes.of(runner.model)
        self.has_axes = looks is not None and looks.has_axes  # a token's place is not its position
        self.buckets: dict[GraphKey, Bucket] = {}
        self._has_truncated = self._has_steered = False  # some slot's state may say to
        self.steering: Steering | None = None  # from the first that is steered
        self._pool: Any = None
        self._turn = 0
        self._results = [(_host_buffer(self.device, 3, self.most), _event(self.device)) for _ in range(2 * BUFFERS)]

    def capture(self) -> None:
        """Capture every plain batch size now, the largest first, so that the others fit in its memory."""
        sizes = sorted({self._size(n) for n in (*BUCKETS, *range(1, self.most + 1, BUCKET_STEP)) if n <= self.most})
        for rows in sorted({*sizes, self._size(self.most)}, reverse=True):
            self._bucket(GraphKey(rows))

    def forget_graphs(self) -> None:
        self.buckets.clear()
        self._pool = None

    @staticmethod
    def _size(rows: int) -> int:
        return next((b for b in BUCKETS if b >= rows), -(-rows // BUCKET_STEP) * BUCKET_STEP)

    # -- steps ---------------------------------------------------------------------------------------------------

    def seat(self, sequences: Sequence[Tenant]) -> None:
        """Slots with new tenants: take over how they draw."""
        rows = np.array([sequence.slot for sequence in sequences], np.int64)
        index = self._upload(rows)
        self.state.temperature[index] = self._upload(self.slots.temperature[rows])
        self.state.greedy[index] = self._upload(self.slots.greedy[rows].astype(np.int32))
        self.state.key[index] = self._upload(self.slots.key[rows])
        if self.has_axes:
            self.state.shift[index] = self._upload(self.slots.shift[rows])
        self._has_steered |= bool(self.slots.steered[rows].any())
        self._has_truncated |= self._has_steered or bool(self.slots.truncated[rows].any())
        if self._has_truncated:
            self.state.top_k[index] = self._upload(np.minimum(self.slots.top_k[rows], TOP_K_OFF).astype(np.int32))
            self.state.top_p[index] = self._upload(self.slots.top_p[rows])
            self.state.min_p[index] = self._upload(self.slots.min_p[rows])
        if self._has_steered:
            self._seat_steered(rows, sequences)

    def _seat_steered(self, rows: Array, sequences: Sequence[Tenant]) -> None:
        hows = [sequence.request.sampling for sequence in sequences]
        if self.steering is None:
            self.steering = Steering(self.most, self.vocab, self.device)
        width = max(len(how.logit_bias or ()) for how in hows)
        if width > self.steering.width:
            self.steering.widen(max(width, 2 * self.steering.width))
            self.buckets = {kind: bucket for kind, bucket in self.buckets.items() if not kind.is_steered}
        prompts = [np.asarray(sequence.request.prompt, np.int64) for sequence in sequences]
        made = [np.asarray(sequence.tokens, np.int64) for sequence in sequences]
        self.steering.seat(rows, hows, prompts, made)

    def decode(self, rows: Array, length: Array, position: Array) -> Fetch:
        """One token more for each slot of `rows`, of which each will then see `length` tokens."""
        bucket = self._bucket(self._kind(self._size(len(rows)), rows))
        return self._fetch(bucket.kind, self._replay(bucket, rows, length, position), len(rows))

    def _replay(self, bucket: Bucket, rows: Array, length: Array, position: Array, ids: Array | None = None) -> Any:
        self._stage(bucket, rows, length, position, ids)
        assert bucket.graph is not None
        self._tell(bucket.graph, [*length.tolist(), *[1] * (bucket.kind.rows - len(rows))])
        bucket.graph.replay()
        return bucket.graph.result

    def _tell(self, graph: CapturedGraph, length: list[int]) -> None:
        """Tell an attention operator that wants to know it on the host what each row sees."""
        if self.library is not None and self.library.host_argument:
            graph.update(self.library.host_argument, length)

    def _kind(self, size: int, rows: Array, has_drafts: bool = False) -> GraphKey:
        is_steered, has_tops = bool(self.slots.steered[rows].any()), bool(self.slots.tops[rows].any())
        is_truncated = bool(self.slots.truncated[rows].any()) and not is_steered
        return GraphKey(size, has_drafts, is_truncated, is_steered, has_tops)

    def allow(self, rows: Array, allowed: Array) -> None:
        """What slots with a grammar may draw next: (rows, vocab) bool."""
        assert self.steering is not None
        self.steering.allow(rows, allowed)

    def verify(self, rows: Array, ids: Array, length: Array, position: Array) -> Drawn:
        """One token after each of `ids`, some of which are drafts: rows of one slot lie one after another. Waits."""
        size = next(b for b in DRAFT_BUCKETS if b >= len(rows))
        bucket = self._bucket(self._kind(size, rows, has_drafts=True))
        result = self._replay(bucket, rows, length, position, ids)
        tokens, logprobs, *kept = (x[: len(rows)].cpu() for x in result)
        return Drawn(tokens.long(), logprobs, kept[0] if kept else None)

    def remember(self, rows: Array, latest: Array) -> None:
        """After `verify`: the token each slot goes on from."""
        self.state.latest[self._upload(rows)] = self._upload(latest)

    def begin(self, rows: Array, logits: list[Tensor], position: Array) -> Fetch:
        """The first token of each slot, from the logits after its prompt (one tensor object per prompt)."""
        place: dict[int, int] = {}
        source = np.array([place.setdefault(id(row), len(place)) for row in logits], np.int32)
        unique = torch.stack(list({id(row): row for row in logits}.values()))
        slot, at = self._upload(rows.astype(np.int32)), self._upload(position.astype(np.int32))
        kind = self._kind(len(rows), rows)
        return self._fetch(kind, self._draw(kind, unique, self._upload(source), slot, at), len(rows))

    def _stage(self, bucket: Bucket, rows: Array, length: Array, position: Array, ids: Array | None = None) -> None:
        n, size = len(rows), bucket.kind.rows
        host = bucket.staging[self._turn % BUFFERS]
        self._turn += 1
        block = host.numpy()
        control = block[: CONTROL * size].reshape(CONTROL, size)
        control[0, :n], control[0, n:] = rows, self.most
        control[1, :n], control[1, n:] = length, 1
        control[2, :n] = position
        if ids is not None:
            control[3, :n], control[3, n:] = ids, 0
        table = block[CONTROL * size :].reshape(size, -1)
        table[:n] = self.slots.table[rows]
        table[n:] = self.store.pages - 1  # the padding's own page
        bucket.control.copy_(host, non_blocking=True)

    def _fetch(self, kind: GraphKey, result: tuple[Tensor, ...], n: int) -> Fetch:
        """Start the way back of tokens, log-probabilities and, where it was truncated, the log of the mass kept, in one
        buffer as raw 32-bit words."""
        host, event = self._results[0]
        self._results.append(self._results.pop(0))
        drawn, tops = (result[:-2], result[-2:]) if kind.has_tops else (result, None)
        for words, made in zip(host, drawn):
            words[:n].copy_(made[:n].view(torch.int32), non_blocking=True)
        others = None
        if tops is not None:  # rarely asked for: they are waited for here
            others = tops[0][:n].to("cpu", copy=True).numpy(), tops[1][:n].to("cpu", copy=True).numpy()
        if event is not None:
            event.record()
        has_kept = len(drawn) == 3

        def fetch() -> Made:
            if event is not None:
                event.synchronize()
            words = host.numpy()[:, :n]
            tokens, logprobs = words[0].astype(np.int64), words[1].view(np.float32).copy()
            return Made(tokens, logprobs, words[2].view(np.float32).copy() if has_kept else None, others)

        return fetch

    def _upload(self, array: Array) -> Tensor:
        return upload(array, self.device, array.dtype)

    # -- capture -------------------------------------------------------------------------------------------------

    def _bucket(self, kind: GraphKey) -> Bucket:
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = Bucket(kind, self.slots.table.shape[1], self.device)
            none = np.zeros(0, np.int64)
            self._stage(bucket, none, none, none, none)  # all padding
            bucket.graph = CapturedGraph(lambda: self._step(bucket), self._pool, has_updates=self.follows_results)
            self._pool = bucket.graph.pool
        return bucket

    def _logits(self, bucket: Bucket) -> Tensor:
        slot = bucket.slot.long()
        ids = bucket.ids.long() if bucket.kind.has_drafts else self.state.latest[slot]
        context = _Context(self.store, self.walking, self.library, bucket, self.states)
        positions = (bucket.length - 1).long()
        if self.has_axes:
            positions = positions + self.state.shift[slot]
        if self.routes is None:
            return self.runner.forward(ids, positions, context, None)
        run = lambda routed: self.runner.forward(ids, positions, routed, None)  # noqa: E731
        return self.routes.forward(run, context, *_place(bucket, self.store.page_size))

    def _step(self, bucket: Bucket) -> tuple[Tensor, ...]:
        return self._draw(bucket.kind, self._logits(bucket), bucket.source, bucket.slot, bucket.position)

    def _draw(
        self, kind: GraphKey, logits: Tensor, source: Tensor, slot: Tensor, position: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens, log-probabilities and, unless it is plain, the log of the mass kept, of rows `logits[source]`; last,
        where they are asked for, the likeliest tokens and theirs."""
        if kind.has_tops:
            heat = self.state.temperature[slot.long()].unsqueeze(1)
            scores = torch.log_softmax(logits.index_select(0, source.long()).float() / heat, -1)
            drawn = self._draw(kind._replace(has_tops=False), logits, source, slot, position)
            return *drawn, *likeliest(scores, MOST_TOPS)
        if not kind.is_steered:
            kernel = self.kernels.draw_truncated if kind.is_truncated else self.kernels.draw
            return kernel(logits, source, slot, position, self.state)
        assert self.steering is not None
        mine = slot.long()
        steered = self.steering.steer(logits.index_select(0, source.long()), mine)
        made = self.kernels.draw_steered(logits, steered, source, slot, position, self.state)
        self.steering.note(mine, made[0])
        return made
