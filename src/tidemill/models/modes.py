"""Who is in training mode. Layers that are computed again are, for transformers asks for it; nobody else ever is, for
dropout has no place in RL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def at_rest(modules: Iterable[Any]) -> Iterator[None]:
    """Inside, none of these modules is; afterwards those that were are again."""
    learning = [module for module in modules if module.training]
    for module in learning:
        module.training = False
    try:
        yield
    finally:
        for module in learning:
            module.training = True
