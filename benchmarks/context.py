"""One sequence over several ranks (context parallel): memory per rank against one rank with a share of the tokens, and
the numbers against one rank with all of them.

    tidemill bench context --json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

ABOUT = "one long sequence over ranks: peak memory per rank, tokens per second, equal to one rank"
OPTIONS: dict[str, Any] = {"tokens": 1024, "ranks": 8, "hidden": 128, "layers": 4, "forms": ["ulysses", "ring"]}
VOCABULARY = 512
HEADS, KEY_HEADS = 8, 4


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    """`tokens` is what one rank can hold; the ranks get a sequence that many times longer."""
    from tidemill.cluster.start.ranks import Ranks

    count, short = int(options["ranks"]), int(options["tokens"])
    shape = (int(options["hidden"]), int(options["layers"]))
    long, repeats = short * count, int(options["repeats"])
    result: dict[str, Any] = {"tokens_one_rank": short, "tokens": long}
    with Ranks(count, preload=["benchmarks.context", "benchmarks._traffic"]) as ranks:
        held = ranks.call(measure, {}, short, *shape, repeats, on=1)[0]
        alone = ranks.call(measure, {}, long, *shape, repeats, on=1)[0]
        result |= {"one_rank_share": _figures([held]), "one_rank_all": _figures([alone])}
        for form in options["forms"]:
            found = ranks.call(measure, {"cp": count, "cp_form": form}, long, *shape, repeats, on=count)
            result[form] = _figures(found) | {
                "activations_over_one_rank_share": max(f["activation_bytes"] for f in found) / held["activation_bytes"],
                "activations_over_one_rank_all": max(f["activation_bytes"] for f in found) / alone["activation_bytes"],
                "logprobs_differ": _farthest(found, alone, "before"),
                "logprobs_differ_after_update": _farthest(found, alone, "after"),
                "sent_over_textbook": max(f["sent_bytes"] for f in found) / textbook(form, count, long, *shape),
                "loss_differs": abs(found[0]["loss"] - alone["loss"]),
                "grad_norm_differs": abs(found[0]["grad_norm"] / alone["grad_norm"] - 1),
            }
    return result


def textbook(form: str, ranks: int, tokens: int, hidden: int, layers: int) -> float:
    """Bytes that a rank must send in an update, float32: those of attention, and of weights that lie in pieces."""
    from benchmarks._sent import sent
    from tidemill.models.shape import shape_of

    config = recipe({"cp": ranks, "cp_form": form}, hidden, layers, tokens)
    shape = shape_of(config.model)
    assert shape is not None
    head = 4 * hidden // HEADS  # bytes
    if form == "ulysses":  # tokens for heads and back, forward and backward; a key head for each rank at least
        exchanged = 2 * tokens / ranks * (ranks - 1) / ranks * 2 * (HEADS + max(KEY_HEADS, ranks)) * head
    else:  # keys and values go round twice, their gradients once and home
        exchanged = (2 * (ranks - 1) + ranks) * tokens / ranks * 2 * KEY_HEADS * head
    return sent(config, shape, tokens).total + layers * exchanged


def _figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "activation_bytes": max(f["activation_bytes"] for f in found),
        "peak_bytes": max(f["peak_bytes"] for f in found),
        "sent_bytes_per_rank": max(f["sent_bytes"] for f in found),
        "seconds": statistics.median(f["seconds"] for f in found),
    }


def _farthest(found: list[dict[str, Any]], alone: dict[str, Any], name: str) -> float:
    return float(abs(found[0][name] - alone[name]).max())


# On the ranks


def measure(parallel: Mapping[str, Any], tokens: int, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    from benchmarks._traffic import Peak, Traffic
    from tidemill.learn.build import learner as make

    learner = make(recipe(parallel, hidden, layers, tokens), 100)
    batch = sample(tokens)
    before = learner.logprobs(batch).values
    learner.accumulate(batch)
    metrics = learner.update()
    after = learner.logprobs(batch).values
    with Traffic() as traffic:
        _update(learner, batch)
    held = [*learner.tensors().values(), *(b for _, b in learner.model.named_buffers())]
    with Peak(held) as peak:
        at_rest = peak.now
        _update(learner, batch)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        _update(learner, batch)
        times.append(time.perf_counter() - began)
    learner.close()
    return {
        "before": before, "after": after, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"],
        "activation_bytes": peak.most - at_rest, "peak_bytes": peak.most, "sent_bytes": traffic.total,
        "seconds": statistics.median(times),
    }  # fmt: skip


def _update(learner: Any, batch: Any) -> None:
    learner.accumulate(batch)
    learner.update()


def recipe(parallel: Mapping[str, Any], hidden: int, layers: int, tokens: int) -> Any:
    from tidemill.recipe.config import Config

    letters = "".join(chr(0x4E00 + i) for i in range(VOCABULARY - 3))
    tiny = {
        "hidden": hidden, "layers": layers, "heads": HEADS, "kv_heads": KEY_HEADS, "intermediate": 3 * hidden,
        "window": 2 * tokens, "alphabet": letters, "architecture": "llama",
    }  # fmt: skip
    return Config.model_validate(
        {
            "model": {"tiny": tiny},
            "algorithm": "grpo",
            "train": {"tokens_per_microbatch": 2 * tokens},
            "learn": {"lr": 1e-4, "parallel": dict(parallel), "logprob_chunk": 256},
        }
    )


def sample(tokens: int) -> Any:
    """One sequence: a prompt of 32 tokens, and a response that fills the rest."""
    import numpy as np

    from tidemill.batch import Batch, Column

    rng = np.random.default_rng(0)
    length, prompt = tokens + 1, 32  # the last token is only predicted
    return Batch(
        {
            "id": np.zeros(1, np.int64),
            "group": np.zeros(1, np.int64),
            "tokens": Column.jagged([rng.integers(3, VOCABULARY, length)], np.int32),
            "prompt_length": np.array([prompt], np.int32),
            "mask": Column.jagged([np.ones(length - prompt)], np.uint8),
            "logprobs": Column.jagged([np.full(length - prompt, -6.2)], np.float32),
            "advantages": np.ones(1, np.float32),
        }
    )
