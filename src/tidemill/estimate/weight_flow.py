"""The weight flow on paper: layouts that a recipe's settings come to, tensors of its model or of a published one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from tidemill.errors import ReshardError, did_you_mean
from tidemill.models import published as files
from tidemill.models.box import find
from tidemill.models.shape import ModelShape, header_shapes, shape_of
from tidemill.recipe.config import Config, ModelSettings
from tidemill.reshard.layouts.parallel import LAYER, Model, ParallelSizes, decoder
from tidemill.reshard.show import PlanReport, dry_plan

# What docs/weights.md shows: model, learner, engine, devices.
ON_PAPER = (
    ("qwen2.5-32b", "tp8,dp2", "tp4,dp4", 16),
    ("qwen3-30b-a3b", "fsdp16,ep8", "tp4,dp4,ep4", 16),
    ("deepseek-v3-671b", "pp12,dp8,tp4,ep32", "tp4,dp96,ep32", 384),
)
EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.+)$")


def learner_of(config: Config) -> ParallelSizes:
    """Weights are sharded over fsdp × cp: ranks of both add their gradients up."""
    p = config.learn.parallel
    if p.ranks == 1:
        return ParallelSizes(dp=config.cluster.learners)
    return ParallelSizes(pp=p.pp, dp=p.replicate, fsdp=p.fsdp * p.cp, tp=p.tp, ep=p.ep)


def engine_of(config: Config) -> tuple[ParallelSizes, bool]:
    """Rollout replicas, each whole, and whether they have devices of their own."""
    if config.cluster.executor == "local":
        return ParallelSizes(), False
    if config.cluster.placement.rollout == "colocated":
        return ParallelSizes(dp=learner_of(config).size), False
    return ParallelSizes(dp=config.cluster.rollouts), True


def on_paper() -> list[PlanReport]:
    return [dry_plan(published(model), source, target, devices=devices) for model, source, target, devices in ON_PAPER]


@cache
def published(name: str, layers: int = 0) -> Model:
    """The tensors of the published model of that name; with `layers`, only of its first so many."""
    found = files.find(name)
    if found is None:
        known = files.names()
        raise ReshardError(
            f"the shapes of {name!r} are not on file{did_you_mean(name.lower(), known)}",
            f"on file are {', '.join(known)}",
        )
    model = tensors(*found)
    if not layers:
        return model
    kept = {n: s for n, s in model.shapes.items() if (at := LAYER.search(n)) is None or int(at[1]) < layers}
    return replace(model, shapes=kept, layers=min(layers, model.layers))


def model_of(model: ModelSettings) -> Model:
    """The tensors of a recipe's model, from its folder's headers, a small model's settings, or the published model of
    that name where no folder is here; no weight is read."""
    shape = shape_of(model)
    if shape is None and model.path is not None and files.find(model.path) is not None:
        return replace(published(model.path), dtype=model.dtype)
    if shape is None:
        raise ReshardError(
            "the recipe's model is not there yet, so its tensors are not known",
            "name one with model.path=FOLDER, or a published one with --model",
        )
    if model.path is None:
        return tensors("the small model", shape, model.dtype)
    folder = find.look(model.path)
    found = stacked(header_shapes(folder), shape.experts)
    if not found:
        raise ReshardError(f"{folder} has no *.safetensors", "copy the weights into it")
    tied = "lm_head.weight" not in found
    return Model(folder.name, found, shape.layers, shape.heads, shape.kv_heads, shape.experts, tied, model.dtype)


def tensors(name: str, shape: ModelShape, dtype: str = "bfloat16") -> Model:
    """The tensors of a decoder of the usual form."""
    return decoder(
        name,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.intermediate,
        vocabulary=shape.vocabulary,
        tied=shape.is_tied,
        bias=shape.has_bias,
        qk_norm=shape.has_head_norms,
        experts=shape.experts,
        expert_ffn=shape.expert_width,
        dense_layers=shape.first_dense,
        shared_ffn=shape.shared_width,
        latent=(shape.q_rank, shape.kv_rank, shape.rotary) if shape.is_latent else None,
        dtype=dtype,
    )


def stacked(shapes: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """Experts that are tensors of their own become slices of one."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        parts = EXPERT.match(name)
        found |= {f"{parts['before']}.{parts['after']}": (experts, *shape)} if parts else {name: shape}
    return found
