"""Penalties, bias and allowed tokens of running sequences, on the device: what `sampling.steer` does, for all rows of a
pass at once and without the host, which may then run ahead of the tokens that penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.models.upload import upload
from tidemill.rollout.engine import Sampling

# Of a token that is not allowed. Not infinite: a block of such logits still has a maximum to subtract.
NEVER = -1e30
FIRST_WIDTH = 16  # biased tokens that there is room for at first


class Steering:
    """By slot; the last one is for padding. Four bytes for every slot and token of the vocabulary."""

    def __init__(self, slots: int, vocab: int, device: torch.device, width: int = FIRST_WIDTH) -> None:
        self.slots, self.vocab, self.device = slots, vocab, device
        self.repetition = torch.ones(slots + 1, device=device)
        self.presence = torch.zeros(slots + 1, device=device)
        self.frequency = torch.zeros(slots + 1, device=device)
        self.seen = torch.zeros(slots + 1, vocab, dtype=torch.bool, device=device)
        self.made = torch.zeros(slots + 1, vocab, dtype=torch.int16, device=device)  # how often
        self.allowed = torch.ones(slots + 1, vocab, dtype=torch.bool, device=device)
        self.biased = torch.zeros(slots + 1, width, dtype=torch.int64, device=device)
        self.bias = torch.zeros(slots + 1, width, device=device)
        self._yes = torch.ones((), dtype=torch.bool, device=device)
        self._one = torch.ones((), dtype=torch.int16, device=device)

    @property
    def width(self) -> int:
        return int(self.bias.shape[1])

    def widen(self, width: int) -> None:
        """Room for so many biased tokens a slot. Whoever holds the old tensors' addresses must let go of them."""
        grown = torch.zeros(self.slots + 1, width, device=self.device)
        grown[:, : self.width] = self.bias
        places = torch.zeros(self.slots + 1, width, dtype=torch.int64, device=self.device)
        places[:, : self.width] = self.biased
        self.bias, self.biased = grown, places

    def seat(self, slots: Array, hows: Sequence[Sampling], prompts: Sequence[Array], made: Sequence[Array]) -> None:
        """Slots with new tenants: how each is steered, its prompt, and the tokens it has made before."""
        index = self._tensor(slots)
        self.repetition[index] = self._tensor(np.array([how.repetition_penalty for how in hows], np.float32))
        self.presence[index] = self._tensor(np.array([how.presence_penalty for how in hows], np.float32))
        self.frequency[index] = self._tensor(np.array([how.frequency_penalty for how in hows], np.float32))
        self.seen[index] = False
        self.made[index] = 0
        self._mark(self.made, slots, made)
        self._mark(self.seen, slots, [np.concatenate(both) for both in zip(prompts, made)])
        bound = [i for i, how in enumerate(hows) if how.allowed_tokens is not None]
        self.allowed[index] = True
        self.allowed[self._tensor(slots[bound])] = False
        allowed = [np.array([*how.allowed_tokens], np.int64) for how in hows if how.allowed_tokens is not None]
        self._mark(self.allowed, slots[bound], allowed)
        places, values = np.zeros((len(hows), self.width), np.int64), np.zeros((len(hows), self.width), np.float32)
        for row, how in enumerate(hows):
            for i, (token, bias) in enumerate((how.logit_bias or {}).items()):
                places[row, i], values[row, i] = token, bias
        self.biased[index], self.bias[index] = self._tensor(places), self._tensor(values)

    def _mark(self, mask: Tensor, slots: Array, tokens: Sequence[Array]) -> None:
        if len(slots):
            rows = np.repeat(slots, [len(held) for held in tokens])
            place = (self._tensor(rows), self._tensor(np.concatenate(tokens)))
            if mask is self.made:
                mask.index_put_(place, self._one, accumulate=True)
            else:
                mask.index_put_(place, self._yes)

    def allow(self, slots: Array, allowed: Array) -> None:
        """What each slot may draw next: (slots, vocab) bool."""
        self.allowed[self._tensor(slots)] = self._tensor(allowed)

    def _tensor(self, array: Array) -> Tensor:
        return upload(array, self.device, array.dtype)

    def steer(self, logits: Tensor, slot: Tensor) -> Tensor:
        """Logits (rows, vocab) of slots to draw from."""
        x = logits.float()
        penalty = self.repetition[slot].unsqueeze(1)
        x = torch.where(self.seen[slot], torch.where(x > 0, x / penalty, x * penalty), x)
        made = self.made[slot]
        x = x - (made > 0) * self.presence[slot].unsqueeze(1) - made * self.frequency[slot].unsqueeze(1)
        x = x.scatter_add(1, self.biased[slot], self.bias[slot])
        return x.masked_fill(~self.allowed[slot], NEVER)

    def note(self, slot: Tensor, tokens: Tensor) -> None:
        """What each slot has drawn."""
        place = (slot, tokens.long())
        self.seen.index_put_(place, self._yes)
        self.made.index_put_(place, self._one, accumulate=True)
