"""The learner on one device: log-probabilities of packed samples, gradients added up over micro-batches, one update."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.aggregate import local_weights, whole
from tidemill.algorithms.api import Algorithm, Kept, Stat, Stats, TokenBatch, total
from tidemill.batch import Batch, Column
from tidemill.learn.ema import MERGED_MEAN, Ema
from tidemill.learn.gradients import Gradients
from tidemill.learn.layers import kept_activations, layers_of, prepare
from tidemill.learn.logprob import token_logprobs
from tidemill.learn.meter import mismatch
from tidemill.learn.optimizer import learning_rate, make_optimizer, restored
from tidemill.learn.packing import PackedBatch, microbatches, pack, response_column
from tidemill.learn.routes import routed
from tidemill.models import logits, lora, routing, rowwise
from tidemill.models.attention.contexts import choose
from tidemill.models.buffers import persistent
from tidemill.models.narrow import narrow
from tidemill.models.upload import upload
from tidemill.recipe.config import Config

Scores = tuple[Tensor, Tensor]
Show = Callable[[str, Mapping[str, Tensor]], None]


class Learner:
    """Owns the policy's optimizer. `accumulate` any number of batches, then `update` once."""

    def __init__(self, model: Any, config: Config, algorithm: Algorithm, updates: int) -> None:
        self.model, self.config, self.algorithm, self.updates = model, config, algorithm, updates
        self.device = next(model.parameters()).device
        learn = config.learn
        if learn.lora_rank:
            lora.attach(model, learn.lora_rank, learn.lora_alpha, config.seed, learn.dora, learn.lora_experts)
        self.attention = choose(model, attention_of(config))
        self.routers = routing.prepare(model, config.learn.moe)
        self.gradients = Gradients(model.parameters(), wide=config.learn.master == "float32")
        self.optimizer = make_optimizer(model, config.learn, self.gradients, config.seed)
        self.version = 0  # updates made
        self.skipped = 0  # updates not made because a gradient was not finite
        self.ema = Ema({n: p for n, p in model.named_parameters() if p.requires_grad}, learn.ema) if learn.ema else None
        self.show: Show | None = None  # told gradients and weights of every update, for dumps
        self._stats: list[Stats] = []
        self._whole = 0.0
        prepare(model, learn, fused=not config.rollout.batch_invariant)

    def logprobs(self, batch: Batch) -> Column:
        """Of every response token, under the weights as they are now."""
        return score(self.model, batch, self.config)

    def accumulate(self, batch: Batch) -> None:
        """Add the gradient of these samples (complete groups) to the update's."""
        batch = batch.merge({"weight": local_weights(batch, self.config)})
        self._whole += whole(batch, self.config)
        teaches = self._teaches(batch)
        self._learn(batch.gather(np.flatnonzero(teaches)))
        with torch.no_grad():  # for the metrics: these rows have no gradient
            self._learn(batch.gather(np.flatnonzero(~teaches)))

    def _teaches(self, batch: Batch) -> Kept:
        return self.algorithm.teaches(batch, self.config)

    def _learn(self, batch: Batch) -> None:
        learn = self.config.learn
        together = self.algorithm.input_kind == "pairs"
        for rows in microbatches(batch, self.config.train.tokens_per_microbatch, learn.share_prompts, together):
            with kept_activations(learn, self.model):
                loss, stats = self._loss(batch.gather(rows))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            self._stats.append({"loss": Stat(loss.detach(), reduce="sum"), **stats})

    def _loss(self, part: Batch) -> tuple[Tensor, Stats]:
        packed = pack(part, self.device, self.config.learn.share_prompts, self.attention)
        given = routed(part, packed, self.routers, self.config.learn.share_prompts)
        tokens = token_batch(part, packed, forward(self.model, given, self.config))
        loss, stats = self.algorithm.loss(tokens, self.config)
        return loss, stats | mismatch(part, tokens, self.version, self.config.rollout.engine)

    def update(self) -> dict[str, float]:
        """One optimizer step from what was accumulated; metrics of the whole update."""
        learn = self.config.learn
        divisor = max(self._whole, 1.0)
        norm = float(self.gradients.divide_and_clip(divisor, learn.clip_norm))
        lr = learning_rate(learn, self.version, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._tell("gradient")
        is_finite = math.isfinite(norm)
        if is_finite:
            self.optimizer.step()
        else:
            self.skipped += 1
        fault = {} if is_finite else self._fault()
        if self.ema is not None:
            self.ema.update()
        self._tell("weight")
        self.gradients.clear()
        self.version += 1
        metrics = total(on_host(self._stats))
        metrics["loss"] = metrics.get("loss", 0.0) / divisor
        metrics |= self.routers.finish() if self.routers is not None else {}
        self._stats, self._whole = [], 0.0
        if fault:
            fault["not_finite_loss"] = float(not math.isfinite(metrics["loss"]))
        return {**metrics, **fault, "grad_norm": norm, "lr": lr, "skipped_updates": float(self.skipped)}

    def _fault(self) -> dict[str, float]:
        """Where a gradient that is not finite began: backward passes go from the last layer to the first."""
        broken = {id(p) for p in self.gradients.not_finite()}
        layers = [
            i for i, layer in enumerate(layers_of(self.model)) if any(id(p) in broken for p in layer.parameters())
        ]
        return {
            "not_finite_tensors": float(len(broken)),
            "not_finite_layer": float(max(layers, default=-1)),
            "learned_tensors": float(len(self.gradients.parameters)),
        }

    def _tell(self, what: str) -> None:
        if self.show is None:
            return
        found = {n: p if what == "weight" else self.gradients.of(p) for n, p in self.model.named_parameters()}
        self.show(what, {n: t for n, t in found.items() if t is not None})

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights are their running mean, where one is kept."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    def forget(self) -> None:
        """Drop what was accumulated since the last update."""
        self.gradients.clear()
        self._stats, self._whole = [], 0.0
        if self.routers is not None:
            self.routers.forget()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs: tensors, and plain values beside them."""
        whole = lora.merged(self.model) | persistent(self.model)
        tensors = {f"model.{name}": p for name, p in whole.items()}
        tensors |= {f"adapter.{name}": p for name, p in lora.adapters(self.model).items()}
        tensors |= self._means()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                for key, value in self.optimizer.state.get(p, {}).items():
                    tensors[f"optimizer.{names[id(p)]}.{key}"] = torch.as_tensor(value).detach()
        tensors |= self.routers.state() if self.routers is not None else {}
        return tensors, {"version": self.version, "skipped": self.skipped}

    def _means(self) -> dict[str, Tensor]:
        """Of weights, or of adapters: then what weights come to with these too, so that nobody needs the model that the
        run started from."""
        if self.ema is None:
            return {}
        if not lora.is_attached(self.model):
            return self.ema.state()
        with self.ema.swapped():
            merged = {f"{MERGED_MEAN}{name}": weight for name, weight in lora.adapted(self.model).items()}
        return self.ema.state() | merged

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if f"adapter.{name}" in tensors:
                    p.copy_(tensors[f"adapter.{name}"])
                elif p.requires_grad:  # what is not learned is as it was loaded
                    p.copy_(tensors[f"model.{name}"])
                prefix = f"optimizer.{name}."
                kept = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
                if kept:
                    self.optimizer.state[p] = restored(self.optimizer, p, kept)
            for name, buffer in persistent(self.model).items():
                if f"model.{name}" in tensors:
                    buffer.copy_(tensors[f"model.{name}"])
        if self.ema is not None:
            self.ema.restore(tensors)
        if self.routers is not None:
            self.routers.restore(tensors)
        self.version, self.skipped = int(state["version"]), int(state["skipped"])


def freeze(model: Any, weights: Literal["same", "int8", "fp8"] = "same") -> Any:
    """What never changes, the reference policy: a copy, or with low-rank adapters the same model without them."""
    if lora.is_attached(model):
        return lora.Reference(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    return frozen if weights == "same" else narrow(frozen, weights)


def attention_of(config: Config) -> str:
    return "rowwise" if config.rollout.batch_invariant else config.learn.attention


def forward(model: Any, packed: PackedBatch, config: Config) -> Scores:
    """Log-probability and entropy of every target, at the temperature that sampled it."""
    with rowwise.mode(config.rollout.batch_invariant, packed.tokens.device):
        return _forward(model, packed, config)


def _forward(model: Any, packed: PackedBatch, config: Config) -> Scores:
    decoder = model.get_decoder()
    hidden = decoder(
        input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, tide=packed.context
    ).last_hidden_state.squeeze(0)  # not [0], whose gradient is a zeroed copy
    head = model.get_output_embeddings()
    return token_logprobs(
        hidden.index_select(0, packed.predicts),
        head.weight,
        packed.targets,
        bias=head.bias,
        chunk=config.learn.logprob_chunk,
        **logits.shape(model, config.rollout.temperature),
    )


@torch.no_grad()
def score(model: Any, batch: Batch, config: Config) -> Column:
    """Log-probabilities of every response token, as a jagged column in the batch's order."""
    share, attention = config.learn.share_prompts, choose(model, attention_of(config))
    out = response_column(
        np.empty(int((batch["tokens"].lengths - batch.values("prompt_length")).sum()), np.float32), batch
    )
    assert out.offsets is not None
    routers = routing.of(model) if "routes" in batch else None
    for rows in microbatches(batch, config.train.tokens_per_microbatch, share):
        taken = batch.gather(rows)
        packed = routed(taken, pack(taken, next(model.parameters()).device, share, attention), routers, share)
        with lora.without(model):
            values = forward(model, packed, config)[0].cpu().numpy()
        cuts = np.cumsum(np.diff(out.offsets)[rows])[:-1]
        for row, part in zip(rows, np.split(values, cuts)):
            out.values[out.offsets[row] : out.offsets[row + 1]] = part
    return out


def token_batch(batch: Batch, packed: PackedBatch, scores: Scores, values: Tensor | None = None) -> TokenBatch:
    """The loss's view of a micro-batch: every column spread over its response tokens."""
    device = packed.row.device

    def spread(name: str) -> Tensor:
        column = batch[name]
        values = upload(column.gather(np.arange(batch.rows)).values, device, np.float32)
        return values[packed.row] if column.offsets is None else values

    def maybe(name: str) -> Tensor | None:
        return spread(name) if name in batch else None

    mask, now = spread("mask"), scores[0].detach()
    rollout, advantages = maybe("logprobs"), maybe("advantages")
    old = maybe("old_logprobs")
    if old is None:
        old = now if rollout is None else rollout
    own = {"tokens", "prompt", "mask", "logprobs", "old_logprobs", "ref_logprobs", "advantages", "weight", "versions"}
    return TokenBatch(
        logprobs=scores[0],
        entropy=scores[1],
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=maybe("ref_logprobs"),
        advantages=torch.zeros_like(now) if advantages is None else advantages,
        weights=spread("weight") * mask,
        mask=mask,
        row=packed.row,
        rows=packed.rows,
        values=values,
        group=upload(batch.values("group"), device),
        columns={n: spread(n) for n, c in batch.items() if n not in own and c.values.dtype.kind == "f"},
    )


def on_host(stats: list[Stats]) -> list[Stats]:
    """All numbers of all micro-batches in one copy: fetched one by one, each would wait for the device."""
    found = [x for s in stats for stat in s.values() for x in (stat.value, stat.count) if isinstance(x, Tensor)]
    if not found:
        return stats
    numbers = iter(torch.stack([x.detach().double() for x in found]).tolist())

    def plain(x: Tensor | float) -> float:
        return next(numbers) if isinstance(x, Tensor) else x

    return [
        {name: dataclasses.replace(stat, value=plain(stat.value), count=plain(stat.count)) for name, stat in s.items()}
        for s in stats
    ]


def stats_to_plain(stats: list[Stats]) -> list[dict[str, list[Any]]]:
    """As JSON can carry them to other ranks."""
    return [{name: [float(s.value), float(s.count), s.reduce] for name, s in one.items()} for one in on_host(stats)]


def stats_from_plain(records: list[dict[str, list[Any]]]) -> list[Stats]:
    return [{name: Stat(*fields) for name, fields in one.items()} for one in records]
