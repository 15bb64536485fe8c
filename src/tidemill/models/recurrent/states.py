"""The state of some sequences in one layer, as transformers' layers ask their cache for it.

Nothing here is changed in place and nothing is rounded, so gradients pass through it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Key = tuple[str, int]  # kind, and which of several of a layer
State = dict[Key, Tensor]  # (sequences, …) each

CONV, RECURRENT, LINEAR = "conv", "recurrent", "linear"


class LayerStates:
    """Implements what transformers' `LinearAttentionLayer` has: the last inputs of convolutions, and states."""

    record_past = False  # transformers keeps more than it needs where drafts may be taken back

    def __init__(self, begins: State | None = None) -> None:
        self.now: State = dict(begins or {})
        self.conv_states = _Kind(self.now, CONV)
        self.recurrent_states = _Kind(self.now, RECURRENT)
        self.known = {index for _, index in self.now}

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """(sequences, channels, tokens) → the same behind what came before them."""
        before = self.now.get((CONV, state_idx)) if state_idx in self.known else None
        if before is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, conv_states], -1)
        self.now[CONV, state_idx] = whole[..., -size:]
        self.known.add(state_idx)
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.now[RECURRENT, state_idx] = recurrent_states
        return recurrent_states


class _Kind:
    """States of one kind by number; None where there is none yet."""

    def __init__(self, states: State, kind: str) -> None:
        self.states, self.kind = states, kind

    def __getitem__(self, index: int) -> Tensor | None:
        return self.states.get((self.kind, index))

    def __setitem__(self, index: int, state: Tensor) -> None:
        self.states[self.kind, index] = state


class States:
    """Implements what of transformers' `Cache` a recurrent layer uses; it is that of one layer, whatever its number."""

    def __init__(self, begins: State | None = None) -> None:
        self.layer = LayerStates(begins)
        self.layers = _Same(self.layer)

    @property
    def now(self) -> State:
        return self.layer.now

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        known = self.layer.known
        return bool(known) if state_idx is None else state_idx in known

    def is_recording_past(self, layer_idx: int) -> bool:
        """Asked before a convolution's state is changed in place, which nothing here may be."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.now.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.now.get((RECURRENT, state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **how: Any) -> Tensor:
        return self.layer.update_conv_state(conv_states, state_idx, **how)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **how: Any
    ) -> Tensor:
        return self.layer.update_recurrent_state(recurrent_states, state_idx, **how)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's words for a recurrent state."""
        return self.now.get((LINEAR, 0))

    def set_linear_cache(self, layer_idx: int, cache: Tensor) -> None:
        self.now[LINEAR, 0] = cache


class _Same:
    """Every layer is this one."""

    def __init__(self, layer: LayerStates) -> None:
        self.layer = layer

    def __getitem__(self, _: int) -> LayerStates:
        return self.layer
