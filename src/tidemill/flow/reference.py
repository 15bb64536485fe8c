"""What changes about the reference during a run: how strongly it holds the policy, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tidemill.algorithms.shared.kl import adapted
from tidemill.errors import ConfigError
from tidemill.flow.learning import LearnWorker
from tidemill.flow.scoring import AdvantageWorker, ScoreWorker
from tidemill.flow.stage import Worker
from tidemill.learn.engine import Learner
from tidemill.learn.parallel.learner import ParallelLearner
from tidemill.recipe.config import Config

Holder = AdvantageWorker | Learner | ParallelLearner


class ReferenceKeeper:
    """Steers `kl.coef` towards `kl.target`, and moves the reference to the policy every `kl.reset_every` steps."""

    def __init__(self, config: Config, holders: Sequence[Holder], reference: ScoreWorker) -> None:
        self.settings, self.train = config.algorithm.kl, config.train
        self.holders, self.reference = holders, reference  # holders: whose config has the coefficient that counts
        self.coef = self.settings.coef

    @staticmethod
    def of(config: Config, stages: Sequence[Worker]) -> ReferenceKeeper | None:
        """None when nothing about the reference changes."""
        kl = config.algorithm.kl
        reference = next((w for w in stages if isinstance(w, ScoreWorker) and w.name == "reference"), None)
        if reference is None or (kl.target is None and not kl.reset_every):
            return None
        holders: list[Holder]
        if kl.place == "reward":
            holders = [w for w in stages if isinstance(w, AdvantageWorker)]
        else:
            learners = [w.learner for w in stages if isinstance(w, LearnWorker) and w.name == "learn"]
            holders = [learner for learner in learners if isinstance(learner, Learner | ParallelLearner)]
        if kl.target is not None and kl.place == "loss" and not holders:
            raise ConfigError(
                "algorithm.kl.target steers a coefficient in the loss, which cannot reach a learner of several ranks",
                "set algorithm.kl.place=reward, or leave algorithm.kl.target out",
            )
        return ReferenceKeeper(config, holders, reference)

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
        for holder in self.holders:
            algorithm = holder.config.algorithm
            kl = algorithm.kl.model_copy(update={"coef": coef})
            holder.config = holder.config.model_copy(update={"algorithm": algorithm.model_copy(update={"kl": kl})})

    def replace(self, advantage: AdvantageWorker) -> None:
        """Another worker has come in the place of one that held the coefficient."""
        self.holders = [advantage if isinstance(holder, AdvantageWorker) else holder for holder in self.holders]
        self._hold(self.coef)

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The reference's own weights are kept only if they move."""
        named = self.reference.weights() if self.settings.reset_every else {}
        return {f"reference.{name}": tensor for name, tensor in named.items()}, {"coef": self.coef}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, float]) -> None:
        self._hold(float(state["coef"]))
        if self.settings.reset_every:
            with torch.no_grad():
                for name, own in self.reference.weights().items():
                    own.copy_(tensors[f"reference.{name}"])
