"""Samples for tests of learners: prompts with several responses each, of differing lengths."""

from __future__ import annotations

import numpy as np

from tidemill.batch import Batch, Column


def grouped(
    rng: np.random.Generator,
    groups: int,
    each: int,
    *,
    longest: int = 12,
    words: int = 60,
    logprob: float = -4.0,
    spread: float = 1.0,
) -> Batch:
    """All that GRPO's loss reads. `logprob`: the mean of what rollout is said to have seen, with its `spread`."""
    tokens, prompts, group = [], [], []
    for g in range(groups):
        prompt = rng.integers(3, words, rng.integers(2, 9))
        for _ in range(each):
            tokens.append(np.concatenate([prompt, rng.integers(3, words, rng.integers(1, longest))]))
            prompts.append(len(prompt))
            group.append(g)
    responses = [len(t) - p for t, p in zip(tokens, prompts)]
    return Batch(
        {
            "id": np.arange(len(tokens)),
            "group": np.array(group),
            "tokens": Column.jagged(tokens, np.int32),
            "prompt_length": np.array(prompts, np.int32),
            "mask": Column.jagged([np.ones(n) for n in responses], np.uint8),
            "logprobs": Column.jagged([logprob + spread * rng.normal(size=n) for n in responses], np.float32),
            "advantages": rng.normal(size=len(tokens)).astype(np.float32),
        }
    )
