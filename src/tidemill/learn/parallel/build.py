"""A rank's learner from a recipe: mesh, model (streamed from its folder, or made), algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.algorithms.api import Algorithm
from tidemill.algorithms.registry import get
from tidemill.config import Config, TinyModel
from tidemill.learn.parallel import mesh
from tidemill.learn.parallel.folder import empty_model
from tidemill.learn.parallel.learner import ParallelLearner
from tidemill.learn.parallel.stored import HuggingFace
from tidemill.models.load import DTYPES, make_tiny


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank computes."""

    kind: str = "cpu"  # of the device: cpu, cuda, npu
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)


HERE = Place()


def learner(config: Config, updates: int, path: Path | None = None, place: Place = HERE) -> ParallelLearner:
    """On every rank of a torch.distributed world of `config.learn.parallel.ranks`. `path`: a finished warm start."""
    meshes = mesh.build(config.learn.parallel, place.kind)
    algorithm: Algorithm = get(config.algorithm.name)
    folder = path or (Path(config.model.path).expanduser() if config.model.path else None)
    if folder is None:
        shape = config.model.tiny or TinyModel()
        model = make_tiny(shape, DTYPES[config.model.dtype], config.seed, place.device).model
        return ParallelLearner(model, config, algorithm, updates, meshes)
    with HuggingFace(folder) as source:
        model = empty_model(folder, config.model)
        return ParallelLearner(model, config, algorithm, updates, meshes, source, place.device)
