"""How a step begins on a device: a captured graph for what runs, then prompt tokens, and nothing waits for it.

The step before may still be at work. What has to follow tokens that the host must have seen (drafts, grammars) waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tidemill.batch import Array
from tidemill.rollout.native.forward.graphs import GraphDecoder
from tidemill.rollout.native.pending import Pending

if TYPE_CHECKING:
    from tidemill.rollout.native.engine import NativeEngine


def launch(engine: NativeEngine, decoder: GraphDecoder) -> list[Pending]:
    """One token of every running sequence as a captured graph, then prompt tokens; nothing here waits."""
    scheduler, slots = engine.scheduler, engine.scheduler.slots
    may_draft = _may_draft(engine)
    guided = np.flatnonzero(slots.active & slots.guided) if engine.guides is not None else ()
    if may_draft or len(guided) or decoder.follows_results:
        engine.drain()  # drafts and grammars follow tokens that the host must have seen
    launched: list[Pending] = []
    scheduler.grow(engine.drain)
    readings, rows = engine.admit(), np.flatnonzero(slots.active & (slots.launched < slots.limit))
    _guide(engine, decoder, rows)
    if len(rows) and not (may_draft and _draft(engine, decoder, rows)):
        slots.length[rows] += 1
        position = slots.before[rows] + slots.launched[rows]
        launched.append(engine.pending_of(rows, decoder.decode(rows, slots.length[rows], position)))
    none = rows[:0]
    logits = engine.forward(none, readings, none, none) if readings else None
    born = engine.branch(readings, logits)
    if born:
        rows = np.array([sequence.slot for _, sequence in born], np.int64)
        decoder.seat([sequence for _, sequence in born])
        _guide(engine, decoder, rows)
        first = [trunk.logits for trunk, _ in born]
        launched.append(engine.pending_of(rows, decoder.begin(rows, first, slots.before[rows])))  # type: ignore[arg-type]
    return launched


def _guide(engine: NativeEngine, decoder: GraphDecoder, rows: Array) -> None:
    """Tell the device what rows with a grammar may draw."""
    if engine.guides is not None and (guided := engine.scheduler.slots.guided[rows]).any():
        decoder.allow(rows[guided], engine.guides.allowed(rows[guided]))


def _may_draft(engine: NativeEngine) -> bool:
    slots, speculator = engine.scheduler.slots, engine.speculator
    if speculator is None or (slots.active & (slots.steered | (slots.tops > 0))).any():
        return False  # penalties look at tokens that a draft does not have yet
    return speculator.is_due(int(slots.active.sum()))


def _draft(engine: NativeEngine, decoder: GraphDecoder, rows: Array) -> bool:
    """A pass with drafts, waited for and written down; False where there is nothing to draft."""
    slots, speculator = engine.scheduler.slots, engine.speculator
    assert speculator is not None
    drafts = speculator.propose(rows)
    if drafts is None:
        return False
    wide, ids, ahead = drafts.spread(rows, slots.token[rows])
    position = slots.before[wide] + slots.launched[wide] + ahead
    drawn = decoder.verify(wide, ids, slots.length[wide] + ahead + 1, position)
    slots.length[rows] += 1
    engine.inflight, latest = speculator.judge(drafts, rows, ahead, drawn)
    decoder.remember(rows, latest)
    engine.drain()
    return True
