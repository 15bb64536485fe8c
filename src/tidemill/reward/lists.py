"""Rewards in TRL's form: `def reward(completions, prompts=…, **columns) -> list[float]`, over all samples at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.reward.api import Sample, batched

ANSWERS = ("answer", "solution", "ground_truth", "target", "label")  # names that such functions have for the answer


def takes_lists(function: Callable[..., Any]) -> bool:
    """Whether a function takes lists of completions instead of one sample."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def over_samples(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a reward of ours. A None among its rewards (not for this sample) counts as 0."""

    @batched
    def reward(samples: Sequence[Sample], as_messages: bool = False, **args: Any) -> list[float]:
        columns = _columns(function, samples, as_messages) | args
        found = function(**columns)
        return [0.0 if value is None else float(value) for value in found]

    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def _columns(function: Callable[..., Any], samples: Sequence[Sample], as_messages: bool) -> dict[str, Any]:
    """What its signature names, or everything where it takes any keyword."""
    responses: list[Any] = [sample.response for sample in samples]
    prompts: list[Any] = [sample.prompt for sample in samples]
    if as_messages:
        responses = [[{"role": "assistant", "content": text}] for text in responses]
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    names = dict.fromkeys(name for sample in samples for name in sample.meta)
    found: dict[str, Any] = {name: [sample.meta.get(name) for sample in samples] for name in names}
    answers = [sample.answer for sample in samples]
    found = dict.fromkeys(ANSWERS, answers) | found | {"prompts": prompts, "completions": responses}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return found
    return {name: value for name, value in found.items() if name in parameters}
