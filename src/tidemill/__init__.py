"""Tidemill trains language models by reinforcement learning, as distributed dataflow.

import tidemill
summary = tidemill.train("quickstart", ["train.steps=20"])
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read once, when torch loads OpenMP: a thread that waits for its partners looks for some 30 microseconds, then sleeps.
# Spinning for long, a thread on a busy machine holds the core its partner needs (measured: 81 tokens/s spinning, 1,615
# sleeping); sleeping at once, every small product of a free machine pays for being woken (a sixth of a small step).
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
if not OPENMP.keys() & os.environ.keys():
    os.environ.update(OPENMP)

if TYPE_CHECKING:
    from tidemill.recipe.config import Config
    from tidemill.run.loop import Summary

__version__ = "0.1.0"
__all__ = ["__version__", "resume", "train"]


def train(recipe: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Summary:
    """Run a recipe (a name, a path, a mapping or a Config) to its end and say what it came to."""
    from tidemill.run.start import train as launch

    return launch(recipe, overrides)


def resume(run: str | Path) -> Summary:
    """Go on with a run that was stopped or killed."""
    from tidemill.run.start import resume as launch

    return launch(run)
