"""What a step's stages computed and read, counted low: what is left out (attention, a sampler, padding) makes a share
of a rate a lower bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tidemill.estimate.run import BYTES
from tidemill.models.shape import ModelShape
from tidemill.plan.features import cache_bytes
from tidemill.recipe.config import Config

SCORING = ("old_logprobs", "reference", "values")  # forward passes over whole samples
LEARNING = ("learn", "learn_values")
STEPS = "machine/engine_steps"  # each reads the weights once


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    nbytes: float = 0.0  # of memory traffic that cannot be spared


class Rates(Protocol):
    """A calibration's: what a device was measured to reach."""

    @property
    def flops(self) -> float: ...

    @property
    def bytes_per_s(self) -> float: ...


def active_parameters(shape: ModelShape | None, parameters: int) -> float:
    """Those that one token goes through."""
    if shape is None or not shape.experts:
        return float(parameters)
    return parameters - shape.moe_layers * shape.expert_parameters * (1 - shape.experts_per_token / shape.experts)


def work_of(
    config: Config, shape: ModelShape | None, parameters: int, measured: Mapping[str, float]
) -> dict[str, Work]:
    """By stage, of those that took time in this step: 2·N operations a token forward, 6·N forward and backward (4·N
    where adapters alone learn). A prompt counts once for its group where it is computed once."""
    active, each = active_parameters(shape, parameters), config.train.samples_per_prompt
    prompts, made = measured.get("prompt_tokens", 0.0), measured.get("made_tokens", 0.0)
    samples = made / measured["response_tokens"] if measured.get("response_tokens") else 0.0
    found: dict[str, Work] = {}
    if "time/rollout" in measured:
        read = _decoding_bytes(config, shape, active, measured, prompts, made, samples)
        found["rollout"] = Work(2 * active * (prompts / each + made), read)
    learned, rows = measured.get("learned_tokens", 0.0), measured.get("learned_samples", 0.0)
    spared = (1 - 1 / each) * prompts / samples if config.shares_prompts and samples else 0.0
    computed = max(0.0, learned - rows * spared)
    backward = 4 if config.learn.lora_rank else 6
    for stage in (name for name in LEARNING if f"time/{name}" in measured):
        found[stage] = Work(backward * active * computed)
    for stage in (name for name in SCORING if f"time/{name}" in measured):
        found[stage] = Work(2 * active * computed / config.train.passes_per_step)
    return found


def _decoding_bytes(
    config: Config,
    shape: ModelShape | None,
    active: float,
    measured: Mapping[str, float],
    prompts: float,
    made: float,
    samples: float,
) -> float:
    """Each step of an engine reads the weights, each token the cache of those before it."""
    width = BYTES[config.model.dtype]
    weights = measured.get(STEPS, 0.0) * active * width
    if shape is None or not samples:
        return weights
    before = made * (prompts / samples + made / samples / 2)  # with equal lengths, which read least
    return weights + before * cache_bytes(shape, 1 if config.rollout.cache_dtype != "auto" else width)


def device_seconds(config: Config, stage: str, measured: Mapping[str, float]) -> float:
    """Seconds of a stage times the devices that worked on it: workers that are processes count their own."""
    seconds = measured.get(f"time/{stage}", 0.0)
    if config.cluster.executor == "local":
        return seconds * (config.learn.parallel.ranks if stage != "rollout" else 1)
    return seconds * (config.rollout.ranks if stage == "rollout" else 1)


def shares(
    config: Config, work: Mapping[str, Work], measured: Mapping[str, float], peak: float, rates: Rates | None
) -> dict[str, float]:
    """Of the data sheet's rate (`peak`; 0: unknown), and of what the device was measured to reach, by stage."""
    found: dict[str, float] = {}
    for stage, own in work.items():
        seconds = device_seconds(config, stage, measured)
        if not seconds:
            continue
        if peak:
            found[f"machine/mfu/{stage}"] = own.flops / (seconds * peak)
        if rates is not None:
            least = max(own.flops / rates.flops, own.nbytes / rates.bytes_per_s)
            found[f"machine/roofline/{stage}"] = least / seconds
    return found
