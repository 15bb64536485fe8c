"""How long prompts and responses are: given, drawn from a distribution, or as a run made them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import ConfigError
from tidemill.recipe.config import Config

SIGMA = 0.6  # of the logarithm of a response's length, where nobody says
FULL = "full"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Samples by drawing from what was seen, or from a log-normal that is cut at the longest."""

    prompt: float
    response: float  # the mean wanted
    longest: int
    sigma: float = SIGMA  # 0: all alike
    seen: tuple[int, ...] = ()  # responses of a run
    prompts_seen: tuple[int, ...] = ()
    said: str = ""  # where they come from

    def draw(self, count: int, seed: int) -> np.ndarray:
        """Of `count` responses."""
        rng = np.random.default_rng(seed)
        if self.seen:
            return rng.choice(np.array(self.seen, np.int64), count)
        if self.sigma == 0 or self.response >= self.longest:
            return np.full(count, min(self.longest, max(1, round(self.response))), np.int64)
        made = rng.lognormal(self._mu(), self.sigma, count)
        return np.clip(made.round(), 1, self.longest).astype(np.int64)

    def _mu(self) -> float:
        """So that the mean, after cutting at the longest, is the one wanted."""
        grid = np.random.default_rng(0).standard_normal(4096)
        low, high = np.log(max(self.response, 1.0)) - 3, np.log(max(self.response, 1.0)) + 3
        for _ in range(40):
            middle = (low + high) / 2
            mean = np.clip(np.exp(middle + self.sigma * grid), 1, self.longest).mean()
            low, high = (middle, high) if mean < self.response else (low, middle)
        return float((low + high) / 2)

    def draw_prompts(self, count: int, seed: int) -> np.ndarray:
        if self.prompts_seen:
            rng = np.random.default_rng([seed, 1])
            return rng.choice(np.array(self.prompts_seen, np.int64), count)
        return np.full(count, max(1, round(self.prompt)), np.int64)


def of(config: Config, asked: str | None = None) -> Lengths:
    """`asked`: `full`, `MEAN`, `PROMPT,RESPONSE` in tokens, or the folder of a run; nothing: half of the longest."""
    longest = config.rollout.max_new_tokens
    prompt = 0.5 * config.data.max_prompt_tokens
    if asked is None:
        words = f"responses of {longest / 2:.0f} tokens on average (half of the longest; say --lengths to know better)"
        return Lengths(prompt, longest / 2, longest, said=words)
    if asked == FULL:
        return Lengths(config.data.max_prompt_tokens, longest, longest, 0.0, said="every sample as long as it may be")
    parts = asked.split(",")
    if all(re.fullmatch(r"\d+(\.\d+)?", part) for part in parts) and len(parts) <= 2:
        given = [float(part) for part in parts]
        return Lengths(given[0] if len(given) == 2 else prompt, given[-1], longest, said=f"given: {asked}")
    if not Path(asked).is_dir():
        raise ConfigError(
            f"--lengths {asked}: it is neither a run's folder nor lengths in tokens", "for example 300,800"
        )
    return of_run(Path(asked), config)


def of_run(folder: Path, config: Config) -> Lengths:
    """As a run's own samples are; where it kept none, as long as its metrics say on average."""
    longest = config.rollout.max_new_tokens
    seen = [len(line["tokens"]) for line in lines_of(folder / "samples.jsonl") if line.get("tokens")]
    metrics = lines_of(folder / "metrics.jsonl")
    means = [m["response_tokens"] for m in metrics if "response_tokens" in m]
    told = [m["prompt_tokens"] / max(1.0, m.get("samples", 0)) for m in metrics if m.get("samples")]
    prompt = float(np.mean(told)) if told else 0.5 * config.data.max_prompt_tokens
    if len(seen) >= 32:
        return Lengths(prompt, float(np.mean(seen)), longest, seen=tuple(seen), said=f"{len(seen)} samples of {folder}")
    if means:
        return Lengths(prompt, float(np.mean(means)), longest, said=f"metrics of {folder}")
    raise ConfigError(
        f"{folder} has no samples and no metrics to take lengths from", "give a run's folder, or tokens such as 300,800"
    )


def lines_of(file: Path) -> Sequence[dict[str, Any]]:
    if not file.exists():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # the last line of a run that was killed
    return found
