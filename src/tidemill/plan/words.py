"""Plans in words: the rows of tables, and one JSON object."""

from __future__ import annotations

from typing import Any

from tidemill.estimate.run import cache_tokens
from tidemill.plan.search import Candidate, Found, words_of
from tidemill.plan.time_model import TimeModel
from tidemill.rollout.native.ranks.grid import Grid


def lines(c: Candidate, peak: float) -> tuple[str, str, str]:
    """A layout in three lines: what it comes to, what it is, what limits it."""
    config = c.config
    recompute = "" if config.learn.recompute == "none" else f", recompute {config.learn.recompute}"
    cost = f"{c.hours:.2g} h, {c.kwh:.3g} kWh" + (f", ${c.dollars:,.0f}" if c.dollars else "")
    came = f"{c.step.seconds:.3g} s a step, {c.step.tokens_per_s:,.0f} tokens/s, MFU {100 * c.step.mfu(peak):.1f} %; "
    sizes = f"micro-batch {config.train.tokens_per_microbatch:,}{recompute}; {config.rollout.concurrent} at once"
    if config.rollout.cache_tokens is not None:
        sizes += f", cache {config.rollout.cache_tokens:,} tokens"
    where = f"{c.placement}, {config.flow.schedule}"
    memory = f"{c.learner_bytes / 1e9:.3g} GB"
    if config.cluster.executor == "local":
        return came + cost, f"{where} ({memory}); {sizes}", c.step.limit
    learner = words_of(config.learn.parallel)
    if c.placement == "separated":
        engines = f"rollout {config.cluster.rollouts} × {Grid.of(config.rollout)} ({c.rollout_bytes / 1e9:.3g} GB)"
        return came + cost, f"{where}; learner {learner} ({memory}); {engines}; {sizes}", c.step.limit
    return (
        came + cost,
        f"{where}; learner {learner}, rollout {Grid.of(config.rollout)} ({memory}); {sizes}",
        c.step.limit,
    )


def plain(c: Candidate, peak: float) -> dict[str, Any]:
    config = c.config
    return {
        "placement": c.placement,
        "schedule": config.flow.schedule,
        "learner": words_of(config.learn.parallel),
        "rollouts": config.cluster.rollouts if c.placement == "separated" else 0,
        "rollout_tp": config.rollout.tp,
        "rollout_dp": config.rollout.dp,
        "rollout_pp": config.rollout.pp,
        "tokens_per_microbatch": config.train.tokens_per_microbatch,
        "recompute": config.learn.recompute,
        "concurrent": config.rollout.concurrent,
        "cache_tokens": cache_tokens(config),
        "step_s": c.step.seconds,
        "parts_s": c.step.parts,
        "tokens_per_s": c.step.tokens_per_s,
        "mfu": c.step.mfu(peak),
        "devices": c.step.devices,
        "learner_gb": c.learner_bytes / 1e9,
        "rollout_gb": c.rollout_bytes / 1e9,
        "hours": c.hours,
        "dollars": c.dollars,
        "kwh": c.kwh,
        "limit": c.step.limit,
        "why": list(c.why),
    }


def found_plain(found: Found, model: TimeModel, said: str) -> dict[str, Any]:
    peak = model.machines.sheet.flops
    return {
        "devices": model.machines.devices,
        "device": model.machines.sheet.name,
        "rests_on": said,
        "looked_at": found.looked_at,
        "too_large": found.too_large,
        "best": [plain(c, peak) for c in found.best],
        "as_written": None if found.as_written is None else plain(found.as_written, peak),
    }
