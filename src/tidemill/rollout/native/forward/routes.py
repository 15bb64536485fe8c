"""Which experts each token of a rollout went through, kept in the cache beside its keys and values.

So shared prompts, branches, reused prefixes and rows that are read again need nothing of their own: a token's route
lies where the token lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.errors import ModelError
from tidemill.models.attention.registry import Context
from tidemill.models.mixture import routing
from tidemill.models.upload import upload
from tidemill.rollout.native.pages.cache import PageStore

KEY = -1  # no layer has this number


class RouteRecorder:
    def __init__(self, model: Any, store: PageStore) -> None:
        routers = routing.of(model)
        if routers is None:
            raise ModelError(
                f"{type(model).__name__} has no routers to record", "set learn.moe.replay to false for this model"
            )
        self.routers, self.store = routers, store

    def forward(self, run: Callable[[Context], Tensor], context: Context, page: Tensor, offset: Tensor) -> Tensor:
        """A pass whose tokens lie at `offset` of `page`."""
        made: dict[int, Tensor] = {}
        logits = run(routing.Routed(context, made=made))
        if KEY not in self.store.values:
            shape = (self.store.pages, self.store.page_size, self.routers.layers, self.routers.k)
            self.store.values[KEY] = self.store.zeros(shape, torch.int16)
        chosen = torch.stack([made[layer] for layer in range(self.routers.layers)], 1)  # (tokens, layers, k)
        self.store.values[KEY][page, offset] = chosen.to(torch.int16)
        return logits

    def of(self, pages: Sequence[int], tokens: int) -> Array:
        """(tokens · layers · k,) of a sequence that lies in `pages`."""
        at = np.arange(tokens)
        size = self.store.page_size
        page = upload(np.asarray(pages, np.int64)[at // size], self.store.device)
        offset = upload(at % size, self.store.device)
        routes: Array = self.store.values[KEY][page, offset].cpu().numpy().reshape(-1)
        return routes
