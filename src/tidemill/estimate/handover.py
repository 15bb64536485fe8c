"""What rollout and learning hand over to one another on a device they share: chosen by the memory estimate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tidemill.device import Device
from tidemill.estimate.memory import MemoryEstimate, memory
from tidemill.estimate.ranks_memory import RankMemory, engine_share, per_rank
from tidemill.models.shape import ModelShape, shape_of
from tidemill.recipe.config import Config, ModelSettings
from tidemill.rollout.native.ranks.grid import Grid

HandedOver = Literal["never", "cache", "all"]
OPTIONS: tuple[HandedOver, ...] = ("never", "cache", "all")  # the cheapest first
FITS = 0.9  # of a device: graphs, workspaces and fragments take the rest


def are_taken(config: Config) -> bool:
    """Whether rollout and learning share devices and work one after the other."""
    if config.flow.schedule != "sync":
        return False
    if config.cluster.executor == "local":
        return not config.flow.is_separated
    return config.cluster.placement.rollout == "colocated"


def chosen(config: Config, model: ModelSettings, device: Device) -> HandedOver:
    """On this device, before anything is loaded there: the least that fits. `model` is the one that will be trained."""
    asked = config.flow.hand_over
    if asked != "auto":
        return asked
    if device.kind == "cpu" or not are_taken(config):
        return "never"  # what leaves the host's memory for the host's memory frees nothing
    shape = shape_of(model)
    return "never" if shape is None else least(peaks(config, model, shape), device.memory().free)


def made(model: ModelSettings, path: Path | None) -> ModelSettings:
    """As it is, or a finished warm start."""
    return model if path is None else model.model_copy(update={"path": str(path)})


def peaks(config: Config, model: ModelSettings, shape: ModelShape) -> dict[HandedOver, int]:
    """Bytes that an accelerator needs at most, by what is handed over; none where the model's size is not known."""
    if config.learn.parallel.ranks > 1:
        learner = per_rank(config, shape, on_accelerator=True)
        grid = Grid.of(config.rollout)
        share = engine_share(config, shape, grid)
        return {what: rank_peak(learner, *share, what, grid.ranks > 1) for what in OPTIONS}
    needed = memory(config, shape, on_accelerator=True)
    return {} if needed is None else {what: peak(needed, what) for what in OPTIONS}


def least(peaks: Mapping[HandedOver, int], have: int) -> HandedOver:
    """What is handed over at least for it to fit; all of it where nothing fits."""
    if not peaks:
        return "never"
    return next((what for what in OPTIONS if peaks[what] <= FITS * have), "all")


def peak(needed: MemoryEstimate, what: HandedOver) -> int:
    """The larger of the two phases; all at once where nothing is handed over."""
    if what == "never":
        return needed.total
    rolling = needed.weights + needed.copies + needed.reward_model + needed.mean + needed.cache
    if what == "cache":
        rolling += needed.optimizer + needed.critic + needed.reference
    return max(rolling, needed.total - needed.cache)


def rank_peak(learner: RankMemory, copy: int, cache: int, what: HandedOver, is_shared: bool) -> int:
    """Of one rank: its part of the learner, its engine's weights (`copy`) and cache. Where all is handed over, a share
    of an engine over ranks (`is_shared`) is not there while learning works; it is while new weights come."""
    rolling = copy + at_rest(learner, what) + cache
    if what != "all" or not is_shared:
        return max(rolling, copy + learner.total)
    return max(rolling, learner.total, copy + between_steps(learner))


def at_rest(learner: RankMemory, what: HandedOver) -> int:
    """What a rank's part of the learner holds while rollout works."""
    if what == "never":
        return learner.total
    return 0 if what == "all" else between_steps(learner)


def between_steps(learner: RankMemory) -> int:
    """What it holds while nothing is computed."""
    return learner.weights + learner.optimizer + learner.reference + learner.critic + learner.mean


def host_bytes(needed: MemoryEstimate, what: HandedOver) -> int:
    """What the host holds while rollout works."""
    return needed.optimizer + needed.critic + needed.reference if what == "all" else 0
