"""What the slots of a pass ask for, put together for `sampling.draw`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.upload import upload
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.draw.guides import Guides
from tidemill.rollout.native.draw.sampling import Draw, Drawn, draw, steer, uniform_array
from tidemill.rollout.native.forward.invariant import draw_rowwise
from tidemill.rollout.native.kernels.compiled import Kernels


def draw_rows(
    scheduler: Scheduler,
    rows: Array,
    logits: Tensor,
    ahead: Array | int,
    kernels: Kernels | None,
    is_rowwise: bool,
    guides: Guides | None = None,
) -> Drawn:
    """One token for each slot of `rows`, `ahead` places after the last one launched."""
    slots = scheduler.slots
    position = slots.before[rows] + slots.launched[rows] + ahead
    temperature, greedy = slots.temperature[rows], slots.greedy[rows]
    truncated = np.flatnonzero(slots.truncated[rows])
    steered = np.flatnonzero(slots.steered[rows])
    tops = int(slots.tops[rows].max()) if len(rows) else 0
    if kernels is not None and not len(truncated) and not len(steered) and not tops:
        u = uniform_array(slots.key[rows], position)
        tokens, logprobs = kernels.draw(logits.contiguous(), temperature, u, greedy)
        return Drawn(torch.from_numpy(tokens), torch.from_numpy(logprobs), None)

    def tensor(array: Array) -> Tensor:
        return upload(array, logits.device, array.dtype)

    cut = rows[truncated]
    has_cut = len(cut) > 0
    how = Draw(
        key=tensor(slots.key[rows]),
        position=tensor(position),
        temperature=tensor(temperature) if (temperature != 1).any() else None,
        greedy=tensor(greedy) if greedy.any() else None,
        all_greedy=bool(greedy.all()),
        truncated=tensor(truncated) if has_cut else None,
        top_k=tensor(slots.top_k[cut]) if has_cut else None,
        top_p=tensor(slots.top_p[cut]) if has_cut else None,
        min_p=tensor(slots.min_p[cut]) if has_cut else None,
        steered=_steered(scheduler, rows, steered, logits, guides) if len(steered) else None,
        tops=tops,
    )
    return draw_rowwise(logits, how) if is_rowwise else draw(logits, how)


def _steered(scheduler: Scheduler, rows: Array, which: Array, logits: Tensor, guides: Guides | None) -> Tensor:
    slots = scheduler.slots
    out = logits.float().clone()
    for i in which:
        slot = rows[i]
        sequence = scheduler.sequence[slot]
        assert sequence is not None
        made = sequence.tokens + slots.tokens[slot, : slots.made[slot]].tolist()
        out[i] = steer(logits[i], sequence.request.sampling, [*sequence.request.prompt, *made], made)
    guided = which[slots.guided[rows[which]]]
    if guides is not None and len(guided):
        place, allowed = upload(guided, out.device), upload(guides.allowed(rows[guided]), out.device, np.bool_)
        out[place] = out[place].masked_fill_(~allowed, -float("inf"))
    return out
