"""The learner across ranks: the same interface as `learn.engine.Learner`, the same numbers, on any product of sizes.

Every rank makes the same calls with the same batches. `accumulate` takes this rank's share of them; `update` adds up
what ranks hold in parts and steps on all of them, or skips on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tidemill.algorithms.aggregate import local_weights, whole
from tidemill.algorithms.api import Algorithm, Kept, Stat, Stats, total
from tidemill.batch import Batch
from tidemill.learn.ema import MERGED_MEAN, Ema
from tidemill.learn.engine import Scores, stats_from_plain, stats_to_plain, token_batch
from tidemill.learn.layers import kept_activations, layers_of
from tidemill.learn.meter import mismatch
from tidemill.learn.muon import Muon
from tidemill.learn.optimizer import learning_rate, optimizer_of, plain_state, restored
from tidemill.learn.packing import PackedBatch, microbatches
from tidemill.learn.parallel import adapters
from tidemill.learn.parallel.batches import shares
from tidemill.learn.parallel.checkpoint import default_saver, open_checkpoint, read_own, read_states
from tidemill.learn.parallel.cuts import local, renamed
from tidemill.learn.parallel.gradients import ShardedGradients
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.model import ParallelModel, Row, nothing, pieces_of
from tidemill.learn.parallel.muon import ShardedMuon, holders, matrix
from tidemill.learn.parallel.pace import RankPace
from tidemill.learn.parallel.stored import StoredSource
from tidemill.recipe.config import Config
from tidemill.reshard.layout import merge

CRITIC = "critic."  # before its names in a checkpoint
REFERENCE = "reference."  # and of a reference that moves


class ParallelLearner(ParallelModel):
    """Cuts `model` in place, then owns its optimizer. `accumulate` any number of batches, then `update` once."""

    def __init__(
        self,
        model: Any,
        config: Config,
        algorithm: Algorithm,
        updates: int,
        meshes: Meshes,
        source: StoredSource | None = None,
        device: torch.device | None = None,
        begins: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        if config.learn.lora_rank:
            begins = {**begins, **adapters.attach(model, config.learn, config.seed)}
        super().__init__(model, config, meshes, source, device, begins)
        if source is not None:
            adapters.begin_magnitudes(model)
        self.algorithm, self.updates = algorithm, updates
        self.pace = RankPace(self.flight)
        self.saver = default_saver(config.learn.parallel.timeout_s)
        named = dict(model.named_parameters())
        self.gradients = ShardedGradients(named, self.cuts, meshes, self.links, wide=config.learn.master == "float32")
        # The optimizer works on plain tensors: the same arithmetic, and the same bits, as on one rank.
        self.own = {name: Parameter(local(p).detach()) for name, p in named.items() if p.requires_grad}
        self._name_of = {id(p): name for name, p in self.own.items()}
        self.optimizer = self._optimizer()
        self.ema = Ema(self.own, config.learn.ema) if config.learn.ema else None
        self.version = 0  # updates made
        self.skipped = 0  # updates not made because a gradient was not finite
        self._stats: list[Stats] = []
        self._whole = 0.0  # of samples that every rank was given
        self._own_whole = 0.0  # of samples that only ranks like this one were given

    def _optimizer(self) -> torch.optim.Optimizer:
        learn, inner = self.config.learn, set[int]()
        kind: Callable[..., Muon] = Muon
        if learn.optimizer == "muon":
            layers = {id(p) for layer in layers_of(self.model) for p in layer.parameters() if p.ndim == 2}
            names = [n for n, p in self.model.named_parameters() if id(p) in layers and n in self.own]
            inner = {id(self.own[name]) for name in names}
            over, layout = holders(self.meshes, self.flight), self.layout()
            matrices = {id(self.own[name]): matrix(layout.by_name[name][0], over) for name in names}
            kind = partial(ShardedMuon, over=over, matrices=matrices) if over.size > 1 else Muon
        own, seed = list(self.own.values()), self.config.seed
        return optimizer_of(own, inner, learn, lambda p: self.gradients.of(self._name_of[id(p)]), kind, seed)

    # Learning

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups, the same on every rank) to the update's."""
        batch = batch.merge({"weight": local_weights(batch, self.config)})
        self._whole += whole(batch, self.config)
        teaches = self._teaches(batch)
        with self.pace.busy():
            self._learn(batch.gather(np.flatnonzero(teaches)))
            with torch.no_grad():  # for the metrics: these rows have no gradient
                self._learn(batch.gather(np.flatnonzero(~teaches)))

    def accumulate_own(self, batch: Batch | None) -> None:
        """The same where each data-parallel rank has samples (complete groups) of its own, or none at all.

        Every rank calls it as often as the others; ranks of one tensor, context or pipeline group give the same."""
        if batch is not None:
            batch = batch.merge({"weight": local_weights(batch, self.config)})
            self._own_whole += whole(batch, self.config)
        teaches = self._teaches(batch) if batch is not None else np.zeros(0, np.bool_)
        with self.pace.busy():
            for is_taught in (True, False):
                rows = np.flatnonzero(teaches == is_taught)
                parts = self._own_parts(batch.gather(rows) if batch is not None and len(rows) else None)
                with torch.set_grad_enabled(is_taught):
                    self._play(parts)

    def _own_parts(self, batch: Batch | None) -> list[Batch | None]:
        """This rank's micro-batches, and fillers up to the number that the rank with most of them has."""
        budget, share = self.config.train.tokens_per_microbatch, self.config.learn.share_prompts
        whole_groups = self.algorithm.input_kind == "pairs"
        rows = microbatches(batch, budget, share, whole_groups) if batch is not None else []
        most = self.links["dp"].all_reduce(torch.tensor(len(rows)), dist.ReduceOp.MAX)
        parts: list[Batch | None] = [batch.gather(r) for r in rows] if batch is not None else []
        return parts + [None] * (int(most) - len(parts))

    def _teaches(self, batch: Batch) -> Kept:
        return self.algorithm.teaches(batch, self.config)

    def _learn(self, batch: Batch) -> None:
        """Every rank comes here with the same rows, so all agree on how many micro-batches there are."""
        if not batch.rows:
            return
        dealt = shares(
            batch,
            self.meshes.dp_size,
            self.config.train.tokens_per_microbatch,
            self.config.learn.share_prompts,
            self.algorithm.input_kind == "pairs",
        )
        self._play([batch.gather(rows) if len(rows) else None for rows in dealt[self.meshes.dp_rank]])

    def _play(self, parts: list[Batch | None]) -> None:
        """Micro-batches one after another, or through the pipeline; None is a filler."""
        if not parts:
            return
        if self.pipeline is not None:
            rows = [self._row(part) for part in parts]
            play = self.pipeline.learn if torch.is_grad_enabled() else self.pipeline.score
            play([row.own for row in rows], lambda i, scores: self._loss(rows[i], scores))
            return
        for part in parts:
            row = self._row(part)
            with kept_activations(self.config.learn, self.model):
                loss = self._loss(row, self.root(row.own))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

    def _loss(self, row: Row, scores: Scores) -> Tensor:
        if row.part is None or row.packed is None:
            return nothing(scores)
        loss, stats = self._loss_of(row.part, row.packed, row.whole(scores))
        self._stats.append({"loss": Stat(loss.detach(), reduce="sum"), **stats})
        return loss

    def _loss_of(self, part: Batch, packed: PackedBatch, scores: Scores) -> tuple[Tensor, Stats]:
        tokens = token_batch(part, packed, scores)
        loss, stats = self.algorithm.loss(tokens, self.config)
        return loss, stats | mismatch(part, tokens, self.version, self.config.rollout.engine)

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update, the same on every rank."""
        learn = self.config.learn
        own = self.links["dp"].all_reduce(torch.tensor(self._own_whole, dtype=torch.float64))
        divisor = max(self._whole + float(own), 1.0)
        self.gradients.finish()
        norm = self.gradients.divide_and_clip(divisor, learn.clip_norm)
        lr = learning_rate(learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._find_own()
        if math.isfinite(norm):
            self._step()
        else:
            self.skipped += 1
        if self.ema is not None:
            self.ema.update()
        self.gradients.clear()
        self.version += 1
        metrics = total(self._stats_of_all())
        metrics["loss"] = metrics.get("loss", 0.0) / divisor
        metrics |= self._loads()
        self._stats, self._whole, self._own_whole = [], 0.0, 0.0
        metrics |= self.pace.report(self.links["world"])
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped_updates": float(self.skipped)}

    def forget(self) -> None:
        """Drop what was accumulated since the last update, on this rank; all ranks do so together."""
        self.gradients.clear()
        self._stats, self._whole, self._own_whole = [], 0.0, 0.0
        if self.routers is not None:
            self.routers.forget()

    def _step(self) -> None:
        for name, p in self.own.items():
            p.grad = self.gradients.of(name)
        self.optimizer.step()
        for p in self.own.values():
            p.grad = None

    def _find_own(self) -> None:
        """FSDP may have moved them."""
        named = dict(self.model.named_parameters())
        for name, p in self.own.items():
            p.data = local(named[name].data)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their running mean, where one is kept."""
        self._find_own()
        with nullcontext() if self.ema is None else self.ema.swapped():
            yield

    def _loads(self) -> dict[str, float]:
        """Of experts, over all ranks."""
        if self.routers is None:
            return {}
        for x in self.routers.sums():
            self.links["world"].all_reduce(x)
        return self.routers.finish()

    def _stats_of_all(self) -> list[Stats]:
        """Ranks that share samples have the same numbers, so one of each is asked."""
        found = [stats for part in self.links["dp"].gather_plain(stats_to_plain(self._stats)) for stats in part]
        if "pp" in self.links:
            found = self.links["pp"].gather_plain(found)[-1]  # the last stage has them
        return stats_from_plain(found)

    # What lies where

    def tensors(self) -> dict[str, Tensor]:
        """This rank's pieces of what a resumed run needs, by name: weights, adapters, the optimizer's state beside
        them. With adapters, weights have their change in them; all ranks ask together then."""
        pieces = pieces_of(self.model)
        found = {f"model.{name}": t for name, t in adapters.merged(self.model, pieces).items()}
        found |= {f"adapter.{name}": t for name, t in pieces.items() if adapters.is_adapter(name)}
        for name, p in self.own.items():
            found |= {f"optimizer.{name}.{key}": t for key, t in plain_state(self.optimizer, p).items()}
        return found

    def save(
        self,
        folder: Path,
        step: int,
        state: Mapping[str, Any],
        *,
        keep: int,
        best: bool = False,
        metric: float | None = None,
        more: Mapping[str, Tensor] | None = None,
        critic: ParallelLearner | None = None,
        reference: ParallelModel | None = None,
    ) -> None:
        """Begin to write a checkpoint; training may go on at once. `saver.wait` tells when it is on disk.

        `more`: tensors that belong to it and are nobody's pieces, the same on every rank. `critic`, and a `reference`
        that moves, go with it."""
        tensors, layout = self._kept(), self.layout()
        tensors |= {"rng": torch.get_rng_state()} | dict(more or {})
        state = {**state, "learner": self._counts()}
        if critic is not None:
            tensors |= {f"{CRITIC}{name}": t for name, t in critic._kept().items()}
            layout = merge([layout, renamed(critic.layout(), CRITIC)])
            state["critic"] = critic._counts()
        if reference is not None:
            tensors |= reference_pieces(reference)
            layout = merge([layout, renamed(reference.layout(), REFERENCE)])
        self.saver.save(folder, step, tensors, layout, state, keep=keep, best=best, metric=metric)

    def _kept(self) -> dict[str, Tensor]:
        routers = self.routers.state() if self.routers is not None else {}
        return self.tensors() | routers | self._means()

    def _means(self) -> dict[str, Tensor]:
        """As `learn.engine.Learner` keeps them; with adapters all ranks ask together."""
        if self.ema is None:
            return {}
        if not self.config.learn.lora_rank:
            return self.ema.state()
        with self.averaged():
            merged = adapters.adapted(self.model, pieces_of(self.model))
        return self.ema.state() | {f"{MERGED_MEAN}{name}": piece for name, piece in merged.items()}

    def _counts(self) -> dict[str, int]:
        return {"version": self.version, "skipped": self.skipped}

    def load(
        self, path: Path, critic: ParallelLearner | None = None, reference: ParallelModel | None = None
    ) -> dict[str, Any]:
        """Take up a checkpoint that any number of ranks wrote; gives its state."""
        source, state = open_checkpoint(path)
        with source:
            self._take_up(source, state["learner"])
            if critic is not None:
                critic._take_up(source, state["critic"], CRITIC)
            if reference is not None:
                layout = renamed(reference.layout(), REFERENCE)
                read_own(source, reference_pieces(reference), layout, dist.get_rank())
            if "rng" in source:
                torch.set_rng_state(source.read("rng"))
        return state

    def _take_up(self, source: StoredSource, counts: Mapping[str, Any], role: str = "") -> None:
        """What is not learned stays as it was loaded: with adapters, a checkpoint's weights have them in them."""
        layout, rank = renamed(self.layout(), role), dist.get_rank()
        named, targets = dict(self.model.named_parameters()), {}
        for name, piece in pieces_of(self.model).items():
            if name not in named or named[name].requires_grad:
                kind = "adapter" if adapters.is_adapter(name) else "model"
                targets[f"{role}{kind}.{name}"] = piece
        if self.ema is not None:
            targets |= {f"{role}{name}": mean for name, mean in self.ema.state().items()}
        read_own(source, targets, layout, rank)
        for name, kept in read_states(source, self.own, layout, rank, role):
            self.optimizer.state[self.own[name]] = restored(self.optimizer, self.own[name], kept)
        if self.routers is not None and f"{role}routers.load" in source:
            self.routers.restore({name: source.read(f"{role}{name}") for name in self.routers.state()})
        self.version, self.skipped = int(counts["version"]), int(counts["skipped"])

    def close(self) -> None:
        self.saver.wait()
        self.gradients.close()
        super().close()


def reference_pieces(reference: ParallelModel) -> dict[str, Tensor]:
    """What lies on this rank of a reference, as a checkpoint calls it."""
    return {f"{REFERENCE}{name}": piece for name, piece in pieces_of(reference.model).items()}
