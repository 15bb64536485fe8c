"""Learning a network: one update is all passes over a step's decisions, in minibatches drawn anew each pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tidemill.algorithms.api import Stat, total
from tidemill.algorithms.shared import steps as of_steps
from tidemill.batch import Batch
from tidemill.learn.engine import Learner
from tidemill.learn.optim.make import learning_rate
from tidemill.learn.values.critic import value_metrics
from tidemill.models.network import fused, minibatches
from tidemill.models.network.minibatches import Minibatch


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
        told = torch.from_numpy(self.model.told(batches))
        self.model.absorb(self.links["dp"].all_reduce(told).numpy())
        self.version += 1
        metrics |= self.pace.report(self.links["world"]) | {"lr": rate, "skipped_updates": float(self.skipped)}
        return value_metrics(metrics)

    def _learn(self, steps: Any) -> dict[str, float]:
        learn, gather, seed = self.config.learn, self.links["dp"].gather_plain, [self.config.seed, self.version]
        if self.algorithm.is_replayed:
            count = self.config.algorithm.replay.updates
            parts = minibatches.drawn(steps, count, [*seed, self.links["dp"].rank], gather)
        else:
            parts = minibatches.shuffled(
                steps, bool(self.model.state_width), learn.epochs, learn.minibatch, seed, gather
            )
        terms = self.algorithm.closed_form(self.config)
        is_alone = self.links["dp"].size == 1 and self.ema is None and self.show is None  # nobody looks in between
        if terms is not None and is_alone and steps is not None and self.model.learns_fused():
            found = fused.update(self.model, steps, terms, list(parts), self.optimizer, learn.clip_norm or 0.0)
            self.skipped += int(found.pop("skipped"))
            return found
        draw = torch.Generator().manual_seed(hash(tuple(seed)) & 0x7FFFFFFF)
        norms = [(self._step_from(steps, part, draw), part.is_reported) for part in parts]
        metrics, self._stats = total(self._stats_of_all()), []
        return {**metrics, "grad_norm": float(np.mean([norm for norm, is_reported in norms if is_reported] or [0.0]))}

    def _step_from(self, steps: Any, part: Minibatch, draw: torch.Generator) -> float:
        pieces = max(1, -(-len(part.units) // self.config.train.tokens_per_microbatch))
        for units in np.array_split(part.units, pieces) if len(part.units) else ():
            scores, columns = self.model.score(steps, units, draw), self.model.columns(steps, units)
            tokens = of_steps.tokens(scores, columns, part.decisions)
            loss, stats = self.algorithm.loss(tokens, self.config)
            loss.backward()  # type: ignore[no-untyped-call]
            if part.is_reported:
                self._stats.append({"loss": Stat(loss.detach(), len(units) / part.decisions), **stats})
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
