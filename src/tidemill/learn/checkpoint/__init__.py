"""Checkpoints: safetensors and JSON, no pickle. Every tensor is kept as boxes of it, so any layout reads any other's.

Importing this brings no torch: whoever only looks for a checkpoint is spared it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.learn.checkpoint.folders import ASIDE, MANIFEST, STATE, Found, Saving, best, fault, latest, prune

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ASIDE", "MANIFEST", "STATE", "Found", "best", "fault", "latest", "load", "prune", "save"]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: bool = False,
    metric: float | None = None,
) -> Path:
    """Write `folder/step-…` from tensors that this process has whole, then prune to the `keep` newest and the best. On
    failure nothing saved before is lost."""
    from tidemill.learn.checkpoint.pieces import save_whole

    return save_whole(Saving(folder, step, state, keep, best, metric), tensors)


def load(path: Path, *prefixes: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, on the CPU, and state of a checkpoint that `latest` found. `prefixes`: of names wanted; none: all."""
    from tidemill.learn.checkpoint.reading import load_whole

    return load_whole(path, prefixes)
