"""The weight flow of a recipe: which layouts its settings come to, and what moving between them costs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tidemill.errors import ReshardError
from tidemill.estimate.run import shape_of
from tidemill.models.box import find
from tidemill.recipe import config as settings
from tidemill.reshard.layout import Shape
from tidemill.reshard.parallel import Model, ParallelSizes, decoder

EXPERT = re.compile(r"^(?P<before>.*\.experts)\.(?P<index>\d+)\.(?P<after>.+)$")


def learner_of(config: settings.Config) -> ParallelSizes:
    """Weights are sharded over fsdp × cp: ranks of both add their gradients up."""
    p = config.learn.parallel
    if p.ranks == 1:
        return ParallelSizes(dp=config.cluster.learners)
    return ParallelSizes(pp=p.pp, dp=p.replicate, fsdp=p.fsdp * p.cp, tp=p.tp, ep=p.ep)


def engine_of(config: settings.Config) -> tuple[ParallelSizes, bool]:
    """Rollout replicas, each whole, and whether they have devices of their own."""
    if config.cluster.executor == "local":
        return ParallelSizes(), False
    if config.cluster.placement.rollout == "colocated":
        return ParallelSizes(dp=learner_of(config).size), False
    return ParallelSizes(dp=config.cluster.rollouts), True


def model_of(model: settings.ModelSettings) -> Model:
    """The tensors of a recipe's model, from its folder's headers or a small model's settings; no weight is read."""
    shape = shape_of(model)
    if shape is None:
        raise ReshardError(
            "the recipe's model is not there yet, so its tensors are not known",
            "name one with model.path=FOLDER, or a published one with --model",
        )
    if model.path is not None:
        folder = find.look(model.path)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = raw.get("text_config", raw)
        experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
        tensors = stacked(header_shapes(folder), experts)
        tied = "lm_head.weight" not in tensors
        return Model(folder.name, tensors, shape.layers, shape.heads, shape.kv_heads, experts, tied, model.dtype)
    tiny = model.tiny or settings.TinyModel()
    return decoder(
        "the small model",
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.intermediate,
        vocabulary=shape.vocabulary,
        tied=True,
        bias=tiny.architecture == "qwen2",
        qk_norm=tiny.architecture == "qwen3",
        dtype=model.dtype,
    )


def header_shapes(folder: Path) -> dict[str, Shape]:
    """Every tensor's shape from the headers of the safetensors files: 8 bytes of length, then JSON."""
    found: dict[str, Shape] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: tuple(t["shape"]) for name, t in header.items() if name != "__metadata__"}
    if not found:
        raise ReshardError(f"{folder} has no *.safetensors", "copy the weights into it")
    return found


def stacked(shapes: dict[str, Shape], experts: int) -> dict[str, Shape]:
    """Experts that are tensors of their own become slices of one."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        parts = EXPERT.match(name)
        found |= {f"{parts['before']}.{parts['after']}": (experts, *shape)} if parts else {name: shape}
    return found
