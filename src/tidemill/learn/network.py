"""Learning a network: one update is all passes over a step's decisions, in minibatches that are drawn anew each pass.

Minibatches are drawn from the decisions of all ranks, by the samples' ids: however samples are dealt out, and in whatever
order they arrive, each minibatch is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidemill.algorithms.api import Stat, TokenBatch, total
from tidemill.batch import Batch
from tidemill.learn.values.critic import value_metrics
from tidemill.learn.engine import Learner
from tidemill.learn.optim.make import learning_rate
from tidemill.learn.rows.packing import Ints
from tidemill.models.network import fused
from tidemill.models.policy import Scores


@dataclass(frozen=True, slots=True)
class Minibatch:
    units: Ints  # this rank's
    decisions: int  # of all ranks
    is_reported: bool  # metrics are those of the last pass


class NetworkLearner(Learner):
    """Keeps the samples that it is given until the update."""

    held_samples: tuple[Batch, ...] = ()

    def accumulate(self, batch: Batch) -> None:
        self.held_samples += (batch,)

    def accumulate_own(self, batch: Batch | None) -> None:
        self.held_samples += () if batch is None else (batch,)

    def forget(self) -> None:
        super().forget()
        self.held_samples = ()

    def update(self) -> dict[str, float]:
        batches, self.held_samples = list(self.held_samples), ()
        lr = learning_rate(self.config.learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.pace.busy():
            metrics = self._pass_over(batches)
        told = torch.from_numpy(self.model.told(batches))
        self.model.absorb(self.links["dp"].all_reduce(told).numpy())
        self.version += 1
        metrics |= self.pace.report(self.links["world"])
        return value_metrics({**metrics, "lr": lr, "skipped_updates": float(self.skipped)})

    def _pass_over(self, batches: list[Batch]) -> dict[str, float]:
        steps = self.model.steps(batches)
        draw = torch.Generator().manual_seed(hash((self.config.seed, self.version)) & 0x7FFFFFFF)
        terms = self.algorithm.closed_form(self.config)
        if terms is not None and steps is not None and self._learns_fused():
            return self._fused(steps, terms)
        norms = []
        for minibatch in self._minibatches(steps):
            norm = self._step_from(steps, minibatch, draw)
            if minibatch.is_reported:
                norms.append(norm)
        metrics = total(self._stats_of_all())
        self._stats = []
        return {**metrics, "grad_norm": float(np.mean(norms)) if norms else 0.0}

    def _minibatches(self, steps: Any) -> Iterator[Minibatch]:
        learn = self.config.learn
        if self.algorithm.is_replayed:
            yield from self._drawn(steps)
            return
        own, sizes = self._places(steps)
        here = np.full(len(sizes), -1, np.int64)  # of every rank's units, which of this rank's it is
        here[own] = np.arange(len(own))
        most = learn.minibatch or max(1, int(sizes.sum()))
        count = max(1, round(len(sizes) / max(1.0, most / max(1.0, float(sizes.mean()))))) if len(sizes) else 0
        for i in range(learn.epochs):
            order = np.random.Generator(np.random.Philox([self.config.seed, self.version, i])).permutation(len(sizes))
            for chosen in np.array_split(order, count) if count else ():
                units = here[chosen]
                yield Minibatch(units[units >= 0], int(sizes[chosen].sum()), i == learn.epochs - 1)

    def _drawn(self, steps: Any) -> Iterator[Minibatch]:
        """One decision of each sample that was drawn, as many gradient steps as the recipe asks for."""
        count, ranks = self.config.algorithm.replay.updates, self.links["dp"].gather_plain(steps is not None)
        if not any(ranks):
            return  # too few were made so far
        units = np.empty(0, np.int64)
        if steps is not None:
            stream = np.random.Generator(np.random.Philox([self.config.seed, self.version, self.links["dp"].rank]))
            starts = np.cumsum(steps.lengths) - steps.lengths
            units = stream.permutation(starts + stream.integers(0, steps.lengths))
        for own in np.array_split(units, count):
            yield Minibatch(own, len(own) * sum(ranks), True)

    def _places(self, steps: Any) -> tuple[Ints, Ints]:
        """Where this rank's units are among those of all ranks, in the order of samples' ids; how many decisions each
        unit has."""
        is_whole = bool(self.model.state_width)  # a unit is a fragment
        own = [] if steps is None else list(zip(steps.ids.tolist(), steps.lengths.tolist()))
        every = sorted(one for part in self.links["dp"].gather_plain(own) for one in part)
        lengths = np.array([length for _, length in every], np.int64)
        units = np.ones(len(every), np.int64) if is_whole else lengths
        starts = dict(zip((id for id, _ in every), (np.cumsum(units) - units).tolist()))
        mine = [np.arange(starts[id], starts[id] + (1 if is_whole else length)) for id, length in own]
        return np.concatenate(mine) if mine else np.empty(0, np.int64), lengths if is_whole else np.ones(
            int(lengths.sum())
        )

    def _learns_fused(self) -> bool:
        """Whether nobody wants to see or share what lies between two gradient steps."""
        is_alone = self.links["dp"].size == 1 and self.ema is None and self.show is None
        return is_alone and type(self.optimizer) is torch.optim.AdamW and self.model.learns_fused()

    def _fused(self, steps: Any, terms: Mapping[str, float]) -> dict[str, float]:
        learn, minibatches = self.config.learn, list(self._minibatches(steps))
        order = np.concatenate([m.units for m in minibatches])
        edges = np.cumsum([0, *(len(m.units) for m in minibatches)])
        states = {p: adam_state(self.optimizer, p) for p in self.own.values()}
        moments = {p: (s["exp_avg"], s["exp_avg_sq"]) for p, s in states.items()}
        made = int(next(iter(states.values()))["step"])
        reported = next(i for i, m in enumerate(minibatches) if m.is_reported)
        settings = {"lr": self.optimizer.param_groups[0]["lr"], "beta1": learn.betas[0], "beta2": learn.betas[1],
                    "eps": learn.eps, "decay": learn.weight_decay, "clip_norm": learn.clip_norm or 0.0}  # fmt: skip
        found, after = fused.learn(self.model, steps, terms, order, edges, reported, moments, made, settings)
        for state in states.values():
            state["step"].fill_(after)
        self.skipped += int(found.pop("skipped"))
        return found

    def _step_from(self, steps: Any, minibatch: Minibatch, draw: torch.Generator) -> float:
        learn = self.config.learn
        pieces = max(1, -(-len(minibatch.units) // self.config.train.tokens_per_microbatch))
        for units in np.array_split(minibatch.units, pieces) if len(minibatch.units) else ():
            scores = self.model.score(steps, units, draw)
            loss, stats = self.algorithm.loss(self._tokens(steps, units, scores, minibatch.decisions), self.config)
            loss.backward()  # type: ignore[no-untyped-call]
            if minibatch.is_reported:
                self._stats.append({"loss": Stat(loss.detach(), len(units) / minibatch.decisions), **stats})
        self.gradients.finish()
        norm = self.gradients.divide_and_clip(1.0, learn.clip_norm)
        if math.isfinite(norm):
            self._step()
        else:
            self.skipped += 1
        if self.ema is not None:
            self.ema.update()
        self.gradients.clear()
        self.model.updated(self.config.algorithm.replay.follow)
        return norm

    def _tokens(self, steps: Any, units: Ints, scores: Scores, decisions: int) -> TokenBatch:
        chosen = torch.from_numpy(steps.decisions(units, bool(self.model.state_width))).to(self.device)
        columns = {name: column.index_select(0, chosen) for name, column in steps.columns.items()}
        now = scores.logprobs
        return TokenBatch(
            logprobs=now,
            old_logprobs=columns.get("old_logprobs", columns["logprobs"]),
            rollout_logprobs=columns["logprobs"],
            ref_logprobs=columns.get("ref_logprobs"),
            advantages=columns.get("advantages", torch.zeros_like(now)),
            weights=torch.full_like(now, 1.0 / decisions),
            mask=torch.ones_like(now),
            row=torch.zeros(len(now), dtype=torch.int64, device=self.device),
            rows=1,
            entropy=scores.entropy,
            values=scores.values,
            columns={**columns, **scores.more},
        )


def adam_state(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's own state of a parameter, made as AdamW makes it before its first step."""
    if not optimizer.state[p]:
        optimizer.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    found: dict[str, torch.Tensor] = optimizer.state[p]
    return found
