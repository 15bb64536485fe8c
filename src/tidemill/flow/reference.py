"""What changes about the reference during a run: its coefficient, and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tidemill.algorithms.shared.kl import adapted
from tidemill.flow.stages.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stages.stage import Worker
from tidemill.learn import checkpoint
from tidemill.learn.engine import REFERENCE
from tidemill.recipe.config import Config


class KLHolder(Protocol):
    """The worker whose config holds the coefficient in use: the learner's, or that of the advantages."""

    config: Config


class ReferenceKeeper:
    """Adapts `kl.coef` to `kl.target`, and resets the reference to the policy every `kl.reset_every` steps."""

    def __init__(self, config: Config, holder: KLHolder | None, reference: ScoreWorker) -> None:
        self.settings, self.train = config.algorithm.kl, config.train
        self.holder, self.reference = holder, reference
        self.coef = self.settings.coef

    @staticmethod
    def of(config: Config, stages: Sequence[Worker]) -> ReferenceKeeper | None:
        """None when nothing about the reference changes."""
        kl = config.algorithm.kl
        workers: dict[str, Any] = {w.name: w for w in stages}
        if "reference" not in workers or (kl.target is None and not kl.reset_every):
            return None
        holder = None
        if kl.target is not None:
            holder = workers.get("advantage") if kl.place == "reward" else workers["learn"].learner
        return ReferenceKeeper(config, holder, workers["reference"])

    def after_step(self, step: int, measured: dict[str, float], policy: Any) -> None:
        kl = self.settings
        if kl.target is not None and "kl" in measured:
            samples = self.train.prompts_per_step * self.train.samples_per_prompt
            self._hold(adapted(self.coef, measured["kl"], kl.target, kl.horizon, samples))
            measured["kl_coef"] = self.coef
        if self.moves_after(step):
            self.reference.move_to(policy)

    def moves_after(self, step: int) -> bool:
        return bool(self.settings.reset_every) and step % self.settings.reset_every == 0

    def _hold(self, coef: float) -> None:
        self.coef = coef
        if self.holder is not None:
            algorithm = self.holder.config.algorithm
            kl = algorithm.kl.model_copy(update={"coef": coef})
            changed = algorithm.model_copy(update={"kl": kl})
            self.holder.config = self.holder.config.model_copy(update={"algorithm": changed})

    def replace(self, advantage: AdvantageWorker) -> None:
        """Take another worker in place of the one that held the coefficient."""
        if self.holder is not None and self.settings.place == "reward":
            self.holder = advantage
        self._hold(self.coef)

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the state to save; the reference's weights are a part of it only if they move."""
        named = self.reference.weights() if self.settings.reset_every else {}
        return {f"{REFERENCE}{name}": tensor for name, tensor in named.items()}, {"coef": self.coef}

    def restore(self, path: Path, state: Mapping[str, float]) -> None:
        """From a checkpoint."""
        self._hold(float(state["coef"]))
        own = self.reference.weights() if self.settings.reset_every else {}
        if own:
            tensors, _ = checkpoint.load(path, REFERENCE)
            with torch.no_grad():
                for name, target in own.items():
                    target.copy_(tensors[f"{REFERENCE}{name}"])
