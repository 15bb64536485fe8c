"""A rank's learner from a recipe: mesh, model (streamed from its folder, or made), algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.shared.registry import get
from tidemill.learn.checkpoint.model_folder import empty_model
from tidemill.learn.checkpoint.stored import HuggingFace
from tidemill.learn.engine import Learner
from tidemill.learn.model import MeshModel
from tidemill.learn.parallel import mesh
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel
from tidemill.models.box import find
from tidemill.models.load import DTYPES, make_tiny
from tidemill.models.parts import decoder_of
from tidemill.recipe.config import Config, ParallelSettings, TinyModel


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where this rank computes."""

    kind: str = "cpu"  # of the device: cpu, cuda, npu
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)


HERE = RankPlace()


def learner(config: Config, updates: int, path: Path | None = None, place: RankPlace = HERE) -> Learner:
    """On every rank of a torch.distributed world of `config.learn.parallel.ranks`. `path`: a finished warm start."""
    meshes = mesh.build(config.learn.parallel, place.kind)
    algorithm: Algorithm = get(config.algorithm.name)
    if algorithm.learns_values:  # a reward model: there is no policy to learn
        return critic(config, updates, path, place)
    folder = _folder(config, path)
    if folder is None:
        return Learner(_tiny(config, place), config, algorithm, updates, meshes)
    with HuggingFace(folder) as source:
        model = empty_model(folder, config.model)
        return Learner(model, config, algorithm, updates, meshes, source, place.device)


def reference(config: Config, path: Path | None = None, place: RankPlace = HERE) -> MeshModel:
    """The frozen policy on the same ranks, cut as the learner is or by sizes of its own (`algorithm.kl.parallel`)."""
    config = _cut_by(config, config.algorithm.kl.parallel)
    meshes = mesh.build(config.learn.parallel, place.kind)
    folder = _folder(config, path)
    if folder is None:
        return MeshModel(_tiny(config, place).requires_grad_(False), config, meshes)
    with HuggingFace(folder) as source:
        model = empty_model(folder, config.model).requires_grad_(False)
        return MeshModel(model, config, meshes, source, place.device)


def critic(config: Config, updates: int, path: Path | None = None, place: RankPlace = HERE) -> ValueLearner:
    """The value model on the same ranks, cut as the learner is or by sizes of its own (`algorithm.critic.parallel`)."""
    config = _cut_by(config, config.algorithm.critic.parallel)
    meshes = mesh.build(config.learn.parallel, place.kind)
    algorithm: Algorithm = get(config.algorithm.name)
    folder = _folder(config, path)
    if folder is None:
        return ValueLearner(ValueModel(_tiny(config, place)), config, algorithm, updates, meshes)
    policy = empty_model(folder, config.model)
    decoder = next(name for name, module in policy.named_modules() if module is decoder_of(policy))
    with HuggingFace(folder) as stored, stored.renamed(f"{decoder}.", "decoder.") as source:
        return ValueLearner(ValueModel(policy), config, algorithm, updates, meshes, source, place.device)


def _cut_by(config: Config, sizes: ParallelSettings | None) -> Config:
    if sizes is None:
        return config
    return config.model_copy(update={"learn": config.learn.model_copy(update={"parallel": sizes})})


def _folder(config: Config, path: Path | None) -> Path | None:
    return path or (find.resolve(config.model.path) if config.model.path else None)


def _tiny(config: Config, place: RankPlace) -> Any:
    shape = config.model.tiny or TinyModel()
    return make_tiny(shape, DTYPES[config.model.dtype], config.seed, place.device).model
