"""Learning a network: one update is all passes over a step's decisions, in minibatches drawn anew each pass."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from tidemill.algorithms.api import total
from tidemill.algorithms.shared.steps import loss
from tidemill.batch import Batch
from tidemill.learn.engine import Learner
from tidemill.learn.optim.make import learning_rate
from tidemill.learn.values.critic import value_metrics
from tidemill.models.network.passes import Update


class NetworkLearner(Learner):
    """Keeps the samples that it is given until the update."""

    given: tuple[Batch, ...] = ()

    def accumulate_own(self, batch: Batch | None) -> None:
        self.given += () if batch is None else (batch,)

    accumulate = accumulate_own

    def forget(self) -> None:
        super().forget()
        self.given = ()

    def update(self) -> dict[str, float]:
        batches, self.given = list(self.given), ()
        rate = learning_rate(self.config.learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.pace.busy():
            metrics = self._learn(self.model.steps(batches))
        self.model.absorb(self.links["dp"].all_reduce(torch.from_numpy(self.model.told(batches))).numpy())
        self.version += 1
        metrics |= self.pace.report(self.links["world"]) | {"lr": rate, "skipped_updates": float(self.skipped)}
        return value_metrics(metrics)

    def _learn(self, steps: Any) -> dict[str, float]:
        dp, seed = self.links["dp"], (self.config.seed, self.version)
        update = Update(self.model, steps, self.config, seed, dp.rank, dp.gather_plain)
        parts = update.parts(self.algorithm.is_replayed)
        if dp.size == 1 and self.ema is None and self.show is None:  # nobody looks in between
            found = update.at_once(parts, self.algorithm.closed_form(self.config), self.optimizer)
            if found is not None:
                self.skipped += int(found.pop("skipped"))
                return found
        self._stats, norm = update.one_by_one(parts, partial(loss, self.algorithm, self.config), self._take_step)
        metrics, self._stats = total(self._stats_of_all()), []
        return {**metrics, "grad_norm": norm}

    def _take_step(self) -> float:
        self.gradients.finish()
        norm = self.gradients.divide_and_clip(1.0, self.config.learn.clip_norm)
        if math.isfinite(norm):
            self._step()
        self.skipped += not math.isfinite(norm)
        if self.ema is not None:
            self.ema.update()
        self.gradients.clear()
        self.model.updated(self.config.algorithm.replay.follow)
        return norm
