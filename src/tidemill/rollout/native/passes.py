"""One forward pass of the engine: its tokens, and the context that says what they see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tidemill.batch import Array
from tidemill.models.attention.registry import Context
from tidemill.rollout.native.batch.inputs import Inputs, inputs_of
from tidemill.rollout.native.batch.sequences import Reading
from tidemill.rollout.native.forward.invariant import RowwisePaged
from tidemill.rollout.native.pages.attention import Paged
from tidemill.rollout.native.pages.cache import TokenStore
from tidemill.rollout.native.pages.states import PassStates, Stretch

if TYPE_CHECKING:
    from tidemill.rollout.native.engine import NativeEngine


def forward(engine: NativeEngine, rows: Array, readings: list[Reading], newest: Array, ahead: Array) -> Tensor:
    """Logits of rows and of prompts read to their ends. `newest`: the token of each row, `ahead` places after the last
    one in the cache."""
    x = inputs_of(engine.scheduler, rows, readings, newest, ahead, engine.device)
    context = _context(engine, x, rows, readings, bool(ahead.any()))
    seen = engine.looking.seen(readings, len(rows))
    if engine.routes is None:
        return engine.runner.forward(x.ids, x.position, context, x.keep, seen)
    return engine.routes.forward(
        lambda routed: engine.runner.forward(x.ids, x.position, routed, x.keep, seen), context, x.page, x.offset
    )


def _context(engine: NativeEngine, x: Inputs, rows: Array, readings: list[Reading], has_drafts: bool) -> Context:
    running = engine.rows.of(rows, x.seen)
    if engine.batch_invariant:
        assert isinstance(engine.store, TokenStore)
        return RowwisePaged.of(engine.store, x.page, x.offset, running, x.chunks)
    context = Paged(engine.store, x.page, x.offset, running, x.chunks, engine.kernels, has_drafts, engine.library)
    context.ahead = "never" if engine.eyes is None else engine.eyes.ahead
    if engine.states is not None:
        stretches = [Stretch(chunk.first, chunk.last, r.trunk.hand) for chunk, r in zip(x.chunks, readings)]
        context.states = PassStates(engine.states, rows, stretches)
    return context
