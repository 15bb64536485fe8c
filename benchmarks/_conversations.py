"""What programs' conversations come to: sampled tokens against learned ones, recorded log-probs against the learner's.

The models have random weights and byte-level vocabularies that merge across marks, so most answers would be tokenised
otherwise a second time. What the engine gave is kept apart from what the gateway recorded.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.batch import GROUP, ID
from tidemill.environment.api import Task
from tidemill.flow.stages.rolling import rollout_columns
from tidemill.learn.engine import score
from tidemill.models.load import LoadedModel, open_folder
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.serve.make import close_engine, make_engine

FAMILIES = ("qwen", "llama", "mistral", "gemma")
LIMIT_S = 3600.0


@dataclass
class Counted:
    """Sums over conversations."""

    conversations: int = 0
    calls: int = 0
    tool_calls: int = 0
    trajectories: int = 0
    sampled_tokens: int = 0
    token_differences: int = 0
    retokenised_answers: int = 0  # answers whose text has other tokens: what a client that sends text would learn
    largest_logprob_gap: float = 0.0
    errors: list[str] = field(default_factory=list)


def measure(conversations: int, clients: int) -> dict[str, Any]:
    """Play conversations of several families of models, and compare."""
    counted = Counted()
    share = conversations // len(FAMILIES)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory(prefix="tidemill-talk-") as folder:
            loaded, config = opened(Path(folder), family, clients)
            done, sampled = play(loaded, config, share)
            count(counted, done, sampled, loaded, config)
    return {
        "conversations": counted.conversations,
        "calls": counted.calls,
        "tool_calls": counted.tool_calls,
        "trajectories": counted.trajectories,
        "sampled_tokens": counted.sampled_tokens,
        "retokenised_answers": counted.retokenised_answers / max(counted.calls, 1),
        "token_differences": counted.token_differences,
        "largest_logprob_gap": counted.largest_logprob_gap,
        "failed_conversations": len(counted.errors),
        "failures": counted.errors[:3],
    }


def same_alone(conversations: int, clients: int) -> dict[str, Any]:
    """The share of conversations that have the same tokens with one client at a time and with many."""
    found = []
    for at_once in (1, clients):
        with tempfile.TemporaryDirectory(prefix="tidemill-talk-") as folder:
            loaded, config = opened(Path(folder), "qwen", at_once)
            done, _ = play(loaded, config, conversations)
        found.append({c.request.id: (list(c.request.prompt), c.tokens) for c in done})
    alone, together = found
    return {"same_conversations": sum(alone[i] == together[i] for i in alone) / len(alone)}


def opened(folder: Path, family: str, clients: int) -> tuple[LoadedModel, Config]:
    from tests.serve.made import model_folder

    place = model_folder(folder / family, family)
    config = Config.model_validate(
        {
            "model": {"path": str(place)},
            "environment": {
                "program": "benchmarks._talker:talk",
                "args": {"family": family},
                "workers": clients,
                "timeout_s": 600,
                "max_trajectories": 64,
                "on_error": "end",
            },
            "rewards": "environment",
            "data": {"source": "multiplication", "max_prompt_tokens": 400},
            "rollout": {"max_new_tokens": 600, "concurrent": 64, "batch_invariant": True},
        }
    )
    return open_folder(place, config.model, torch.device("cpu")), config


def play(loaded: LoadedModel, config: Config, conversations: int) -> tuple[list[Completion], list[Completion]]:
    engine = make_engine(loaded, config)
    sampled, inner = list[Completion](), engine.inner  # type: ignore[attr-defined]
    step = inner.step

    def kept() -> list[Completion]:
        made: list[Completion] = step()
        sampled.extend(made)
        return made

    inner.step = kept
    try:
        for i in range(conversations):
            prompt = loaded.tokenizer.encode(f"what is {i}?")
            engine.submit(Request(i, prompt, Sampling(max_tokens=600, seed=5), task=Task()))
        done, deadline = list[Completion](), time.monotonic() + LIMIT_S
        while engine.has_work:
            done += engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(done)} of {conversations} conversations were done in {LIMIT_S:g} s")
    finally:
        close_engine(engine)
    return done, sampled


def count(
    counted: Counted, done: list[Completion], sampled: list[Completion], loaded: LoadedModel, config: Config
) -> None:
    learned = Counter(answer for completion in done for answer in answers(completion))
    made = Counter(tuple(c.tokens) for c in sampled)
    counted.token_differences += sum(len(tokens) * n for tokens, n in ((learned - made) + (made - learned)).items())
    counted.conversations += len(done)
    counted.calls += len(sampled)
    counted.sampled_tokens += sum(len(c.tokens) for c in sampled)
    encode, decode = loaded.tokenizer.encode, loaded.tokenizer.decode
    for completion in sampled:
        text = decode(completion.tokens, skip_special_tokens=False)
        counted.retokenised_answers += encode(text, add_special_tokens=False) != completion.tokens
    for completion in done:
        assert completion.played is not None and completion.mask is not None
        counted.trajectories += int(completion.played.parts["trajectories"])
        counted.tool_calls += int(completion.played.parts.get("tool_calls", 0))
        if completion.played.error is not None:
            counted.errors.append(completion.played.error)
    for part in [done[i : i + 32] for i in range(0, len(done), 32)]:
        own = {GROUP: np.array([c.request.id for c in part]), ID: np.arange(len(part))}
        found = score(loaded.model, rollout_columns(part).merge(own), config).values
        mask = np.concatenate([c.mask for c in part if c.mask is not None]).astype(bool)
        recorded = np.concatenate([c.logprobs for c in part])
        gap = float(np.abs(found - recorded)[mask].max(initial=0.0))
        counted.largest_logprob_gap = max(counted.largest_logprob_gap, gap)


def answers(completion: Completion) -> list[tuple[int, ...]]:
    """Each run of learned tokens, cut where an answer begins."""
    assert completion.mask is not None
    begins = {place for place, _ in completion.turn_rewards or ()}
    found: list[list[int]] = []
    for place, (token, is_learned) in enumerate(zip(completion.tokens, completion.mask)):
        if is_learned and (place in begins or not completion.mask[place - 1]):
            found.append([])
        if is_learned:
            found[-1].append(token)
    return [tuple(answer) for answer in found]
