"""Random cases for the oracles, and their form as the batches that src/ speaks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.algorithms.api import Algorithm, TokenBatch
from tidemill.algorithms.shared.aggregate import local_weights, whole
from tidemill.batch import Batch, Column
from tidemill.recipe.config import Config

LONGEST = 12
JAGGED = ("old", "ref", "teacher", "rollout", "values")
COLUMN = {
    "old": "old_logprobs",
    "ref": "ref_logprobs",
    "teacher": "teacher_logprobs",
    "rollout": "logprobs",
    "values": "values",
}
Sample = dict[str, Any]


def random_samples(seed: int, groups: int = 4, pairs: bool = False, masked: bool = True) -> list[Sample]:
    """Groups of unequal size (one of them alone), responses of unequal length, tokens the model did not make."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for group in range(groups):
        for member in range(2 if pairs else (1 if group == 0 else rng.randint(2, 5))):
            length = rng.randint(1, LONGEST)
            mask = [int(not masked or rng.random() < 0.85) for _ in range(length)]
            mask[rng.randrange(length)] = 1
            old = [f32(rng.uniform(-4, -0.01)) for _ in mask]
            sample = {
                "id": 100 * group + member,
                "group": 7 * group + 3,
                "reward": f32(rng.choice([0.0, 1.0, 1.0, rng.uniform(-1, 1)])),
                "correct": rng.random() < 0.5,
                "greedy": int(member == 0),
                "chosen": float(member == 0),
                "mismatched": float(member >= 3),
                "finish": rng.choice([0, 1]),
                "mask": mask,
                "old": old,
                "rollout": [f32(o + rng.gauss(0, 0.2)) for o in old],
                "ref": [f32(o + rng.gauss(0, 0.4)) for o in old],
                "teacher": [f32(o + rng.gauss(0, 0.4)) for o in old],
                "values": [f32(rng.uniform(-1, 1)) for _ in mask],
                "new": [leaf(o + rng.gauss(0, 0.3)) for o in old],
                "new_values": [leaf(rng.uniform(-1, 1)) for _ in mask],
                "entropy": [leaf(rng.uniform(0.1, 2)) for _ in mask],
            }
            samples.append(sample)
    return samples


def f32(value: float) -> float:
    """Columns are float32: the oracle sees the same numbers."""
    return float(np.float32(value))


def leaf(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def batch_of(samples: list[Sample]) -> Batch:
    columns: dict[str, Any] = {COLUMN[n]: Column.jagged([s[n] for s in samples], np.float32) for n in JAGGED}
    columns["mask"] = Column.jagged([s["mask"] for s in samples], np.uint8)
    for name, dtype in (("id", np.int64), ("group", np.int64), ("reward", np.float32), ("correct", np.uint8)):
        columns[name] = np.array([s[name] for s in samples], dtype)
    for name, dtype in (("greedy", np.uint8), ("finish", np.int8), ("chosen", np.float32), ("mismatched", np.float32)):
        columns[name] = np.array([s[name] for s in samples], dtype)
    return Batch(columns)


def tokens_of(samples: list[Sample], batch: Batch, config: Config, divisor: float | None = None) -> TokenBatch:
    """In float64, weights already divided by the whole, so that the loss is the mean itself."""

    def flat(values: list[Any]) -> Tensor:
        return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values])

    def column(name: str) -> Tensor:
        c = batch[name]
        values = torch.from_numpy(c.values.astype(np.float64))
        return values if c.offsets is not None else values[row]

    row = torch.tensor([i for i, s in enumerate(samples) for _ in s["mask"]])
    local = torch.from_numpy(local_weights(batch, config).astype(np.float64))[row]
    mask = column("mask")
    is_double = torch.float64
    exact = exact_weights(samples, batch, config)
    assert torch.allclose(exact, local, rtol=1e-6, atol=0)
    return TokenBatch(
        logprobs=flat([v for s in samples for v in s["new"]]),
        old_logprobs=column("old_logprobs"),
        advantages=column("advantages") if "advantages" in batch else torch.zeros(len(row), dtype=is_double),
        weights=exact * mask / (whole(batch, config) if divisor is None else divisor),
        mask=mask,
        row=row,
        rows=len(samples),
        entropy=flat([v for s in samples for v in s["entropy"]]),
        ref_logprobs=column("ref_logprobs"),
        rollout_logprobs=column("logprobs"),
        values=flat([v for s in samples for v in s["new_values"]]),
        group=torch.tensor([s["group"] for s in samples]),
        columns={n: column(n) for n in ("chosen", "values", "returns", "held_back") if n in batch},
    )


def exact_weights(samples: list[Sample], batch: Batch, config: Config) -> Tensor:
    """`local_weights` is float32; the same in float64, to compare to more digits than it holds."""
    a, out = config.algorithm, []
    for s in samples:
        made = max(1, sum(s["mask"]))
        of_group = sum(max(1, sum(m["mask"])) for m in samples if m["group"] == s["group"])
        weight = {
            "token_mean": 1.0,
            "sample_mean": 1 / made,
            "group_mean": 1 / of_group,
            "constant": 1 / (a.constant_length or LONGEST),
        }[a.aggregation]
        out += [weight] * len(s["mask"])
    return torch.tensor(out, dtype=torch.float64)


def prepared(algorithm: Algorithm, samples: list[Sample], config: Config) -> tuple[list[Sample], Batch]:
    """Through the stage `advantage`: its columns written, the rows it drops gone."""
    batch = batch_of(samples)
    kept = np.flatnonzero(algorithm.keep(batch, config))
    return [samples[i] for i in kept], batch.merge(algorithm.advantages(batch, config)).gather(kept)


def config_of(name: str, **settings: Any) -> Config:
    return Config(algorithm={"name": name, **settings}, rollout={"max_new_tokens": LONGEST})
