"""What goes into a network policy, and what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Judges = Literal["states", "actions", "nothing"]


@dataclass(frozen=True, slots=True)
class Spaces:
    observation: tuple[int, ...]  # shape of one
    pixels: bool = False  # observations are bytes from 0 to 255
    choices: tuple[int, ...] = ()  # of each part of an action; none: actions are real numbers
    low: tuple[float, ...] = ()  # of real actions, where they are bounded
    high: tuple[float, ...] = ()
    dimensions: int = 0  # of real actions
    masked: bool = False  # an observation's last entries say which choices are legal

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Spaces:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in plain.items()}
        return Spaces(**fields)

    def plain(self) -> dict[str, Any]:
        """For a recipe, or a message."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
