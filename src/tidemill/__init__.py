"""Tidemill trains language models by reinforcement learning, as distributed dataflow.

from tidemill import Trainer
Trainer(model="smollm2-135m", rewards=my_reward, data=my_rows, algorithm="grpo").train()

import tidemill
summary = tidemill.train("quickstart", ["train.steps=20"])
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.device.host import OPENMP

if not OPENMP.keys() & os.environ.keys():
    os.environ.update(OPENMP)

if TYPE_CHECKING:
    from tidemill.recipe.config import Config
    from tidemill.reward.api import Reward, Sample
    from tidemill.rollout.generation import Answer, Engine
    from tidemill.rollout.pieces import Piece
    from tidemill.run.loop import Summary
    from tidemill.trainer import Callback, Result, Table, Trainer

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Callback",
    "Engine",
    "Piece",
    "Result",
    "Reward",
    "Sample",
    "Table",
    "Trainer",
    "__version__",
    "resume",
    "train",
]

# Imported when first used: `import tidemill` waits for nothing.
_HOMES = {
    "Answer": "tidemill.rollout.generation",
    "Callback": "tidemill.trainer",
    "Engine": "tidemill.rollout.generation",
    "Piece": "tidemill.rollout.pieces",
    "Result": "tidemill.trainer",
    "Table": "tidemill.trainer",
    "Trainer": "tidemill.trainer",
    "Reward": "tidemill.reward.api",
    "Sample": "tidemill.reward.api",
}


def train(recipe: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Summary:
    """Run a recipe (a name, a path, a mapping or a Config) to its end and say what it came to."""
    from tidemill.trainer import Trainer

    return Trainer(recipe=recipe, overrides=overrides).train().summary


def resume(run: str | Path) -> Summary:
    """Go on with a run that was stopped or killed."""
    from tidemill.trainer import Trainer

    return Trainer.from_run(run).train().summary


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
