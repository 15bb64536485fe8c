"""A learner's memory over many updates, no two of them of one size: it must not grow.

tidemill bench soak_memory --steps 2000
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

ABOUT = "a learner's resident memory over many updates of differing sizes: the last tenth against the second"
OPTIONS: dict[str, Any] = {"steps": 2000, "unbounded": False}


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    import os

    import numpy as np
    import torch
    from tests.learn.grouped import grouped

    from tidemill.algorithms.shared.registry import get
    from tidemill.device import host
    from tidemill.learn.engine import Learner
    from tidemill.models.layers import fused
    from tidemill.models.load import make_tiny
    from tidemill.recipe.config import Config, TinyModel

    if options["unbounded"]:  # as it was: what torch and oneDNN keep by themselves
        os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    torch.set_num_threads(1)
    fused.is_mkl_slow = lambda: True  # type: ignore[assignment]  # on any processor: oneDNN is what keeps
    config = Config.model_validate({"algorithm": {"name": "grpo"}, "train": {"tokens_per_microbatch": 8192}})
    shape = TinyModel(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, window=256)
    model = make_tiny(shape, torch.float32, 0, torch.device("cpu")).model
    learner = Learner(model, config, get("grpo"), int(options["steps"]))
    draw, seen = np.random.default_rng(0), list[float]()
    for _ in range(int(options["steps"])):
        learner.accumulate(grouped(draw, groups=8, each=3, longest=120, words=16))
        learner.update()
        seen.append(host.memory().reserved / 1e6)
    tenth = math.ceil(len(seen) / 10)
    early, late = statistics.mean(seen[tenth : 2 * tenth]), statistics.mean(seen[-tenth:])
    return {
        "first_mb": seen[0], "second_tenth_mb": early, "last_tenth_mb": late, "growth": late / early - 1,
        "is_flat": late <= 1.02 * early, "steps": len(seen),
    }  # fmt: skip
