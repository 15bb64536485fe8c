"""The learner across ranks: the same interface as `learn.engine.Learner`, the same numbers, on any product of sizes.

Every rank makes the same calls with the same batches. `accumulate` takes this rank's share of them; `update` adds up
what ranks hold in parts and steps on all of them, or skips on all of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tidemill.algorithms.aggregate import local_weights, whole
from tidemill.algorithms.api import Algorithm, Stat, Stats, total
from tidemill.batch import Batch, Column
from tidemill.config import Config
from tidemill.learn.engine import Scores, on_host, token_batch
from tidemill.learn.layers import kept_activations, prepare
from tidemill.learn.optimizer import learning_rate, optimizer_of
from tidemill.learn.packing import Ints, PackedBatch, pack, response_column
from tidemill.learn.parallel import cuts as cutting
from tidemill.learn.parallel import shard, tensor
from tidemill.learn.parallel.batches import shares
from tidemill.learn.parallel.collectives import Link, link, world
from tidemill.learn.parallel.cuts import Cuts, local
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.forward import Root
from tidemill.learn.parallel.gradients import ShardedGradients
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.padding import filler, padded
from tidemill.models import lora
from tidemill.models.contexts import choose
from tidemill.reshard.layout import Layout


class ParallelLearner:
    """Cuts `model` in place, then owns its optimizer. `accumulate` any number of batches, then `update` once."""

    def __init__(self, model: Any, config: Config, algorithm: Algorithm, updates: int, meshes: Meshes) -> None:
        self.model, self.config, self.algorithm, self.updates, self.meshes = model, config, algorithm, updates, meshes
        self.device = next(model.parameters()).device
        if config.learn.lora_rank:
            lora.attach(model, config.learn.lora_rank, config.learn.lora_alpha, config.seed)
        self.attention = choose(model, config.learn.attention)
        self.flight = Flight(_store(), dist.get_rank(), config.learn.parallel.timeout_s)
        self.links = make_links(meshes, self.flight, _kv_heads(model))
        prepare(model, config.learn)
        self.cuts = self._cut()
        named = dict(model.named_parameters())
        self.gradients = ShardedGradients(named, self.cuts, meshes, self.links, wide=config.learn.master == "float32")
        # The optimizer works on plain tensors: the same arithmetic, and the same bits, as on one rank.
        self.own = {name: Parameter(local(p).detach()) for name, p in named.items() if p.requires_grad}
        self._name_of = {id(p): name for name, p in self.own.items()}
        self.optimizer = optimizer_of(
            list(self.own.values()), (), config.learn, lambda p: self.gradients.of(self._name_of[id(p)])
        )
        self.version = 0  # updates made
        self.skipped = 0  # updates not made because a gradient was not finite
        self._stats: list[Stats] = []
        self._whole = 0.0

    def _cut(self) -> Cuts:
        cuts = cutting.whole(self.model)
        over = self.links.get("tp")
        if over is not None:
            cuts = tensor.apply(self.model, cuts, over)
        self.root = Root(self.model, cuts, over, self.config)
        return shard.apply(self.root, self.model, cuts, self.meshes, self.config.learn)

    @property
    def multiple(self) -> int:
        """Tokens of a row are dealt out over this many ranks."""
        return self.meshes.parallel.tp

    # Learning

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups, the same on every rank) to the update's."""
        batch = batch.merge({"weight": local_weights(batch, self.config)})
        self._whole += whole(batch, self.config)
        learn = self.config.learn
        dealt = shares(
            batch,
            self.meshes.dp_size,
            self.config.train.tokens_per_microbatch,
            learn.share_prompts,
            self.algorithm.food == "pairs",
        )
        for rows in dealt[self.meshes.dp_rank]:
            self._backward(batch.gather(rows) if len(rows) else None)

    def _backward(self, part: Batch | None) -> None:
        with kept_activations(self.config.learn, self.model):
            loss, stats = self._loss(part)
        loss.backward()  # type: ignore[no-untyped-call]
        if part is not None:
            self._stats.append({"loss": Stat(loss.detach(), reduce="sum"), **stats})

    def _loss(self, part: Batch | None) -> tuple[Tensor, Stats]:
        if part is None:
            return nothing(self.root(filler(self.multiple, self.device))), {}
        packed = self._pack(part)
        return self.algorithm.loss(token_batch(part, packed, self._scores(packed)), self.config)

    def _pack(self, part: Batch) -> PackedBatch:
        return pack(part, self.device, self.config.learn.share_prompts, self.attention)

    def _scores(self, packed: PackedBatch) -> Scores:
        scores: Scores = self.root(padded(packed, self.multiple))
        return scores

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update, the same on every rank."""
        learn = self.config.learn
        divisor = max(self._whole, 1.0)
        self.gradients.finish()
        norm = self.gradients.divide_and_clip(divisor, learn.clip_norm)
        lr = learning_rate(learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._step()
        else:
            self.skipped += 1
        self.gradients.clear()
        self.version += 1
        metrics = total(self._stats_of_all())
        metrics["loss"] = metrics.get("loss", 0.0) / divisor
        self._stats, self._whole = [], 0.0
        return {**metrics, "grad_norm": norm, "lr": lr, "skipped_updates": float(self.skipped)}

    def _step(self) -> None:
        named = dict(self.model.named_parameters())
        for name, p in self.own.items():
            p.data = local(named[name].data)  # FSDP may have moved it
            p.grad = self.gradients.of(name)
        self.optimizer.step()
        for p in self.own.values():
            p.grad = None

    def _stats_of_all(self) -> list[Stats]:
        """Ranks that share samples have the same numbers, so one of each is asked."""
        return [stats for part in self.links["dp"].gather_objects(on_host(self._stats)) for stats in part]

    # Scoring

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Column:
        """Of every response token, under the weights as they are now; every rank gives the same batch and gets all."""
        return self._spread(batch, lambda packed: self._scores(packed)[0])

    def _spread(self, batch: Batch, compute: Any) -> Column:
        share, budget = self.config.learn.share_prompts, self.config.train.tokens_per_microbatch
        count = int((batch["tokens"].lengths - batch.values("prompt_length")).sum())
        out = response_column(np.zeros(count, np.float32), batch)
        for rows in shares(batch, self.meshes.dp_size, budget, share)[self.meshes.dp_rank]:
            if not len(rows):
                self.root(filler(self.multiple, self.device))
                continue
            _place(out, rows, compute(self._pack(batch.gather(rows))).cpu().numpy())
        self.links["dp"].all_reduce(torch.from_numpy(out.values))  # each token is one rank's, 0 on the others
        return out

    # What lies where

    def layout(self) -> Layout:
        """Of this rank's pipeline stage; `reshard.layout.merge` joins those of all."""
        return cutting.layout(self.model, self.cuts, self.meshes)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's pieces of what a resumed run needs, by name: weights, and the optimizer's state beside them."""
        found = {f"model.{name}": local(p.detach()) for name, p in self.model.named_parameters()}
        for name, p in self.own.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer.{name}.{key}"] = torch.as_tensor(value).detach()
        return found

    def close(self) -> None:
        self.gradients.close()
        self.flight.close()


def make_links(meshes: Meshes, flight: Flight, kv_heads: int) -> dict[str, Link]:
    """By name: the dimensions over which this rank exchanges something itself. FSDP has its own."""
    links = {"world": world(flight), "dp": link(meshes.dp, flight)}
    if meshes.tp is not None:
        links["tp"] = link(meshes.tp, flight)
        if 0 < kv_heads < meshes.tp.size():
            folded = meshes.tp._unflatten(0, (kv_heads, meshes.tp.size() // kv_heads), ("kv_head", "kv"))
            links["kv"] = link(folded["kv"], flight)
    return links


def nothing(scores: Scores) -> Tensor:
    """A loss of 0 that still reaches every weight."""
    return 0.0 * (scores[0].sum() + scores[1].sum())


def _place(out: Column, rows: Ints, values: Any) -> None:
    assert out.offsets is not None
    cuts = np.cumsum(np.diff(out.offsets)[rows])[:-1]
    for row, part in zip(rows, np.split(values, cuts)):
        out.values[out.offsets[row] : out.offsets[row + 1]] = part


def _kv_heads(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "num_key_value_heads", 0) or 0)


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
