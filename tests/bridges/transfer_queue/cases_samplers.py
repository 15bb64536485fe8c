"""Cases of the samplers, called as a controller calls them."""

from __future__ import annotations

import random
from typing import Any

from tests.bridges.transfer_queue.cases import case, outcome

AT = {"task_name": "t", "partition_id": "p"}


class Lengths:
    """The part of a partition that the balancing sampler asks for."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self._lengths = lengths

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, int]]:
        return {i: {"total_lengths": self._lengths[i]} for i in indexes if i in self._lengths}


@case("none")
def base_sampler_is_abstract(tq: Any, _: Any) -> Any:
    return [outcome(lambda: tq.BaseSampler()), issubclass(tq.GRPOGroupNSampler, tq.BaseSampler)]


@case("none")
def sequential_sampler_takes_the_first(tq: Any, _: Any) -> Any:
    sampler = tq.SequentialSampler()
    return [sampler([3, 5, 9], 2), sampler([3], 2), sampler([], 2), sampler.has_cached_result("p", "t", None)]


@case("none")
def group_sampler_takes_complete_groups(tq: Any, _: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=3)
    return [
        sampler([0, 1, 2, 4, 5, 6, 7], 3), sampler([1, 2, 5, 6, 7, 9, 10, 11], 6), sampler([0, 1, 3, 4], 3),
        sampler([8, 7, 6], 3), outcome(lambda: sampler([0, 1, 2], 4)),
        outcome(lambda: tq.GRPOGroupNSampler(n_samples_per_prompt=0)), tq.GRPOGroupNSampler()([4, 2], 2),
    ]  # fmt: skip


@case("none")
def group_sampler_answers_a_rank_again(tq: Any, _: Any) -> Any:
    sampler = tq.GRPOGroupNSampler(2)
    first = sampler([0, 1, 2, 3], 2, dp_rank=0, batch_index=0, **AT)
    again = sampler([2, 3], 2, dp_rank=0, batch_index=0, **AT)
    other = sampler([2, 3], 2, dp_rank=1, batch_index=0, **AT)
    has = [sampler.has_cached_result("p", "t", {"dp_rank": r, "batch_index": 0}) for r in (0, 1, 2)]
    state = sampler.save_checkpoint()
    sampler.clear_cache("p")
    cleared = sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    new = tq.GRPOGroupNSampler(2)
    new.load_checkpoint(state)
    return [first, again, other, has, cleared, sorted(state)]


@case("none")
def rank_sampler_answers_a_rank_again(tq: Any, _: Any) -> Any:
    sampler = tq.RankAwareSampler()
    ask = {**AT, "batch_index": 0}
    return [
        sampler([0, 1, 2], 2, dp_rank=0, **ask), sampler([2], 2, dp_rank=0, **ask),
        sampler([2, 3], 2, dp_rank=1, **ask),
        sampler([4], 2, dp_rank=2, **ask), outcome(lambda: sampler([4], 1, dp_rank=-1, **ask)),
        sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0}),
        sampler.has_cached_result("p", "t", {"batch_index": 0}), sampler.has_cached_result("p", "t"),
        outcome(lambda: sampler([1], 1)), sorted(sampler.save_checkpoint()),
    ]  # fmt: skip


@case("none")
def balanced_sampler_balances(tq: Any, _: Any) -> Any:
    """Equal answers for random lengths, also with ties, over groups and ranks."""
    draw, found = random.Random(1), []
    for trial in range(40):
        n, ranks, groups = draw.choice([1, 2, 4]), draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 5])
        batch = n * groups
        ready = sorted(draw.sample(range(400), 1) + list(range(500, 500 + batch * ranks)))[-batch * ranks :]
        most = draw.choice([3, 1000])
        lengths = Lengths({i: draw.randrange(1, most) for i in ready})
        sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=n, dp_size=ranks)
        ask = {**AT, "batch_index": trial, "partition": lengths}
        found.append([sampler(ready, batch, dp_rank=rank, **ask) for rank in range(ranks)])
    return found


@case("none")
def balanced_sampler_without_lengths_and_when_too_few_are_ready(tq: Any, _: Any) -> Any:
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    short = sampler([0, 1, 2], 2, dp_rank=0, batch_index=0, **AT)
    split = [sampler(list(range(8)), 4, dp_rank=rank, batch_index=1, **AT) for rank in (0, 1, 2)]
    unknown = [sampler(list(range(8)), 4, dp_rank=r, batch_index=2, partition=Lengths({}), **AT) for r in (0, 1)]
    has = sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 1})
    state = sorted(sampler.save_checkpoint())
    sampler.clear_cache("p")
    return [
        short, split, unknown, has, sampler.has_cached_result("p", "t", {"dp_rank": 1, "batch_index": 1}), state,
        outcome(lambda: tq.SeqlenBalancedSampler(dp_size=0)), outcome(lambda: tq.SeqlenBalancedSampler(0)),
        outcome(lambda: sampler(list(range(8)), 3, dp_rank=0, batch_index=3, **AT)),
    ]  # fmt: skip
