"""Between Gymnasium's spaces and a network's: flat numbers in, choices or real numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.errors import ConfigError
from tidemill.models.spaces import Spaces

Array = npt.NDArray[Any]
MASK = "action_mask"  # beside "observation", as PettingZoo has it


@dataclass(frozen=True, slots=True)
class Codec:
    """How one environment's observations become rows of an array, and what it is given as an action."""

    spaces: Spaces
    write: Callable[[Array, Any], None]  # into a row
    move: Callable[[Array], Any]  # of one slot: its parts, to what the environment takes
    moves: Callable[[Array], Array]  # of many at once

    @property
    def dtype(self) -> type:
        return np.uint8 if self.spaces.pixels else np.float32


def codec_of(observations: Any, actions: Any, name: str) -> Codec:
    """`observations` and `actions` are spaces of Gymnasium, or have their attributes."""
    shape, write, is_masked = _reader(observations, name)
    is_bytes = getattr(observations, "dtype", None) == np.uint8 and len(shape) > 1
    pixels: dict[str, Any] = {"observation": shape, "pixels": is_bytes, "masked": is_masked}
    kind = type(actions).__name__
    if kind == "Discrete":
        first = int(getattr(actions, "start", 0))
        spaces = Spaces(**pixels, choices=(int(actions.n),))
        return Codec(
            spaces, write, lambda move: int(move[0]) + first, lambda moves: moves[:, 0].astype(np.int64) + first
        )
    if kind in ("MultiDiscrete", "MultiBinary"):
        sizes = actions.nvec if kind == "MultiDiscrete" else np.full(actions.shape, 2)
        start = np.asarray(getattr(actions, "start", 0))
        spaces = Spaces(**pixels, choices=tuple(int(n) for n in np.ravel(sizes)))
        form = np.shape(sizes)

        def chosen(moves: Array) -> Array:
            return np.asarray(moves.reshape(-1, *form) + start, np.int64)

        return Codec(spaces, write, lambda move: chosen(np.asarray(move))[0], chosen)
    if kind == "Box" and np.issubdtype(actions.dtype, np.floating):
        low, high = (np.ravel(edge).astype(float).tolist() for edge in (actions.low, actions.high))
        is_bounded = bool(np.isfinite(low).all() and np.isfinite(high).all())
        bounds: dict[str, Any] = {"low": tuple(low), "high": tuple(high)} if is_bounded else {}
        spaces = Spaces(**pixels, dimensions=len(low), **bounds)
        dtype, form = actions.dtype, actions.shape

        def real(moves: Array) -> Array:
            return np.asarray(moves, dtype).reshape(-1, *form)

        return Codec(spaces, write, lambda move: np.asarray(move, dtype).reshape(form), real)
    raise ConfigError(
        f"environment {name!r} has actions that a network cannot draw: {actions}",
        "wrap it so that they are Discrete, MultiDiscrete, MultiBinary or a Box of real numbers",
    )


def _reader(space: Any, name: str) -> tuple[tuple[int, ...], Callable[[Array, Any], None], bool]:
    """Shape of a row, what writes one, and whether its last entries are a mask."""
    kind = type(space).__name__
    if kind == "Box":
        return tuple(space.shape) or (1,), _plain, False
    if kind == "Discrete":
        first = int(getattr(space, "start", 0))
        return (int(space.n),), lambda row, seen: _one_hot(row, int(seen) - first), False
    if kind == "MultiBinary":
        return (math.prod(space.shape),), lambda row, seen: _plain(row, np.ravel(seen)), False
    parts = getattr(space, "spaces", None)
    if kind == "Dict" and parts is not None and set(parts) == {"observation", MASK}:
        shape, write, _ = _reader(parts["observation"], name)
        width, whole = int(np.prod(parts[MASK].shape)), math.prod(shape)

        def masked(row: Array, seen: Any) -> None:
            write(row[:whole].reshape(shape), seen["observation"])
            row[whole:] = np.ravel(seen[MASK])

        return (whole + width,), masked, True
    if kind in ("Dict", "Tuple") and parts is not None:
        return _joined(list(parts.items() if kind == "Dict" else enumerate(parts)), name)
    raise ConfigError(
        f"environment {name!r} has observations that a network cannot read: {space}",
        "wrap it so that they are a Box, Discrete, MultiBinary, or a Dict or Tuple of these",
    )


def _joined(parts: list[tuple[Any, Any]], name: str) -> tuple[tuple[int, ...], Callable[[Array, Any], None], bool]:
    readers = [(key, *_reader(space, name)[:2]) for key, space in parts]
    width = sum(math.prod(shape) for _, shape, _ in readers)

    def write(row: Array, seen: Any) -> None:
        at = 0
        for key, shape, own in readers:
            size = math.prod(shape)
            own(row[at : at + size].reshape(shape), seen[key])
            at += size

    return (width,), write, False


def _plain(row: Array, seen: Any) -> None:
    row[...] = seen


def _one_hot(row: Array, chosen: int) -> None:
    row[:] = 0
    row[chosen] = 1
