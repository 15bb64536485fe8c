"""One forward pass of the engine: its tokens, the context that says what they see, and what is drawn after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tidemill.batch import Array
from tidemill.models.attention.registry import Context
from tidemill.rollout.native.batch.inputs import Inputs, inputs_of
from tidemill.rollout.native.batch.sequences import Reading
from tidemill.rollout.native.draw.drawing import draw_rows
from tidemill.rollout.native.draw.sampling import Drawn
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


def draw(engine: NativeEngine, rows: Array, logits: Tensor, ahead: Array | int) -> Drawn:
    """A token for each row; where stages hold the model, what the last of them draws."""
    scheduler, links = engine.scheduler, engine.links

    def drawn() -> Drawn:
        return draw_rows(scheduler, rows, logits, ahead, engine.kernels, engine.batch_invariant, engine.guides)

    if links is None:
        return drawn()
    slots = scheduler.slots
    has_kept, tops = bool(slots.truncated[rows].any()), int(slots.tops[rows].max()) if len(rows) else 0
    return links.drawn(drawn, len(rows), has_kept, tops, engine.device)


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
