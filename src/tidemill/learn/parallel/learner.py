"""The learner across ranks: the same interface as `learn.engine.Learner`, the same numbers, on any product of sizes.

Every rank makes the same calls with the same batches. `accumulate` takes this rank's share of them; `update` adds up
what ranks hold in parts and steps on all of them, or skips on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
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
from tidemill.learn.meter import mismatch
from tidemill.learn.optimizer import learning_rate, optimizer_of, state_home
from tidemill.learn.packing import Ints, PackedBatch, pack, response_column
from tidemill.learn.parallel import context, expert, pipeline, shard, tensor
from tidemill.learn.parallel import cuts as cutting
from tidemill.learn.parallel.batches import shares
from tidemill.learn.parallel.checkpoint import default_saver, open_checkpoint, read_own, state_of
from tidemill.learn.parallel.collectives import Link, link, world
from tidemill.learn.parallel.cuts import Cuts, local
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.folder import materialise
from tidemill.learn.parallel.forward import Root
from tidemill.learn.parallel.gradients import ShardedGradients
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.padding import filler, padded
from tidemill.learn.parallel.stored import Source
from tidemill.models import lora
from tidemill.models.contexts import Attention, choose
from tidemill.reshard.layout import Layout


class ParallelLearner:
    """Cuts `model` in place, then owns its optimizer. `accumulate` any number of batches, then `update` once."""

    def __init__(
        self,
        model: Any,
        config: Config,
        algorithm: Algorithm,
        updates: int,
        meshes: Meshes,
        source: Source | None = None,
        device: torch.device | None = None,
    ) -> None:
        """With `source`, `model` is on the meta device: it is cut first, and only what this rank keeps is read."""
        self.model, self.config, self.algorithm, self.updates, self.meshes = model, config, algorithm, updates, meshes
        self.device = device or next(model.parameters()).device
        if config.learn.lora_rank:
            lora.attach(model, config.learn.lora_rank, config.learn.lora_alpha, config.seed)
        timeout_s = config.learn.parallel.timeout_s
        self.flight = Flight(_store(), dist.get_rank(), timeout_s)
        self.saver = default_saver(timeout_s)
        self.links = make_links(meshes, self.flight, _kv_heads(model))
        self.cuts = self._cut()
        if source is not None:
            materialise(model, self.device)
            read_own(source, _pieces(model), self.layout(), dist.get_rank(), prefix="model.")
        self.attention = self._attention()
        prepare(model, config.learn)
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

    def _attention(self) -> Attention:
        chosen = choose(self.model, self.config.learn.attention)
        if "cp" not in self.links:
            return chosen
        heads = self.model.config.get_text_config().num_attention_heads // self.meshes.parallel.tp
        return context.parallel(chosen, self.links["cp"].group, self.meshes.parallel.cp_form, heads)

    def _cut(self) -> Cuts:
        cuts = self._cut_stages(cutting.whole(self.model))
        over = self.links.get("tp")
        if "ep" in self.links:
            tp = (over.rank, over.size) if over is not None else (0, 1)
            cuts = expert.apply(self.model, cuts, self.links["ep"].group, *tp)
        if over is not None:
            cuts = tensor.apply(self.model, cuts, over)
        self.root = Root(self.model, cuts, over, self.config, self._stages())
        self.pipeline = self._pipeline()
        return shard.apply(self.root, self.model, cuts, self.meshes, self.config.learn)

    def _cut_stages(self, cuts: Cuts) -> Cuts:
        """Leave this rank its layers; a tied weight is on two ranks, whose gradients add up."""
        if "pp" not in self.links:
            return cuts
        pp, is_tied = self.links["pp"], pipeline.is_tied(self.model)
        pipeline.split(self.model, pp.rank, pp.size, self.meshes.parallel.pp_chunks)
        cuts = {name: cuts[name] for name, _ in self.model.named_parameters()}
        if is_tied and (pair := pipeline.ends(pp.group)) is not None:
            members = dist.get_process_group_ranks(pair)
            self.links["ends"] = Link("ends", pair, members, members.index(dist.get_rank()), self.flight)
            weight = self.model.get_input_embeddings().weight
            name = next(name for name, p in self.model.named_parameters() if p is weight)
            cuts[name] = replace(cuts[name], adds="ends")
        return cuts

    def _stages(self) -> pipeline.Stages | None:
        pp = self.links.get("pp")
        return None if pp is None else pipeline.Stages(self.model, pp.rank, pp.size, self.meshes.parallel.pp_chunks)

    def _pipeline(self) -> pipeline.Pipeline | None:
        if "pp" not in self.links:
            return None
        parallel, width = self.meshes.parallel, self.model.config.get_text_config().hidden_size
        return pipeline.Pipeline(
            self.links["pp"].group,
            parallel.pp_chunks,
            self._stage,
            lambda packed: (1, packed.tokens.shape[0] // parallel.tp, width),
            next(self.model.parameters()).dtype,
            self.device,
        )

    def _stage(self, stage: int, packed: PackedBatch, came: Tensor | None) -> Any:
        with kept_activations(self.config.learn, self.model):
            return self.root(packed, stage, came)

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
        parts = [batch.gather(rows) if len(rows) else None for rows in dealt[self.meshes.dp_rank]]
        if self.pipeline is not None:
            rows = [self._row(part) for part in parts]
            self.pipeline.learn([row.own for row in rows], lambda i, scores: self._loss(rows[i], scores))
            return
        for part in parts:
            row = self._row(part)
            with kept_activations(learn, self.model):
                loss = self._loss(row, self.root(row.own))
            loss.backward()  # type: ignore[no-untyped-call]

    def _row(self, part: Batch | None) -> Row:
        if part is None:
            return Row(None, None, None, filler(self.multiple, self.device))
        packed = pack(part, self.device, self.config.learn.share_prompts, self.attention)
        cut = context.cut(packed) if "cp" in self.links else None
        return Row(part, packed, cut, padded(packed if cut is None else cut.packed, self.multiple))

    def _loss(self, row: Row, scores: Scores) -> Tensor:
        if row.part is None or row.packed is None:
            return nothing(scores)
        tokens = token_batch(row.part, row.packed, row.whole(scores))
        loss, stats = self.algorithm.loss(tokens, self.config)
        stats |= mismatch(row.part, tokens, self.version, self.config.rollout.engine)
        self._stats.append({"loss": Stat(loss.detach(), reduce="sum"), **stats})
        return loss

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
        found = [stats for part in self.links["dp"].gather_objects(on_host(self._stats)) for stats in part]
        return self.links["pp"].gather_objects(found)[-1] if "pp" in self.links else found  # the last stage has them

    # Scoring

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Column:
        """Of every response token, under the weights as they are now; every rank gives the same batch and gets all."""
        share, budget = self.config.learn.share_prompts, self.config.train.tokens_per_microbatch
        count = int((batch["tokens"].lengths - batch.values("prompt_length")).sum())
        out = response_column(np.zeros(count, np.float32), batch)
        dealt = shares(batch, self.meshes.dp_size, budget, share)[self.meshes.dp_rank]
        rows = [self._row(batch.gather(places) if len(places) else None) for places in dealt]

        def keep(i: int, scores: Scores) -> Tensor:
            logprobs = row.whole(scores)[0] if (row := rows[i]).part is not None else scores[0]
            if row.part is not None:
                _place(out, dealt[i], logprobs.cpu().numpy())
            return logprobs

        if self.pipeline is not None:
            self.pipeline.score([row.own for row in rows], keep)
        else:
            for i, row in enumerate(rows):
                keep(i, self.root(row.own))
        for name in ("dp", "pp"):  # each token is one rank's, 0 on the others
            if name in self.links:
                self.links[name].all_reduce(torch.from_numpy(out.values))
        return out

    # What lies where

    def layout(self) -> Layout:
        """Of this rank's pipeline stage; `reshard.layout.merge` joins those of all."""
        return cutting.layout(self.model, self.cuts, self.meshes)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's pieces of what a resumed run needs, by name: weights, and the optimizer's state beside them."""
        found = {f"model.{name}": t for name, t in _pieces(self.model).items()}
        for name, p in self.own.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer.{name}.{key}"] = torch.as_tensor(value).detach()
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
    ) -> None:
        """Begin to write a checkpoint; training may go on at once. `saver.wait` tells when it is on disk.

        `more`: tensors that belong to it and are nobody's pieces, the same on every rank."""
        mine = {"version": self.version, "skipped": self.skipped}
        tensors = self.tensors() | {"rng": torch.get_rng_state()} | dict(more or {})
        self.saver.save(
            folder, step, tensors, self.layout(), {**state, "learner": mine}, keep=keep, best=best, metric=metric
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Take up a checkpoint that any number of ranks wrote; gives its state."""
        source, state = open_checkpoint(path)
        with source:
            layout, rank = self.layout(), dist.get_rank()
            read_own(source, {f"model.{n}": t for n, t in _pieces(self.model).items()}, layout, rank)
            for name, kept in state_of(source, self.own).items():
                read_own(source, {f"optimizer.{name}.{key}": t for key, t in kept.items()}, layout, rank)
                p = self.own[name]
                self.optimizer.state[p] = {k: t.to(state_home(self.optimizer, p, k)) for k, t in kept.items()}
            if "rng" in source:
                torch.set_rng_state(source.read("rng"))
        self.version, self.skipped = int(state["learner"]["version"]), int(state["learner"]["skipped"])
        return state

    def close(self) -> None:
        self.saver.wait()
        self.gradients.close()
        self.flight.close()


def _pieces(model: Any) -> dict[str, Tensor]:
    """What lies on this rank of the model: parameters, and buffers that belong to it."""
    found = {name: local(p.detach()) for name, p in model.named_parameters()}
    for at, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{at}.{name}"] = buffer
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch: its samples packed, this rank's tokens of it if it is cut, and what the model is called with.
    Without samples it is a filler."""

    part: Batch | None
    packed: PackedBatch | None
    cut: context.Cut | None
    own: PackedBatch

    def whole(self, scores: Scores) -> Scores:
        """Of all targets, from those that this rank's tokens predict."""
        return scores if self.cut is None else (self.cut.whole(scores[0]), self.cut.whole(scores[1]))


def make_links(meshes: Meshes, flight: Flight, kv_heads: int) -> dict[str, Link]:
    """By name: the dimensions over which this rank exchanges something itself. FSDP has its own."""
    links = {"world": world(flight), "dp": link(meshes.dp, flight)}
    for name, mesh in (("cp", meshes.cp), ("ep", meshes.ep), ("pp", meshes.pp)):
        if mesh is not None:
            links[name] = link(mesh, flight)
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
