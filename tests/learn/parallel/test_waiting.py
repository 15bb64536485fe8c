"""Who is missing, and who is slow, is said by name."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from tests.learn.parallel.products import make_model, recipe, samples
from tidemill.algorithms.shared.registry import get
from tidemill.cluster.start.ranks import RankError, Ranks
from tidemill.learn.parallel.flight import CollectiveError

pytestmark = pytest.mark.slow


def learner_of(parallel: dict[str, int], timeout_s: float = 60.0):
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe({**parallel, "timeout_s": timeout_s}, {})
    return Learner(make_model("dense"), config, get("grpo"), 9, mesh.build(config.learn.parallel))


def stay_away(parallel: dict[str, int], timeout_s: float) -> None:
    learner = learner_of(parallel, timeout_s)
    learner.accumulate(samples(1))
    learner.update()
    if dist.get_rank() == 1:
        time.sleep(3 * timeout_s)
    learner.accumulate(samples(2))


@pytest.mark.parametrize(
    ("parallel", "words"), [({"fsdp": 2}, "all-gather of weights"), ({"tp": 2}, "reduce-scatter number")]
)
def test_a_time_out_names_the_rank_the_operation_and_the_shape(parallel: dict[str, int], words: str) -> None:
    timeout_s = 4.0
    made = Ranks(2, timeout_s=timeout_s, preload=["tests.learn.parallel.products"])
    with made as ranks, pytest.raises(CollectiveError) as error:
        ranks.call(stay_away, parallel, timeout_s, wait_s=60.0)
    told = error.value.message
    assert "rank 0 waited" in told and words in told
    assert "rank 1 is missing: it is busy outside of any collective since" in told
    assert "float32 (" in told  # the shape


def die(parallel: dict[str, int]) -> None:
    import os

    learner = learner_of(parallel)
    if dist.get_rank() == 1:
        os._exit(7)
    learner.accumulate(samples(2))


def test_a_dead_rank_is_named_at_once() -> None:
    with Ranks(2, timeout_s=60.0, preload=["tests.learn.parallel.products"]) as ranks:
        began = time.monotonic()
        # Its own end is seen by the parent; the other may be faster in telling that the connection was lost.
        with pytest.raises((RankError, CollectiveError), match="rank 1"):
            ranks.call(die, {"fsdp": 2})
        assert time.monotonic() - began < 30


def be_slow(parallel: dict[str, int], slow: int) -> dict[str, float]:
    learner = learner_of(parallel)
    if dist.get_rank() == slow:
        learner.model.get_decoder().layers[0].mlp.register_forward_hook(lambda *_: time.sleep(0.2))
    learner.accumulate(samples(1))
    found = learner.update()
    learner.close()
    return found


def test_a_slow_rank_is_named_in_the_metrics(ranks: Ranks) -> None:
    for slow in (0, 3):
        found = ranks.call(be_slow, {"fsdp": 4}, slow, on=4)
        assert all(one["slowest_rank"] == slow for one in found)
        assert found[0]["slowest_over_median"] > 1.5
