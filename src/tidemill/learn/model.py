"""A model on one device or cut over ranks, which scores samples: the reference as it is, and what a learner is made of.

Every rank makes the same calls with the same batches and gets the same answers. Dimensions of the mesh that have one
rank cost nothing: on one device there is no process group, no wrapper around a layer, and no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tidemill.batch import Batch, Column
from tidemill.learn.checkpoint.model_folder import materialise
from tidemill.learn.checkpoint.reading import held_box, read_own
from tidemill.learn.checkpoint.stored import StoredSource
from tidemill.learn.forward import ForwardRoot, Scores
from tidemill.learn.layers import kept_activations, prepare
from tidemill.learn.parallel import adapters, context, expert, pipeline, shard, tensor
from tidemill.learn.parallel import cuts as cutting
from tidemill.learn.parallel.collectives import MeshLink, make_links
from tidemill.learn.parallel.cuts import Cuts, local
from tidemill.learn.parallel.flight import Flight
from tidemill.learn.parallel.mesh import Meshes
from tidemill.learn.parallel.padding import filler, padded
from tidemill.learn.rows.packing import Ints, PackedBatch, microbatches, pack, response_column, shares
from tidemill.learn.rows.routes import routed
from tidemill.models import lora
from tidemill.models.attention.contexts import Attention, choose
from tidemill.models.buffers import persistent
from tidemill.models.calling import plug
from tidemill.models.layers import stages
from tidemill.models.layers.forms import fuse
from tidemill.models.mixture import routing
from tidemill.models.policy import Policy
from tidemill.models.vision.eyes import eyes
from tidemill.recipe.config import Config
from tidemill.reshard.layouts.layout import Layout
from tidemill.reshard.swap import learner_tensors

ALONE = Meshes()


class MeshModel:
    """Cuts `model` in place, where the mesh has several ranks. A frozen one (no parameter needs a gradient) is a
    reference."""

    def __init__(
        self,
        model: Any,
        config: Config,
        meshes: Meshes = ALONE,
        source: StoredSource | None = None,
        device: torch.device | None = None,
        begins: Mapping[str, Tensor] = MappingProxyType({}),
        is_ready: bool = False,
    ) -> None:
        """With `source`, `model` is on the meta device: it is cut first, and only what this rank keeps is read.
        `begins`: whole values of parameters that the source does not have. `is_ready`: of one device, and used as it
        is: a copy of a learner's model, or one that was loaded to be asked alone."""
        self.model, self.config, self.meshes = model, config, meshes
        self.device = device or next(model.parameters()).device
        self.flight = Flight.of_world(config.learn.parallel.timeout_s, meshes.made is not None)
        self.links = make_links(meshes, self.flight, _kv_heads(model) if meshes.made is not None else 0)
        self.pipeline: pipeline.Pipeline | None = None
        if isinstance(model, Policy):  # it is whole on every rank, and knows what it is called with
            self.cuts, self.routers = cutting.whole(model), None
            return
        if is_ready:
            self.cuts, self.routers = cutting.whole(model), routing.of(model)
            self.root = ForwardRoot(model, config)
            self.attention = self._attention()
            return
        if meshes.made is not None:
            plug(model)
        self.routers = routing.prepare(model, config.learn.moe, self.device)
        if self.routers is not None:
            self.routers.share = 1.0 / meshes.parallel.tp  # ranks of tp route the same tokens, and add gradients up
        self.cuts = self._cut()
        if source is not None:
            materialise(model, self.device)
            self._read(source, begins)
        self.attention = self._attention()
        prepare(model, config.learn, fused=not config.rollout.batch_invariant)

    @torch.no_grad()
    def _read(self, source: StoredSource, begins: Mapping[str, Tensor]) -> None:
        own, layout, rank = pieces_of(self.model), self.layout(), self.meshes.rank
        for given in (t for name, t in own.items() if name.endswith(f".{routing.GIVEN}")):
            given.zero_()
        begun = (*lora.SUFFIXES, f".{routing.GIVEN}")  # no folder has these
        stored = {name: t for name, t in own.items() if name not in begins and not name.endswith(begun)}
        read_own(source, stored, layout, rank, prefix="model.")
        for name in begins.keys() & own.keys():
            box = held_box(f"model.{name}", own[name], layout, rank)
            own[name].copy_(begins[name][tuple(slice(low, high) for low, high in box)])

    def _attention(self) -> Attention:
        chosen = choose(self.model, attention_of(self.config))
        if "cp" not in self.links:
            return chosen
        heads = self.model.config.get_text_config().num_attention_heads // self.meshes.parallel.tp
        return context.parallel(chosen, self.links["cp"], self.meshes.parallel.cp_form, heads)

    def _cut(self) -> Cuts:
        if "ep" in self.links:
            expert.check(self.model)  # whole: of its stages some may have none
        cuts, over = self._cut_stages(cutting.whole(self.model)), self.links.get("tp")
        if "ep" in self.links:
            tp = (over.rank, over.size) if over is not None else (0, 1)
            cuts = expert.apply(self.model, cuts, self.links["ep"], *tp)
        if over is not None:
            cuts = tensor.apply(self.model, cuts, over)
        gathers = self.meshes.data is not None
        self.root = ForwardRoot(self.model, self.config, cuts, over, self._stages(), gathers)
        self.pipeline = self._pipeline()
        if gathers and self.config.learn.fp8 == "none" and self.config.learn.compile != "on":
            fuse(self.model)  # each form is tried on whole weights, which FSDP leaves nowhere
        return shard.apply(self.root, self.model, cuts, self.meshes, self.config.learn, self.flight)

    def _cut_stages(self, cuts: Cuts) -> Cuts:
        """Leave this rank its layers; a tied weight is on two ranks, whose gradients add up."""
        if "pp" not in self.links:
            return cuts
        pp, is_tied = self.links["pp"], stages.is_tied(self.model)
        stages.split(self.model, pp.rank, pp.size, self.meshes.parallel.pp_chunks)
        cuts = {name: cuts[name] for name, _ in self.model.named_parameters()}
        if is_tied and (pair := pipeline.ends(pp.group)) is not None:
            members = dist.get_process_group_ranks(pair)
            self.links["ends"] = MeshLink("ends", pair, members, members.index(dist.get_rank()), self.flight)
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
            self.links["pp"],
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

    def _row(self, part: Batch | None) -> Row:
        if part is None:
            return Row(None, None, None, filler(self.multiple, self.device))
        share = self.config.shares_prompts
        packed = pack(part, self.device, share, self.attention, eyes.of(self.model))
        cut = context.cut(packed) if "cp" in self.links else None
        own = padded(packed if cut is None else cut.packed, self.multiple)
        routers = self.routers if "routes" in part or "weight" in part else None  # of plain scoring there is nothing
        return Row(part, packed, cut, routed(part, packed, routers, share, own, None if cut is None else cut.own))

    # Scoring

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Column:
        """Of every response token, under the weights as they are now; every rank gives the same batch and gets all."""
        if isinstance(self.model, Policy):
            return self.model.logprobs(batch)
        out = self._score(batch, self._dealt(batch))
        assert out is not None
        for name in ("dp", "pp"):  # each token is one rank's, 0 on the others
            if name in self.links:
                self.links[name].all_reduce(torch.from_numpy(out.values))
        return out

    @torch.no_grad()
    def logprobs_own(self, batch: Batch | None) -> Column | None:
        """The same where each data-parallel rank has samples of its own, or none at all: it gets its own.

        Every rank calls it as often as the others; ranks of one tensor, context or pipeline group give the same."""
        out = self._score(batch, self._own_rows(batch))
        if "pp" in self.links and out is not None:
            self.links["pp"].all_reduce(torch.from_numpy(out.values))
        return out

    def _dealt(self, batch: Batch | None, whole_groups: bool = False) -> list[Ints]:
        """Rows of this rank's micro-batches out of samples that every rank is given; empty where it runs a filler."""
        if batch is None:
            return []
        budget, share = self.config.train.tokens_per_microbatch, self.config.shares_prompts
        return shares(batch, self.meshes.dp_size, budget, share, whole_groups)[self.meshes.dp_rank]

    def _own_rows(self, batch: Batch | None, whole_groups: bool = False) -> list[Ints]:
        """Rows of the micro-batches of this rank's own samples, and fillers up to the number that the rank with most of
        them has, where ranks need each other's company."""
        budget, share = self.config.train.tokens_per_microbatch, self.config.shares_prompts
        rows = microbatches(batch, budget, share, whole_groups) if batch is not None else []
        if self.meshes.computes_alone:
            return rows
        most = int(self.links["dp"].all_reduce(torch.tensor(len(rows)), dist.ReduceOp.MAX))
        return [*rows, *[np.empty(0, np.int64)] * (most - len(rows))]

    def _score(self, batch: Batch | None, dealt: list[Ints]) -> Column | None:
        """Micro-batches one after another, or through the pipeline; one without rows is a filler."""
        parts = [batch.gather(rows) if batch is not None and len(rows) else None for rows in dealt]
        count = 0 if batch is None else int((batch["tokens"].lengths - batch.values("prompt_length")).sum())
        out = response_column(np.zeros(count, np.float32), batch) if batch is not None else None

        def keep(row: Row, i: int, scores: Scores) -> Tensor:
            logprobs = row.whole(scores)[0] if row.part is not None else scores[0]
            if row.part is not None and out is not None:
                _place(out, dealt[i], logprobs.cpu().numpy())
            return logprobs

        if self.pipeline is not None:
            rows = [self._row(part) for part in parts]
            self.pipeline.score([row.own for row in rows], lambda i, scores: keep(rows[i], i, scores))
            return out
        for i, part in enumerate(parts):
            row = self._row(part)
            with lora.without(self.model):
                keep(row, i, self._scores(row))
        return out

    def _scores(self, row: Row) -> Scores:
        found: Scores = self.root(row.own)
        return found

    def layout(self) -> Layout:
        """Of this rank's pipeline stage; `reshard.layout.merge` joins those of all."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """Asked for by every save and every publication; it is settled once the model is cut."""
        return cutting.layout(self.model, self.cuts, self.meshes)

    def pieces(self) -> dict[str, Tensor]:
        """What lies on this rank of what rollout serves, by the names of `layout`: adapters are merged. All ranks of a
        model that is cut ask together."""
        return adapters.merged(self.model, pieces_of(self.model))

    def adapter_pieces(self) -> dict[str, Tensor]:
        """What lies on this rank of the adapters by themselves."""
        return {name: piece for name, piece in pieces_of(self.model).items() if adapters.is_adapter(name)}

    def held(self) -> list[Tensor]:
        """What leaves the device while rollout has it."""
        return learner_tensors(self.model)

    def close(self) -> None:
        self.flight.close()


@dataclass(frozen=True, slots=True)
class Row:
    """One micro-batch: its samples packed, this rank's tokens of it if it is cut, and what the model is called with.
    Without samples it is a filler."""

    part: Batch | None
    packed: PackedBatch | None
    cut: context.TokenCut | None
    own: PackedBatch

    def whole(self, scores: Scores) -> Scores:
        """Of all targets, from those that this rank's tokens predict."""
        return scores if self.cut is None else (self.cut.whole(scores[0]), self.cut.whole(scores[1]))


def pieces_of(model: Any) -> dict[str, Tensor]:
    """What lies on this rank of the model: parameters, and buffers that belong to it."""
    return {name: local(p.detach()) for name, p in model.named_parameters()} | persistent(model)


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


def attention_of(config: Config) -> str:
    return "rowwise" if config.rollout.batch_invariant else config.learn.attention
