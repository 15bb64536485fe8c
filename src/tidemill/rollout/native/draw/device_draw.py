"""The draw on an accelerator by torch operations alone: `sampling.draw` with each slot's settings read on the device,
so that a captured graph can hold it. Triton's form (`triton_draw`) is faster where it compiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.rollout.native.draw.sampling import Draw, Drawn
from tidemill.rollout.native.draw.sampling import draw as draw_plain


def draw(logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities of rows whose logits are `logits[source]`; `state` has, by slot, temperature,
    greedy, key and latest token, and takes the new one."""
    drawn = draw_plain(logits.index_select(0, source.long()), _how(slot, position, state))
    return _kept(drawn, slot, state), drawn.logprobs


def draw_truncated(
    logits: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw` from what top-k, top-p and min-p keep of each row, by slot in `state`; also the log of the mass kept."""
    return _cut(logits, None, source, slot, position, state)


def draw_steered(
    logits: Tensor, steered: Tensor, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`draw_truncated` from `steered` (rows, vocab); log-probability and mass are those of `logits[source]`."""
    return _cut(logits, steered, source, slot, position, state)


def _cut(
    logits: Tensor, steered: Tensor | None, source: Tensor, slot: Tensor, position: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    how = _how(slot, position, state, is_cut=True, steered=steered)
    drawn = draw_plain(logits.index_select(0, source.long()), how)
    assert drawn.kept is not None
    return _kept(drawn, slot, state), drawn.logprobs, drawn.kept


def _how(slot: Tensor, position: Tensor, state: Any, is_cut: bool = False, steered: Tensor | None = None) -> Draw:
    mine = slot.long()

    def of(settings: Tensor) -> Tensor:
        return settings.index_select(0, mine)

    return Draw(
        key=of(state.key),
        position=position.long(),
        temperature=of(state.temperature),
        greedy=of(state.greedy) != 0,
        truncated=torch.arange(len(slot), device=slot.device) if is_cut else None,
        top_k=of(state.top_k).long() if is_cut else None,
        top_p=of(state.top_p) if is_cut else None,
        min_p=of(state.min_p) if is_cut else None,
        steered=steered,
    )


def _kept(drawn: Drawn, slot: Tensor, state: Any) -> Tensor:
    state.latest.index_copy_(0, slot.long(), drawn.tokens)
    return drawn.tokens.int()
