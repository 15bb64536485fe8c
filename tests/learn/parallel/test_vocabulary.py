"""Log-probabilities from ranks that each know some words equal those of one that knows them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tidemill.cluster.start.ranks import Ranks
from tidemill.learn.logprob.tokens import token_logprobs

WORDS, WIDTH, TOKENS = 13, 6, 10  # of 13 words, four ranks have 4, 4, 4 and 1


def inputs() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden, head, bias, weights = (
        torch.randn(*s, generator=draw) for s in ((TOKENS, WIDTH), (WORDS, WIDTH), (WORDS,), (2, TOKENS))
    )
    return hidden, head, bias, weights, torch.randint(0, WORDS, (TOKENS,), generator=draw)


def scored(parts: tuple[torch.Tensor, ...], score: Any) -> list[torch.Tensor]:
    """Both outputs and the gradients of hidden states, head and bias, under a mixed loss."""
    hidden, head, bias, weights, targets = parts
    leaves = [t.clone().requires_grad_(True) for t in (hidden, head, bias)]
    logprobs, entropy = score(leaves[0], leaves[1], targets, leaves[2])
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    return [logprobs.detach(), entropy.detach(), *(t.grad for t in leaves)]


def by_words(softcap: float | None, temperature: float, chunk: int) -> list[Any]:
    from tidemill.learn.logprob.vocabulary import vocabulary_logprobs
    from tidemill.learn.parallel.collectives import world
    from tidemill.learn.parallel.flight import Flight
    from tidemill.reshard.layouts.layout import Shard

    flight = Flight(dist.distributed_c10d._get_default_store(), dist.get_rank(), 60.0)
    over = world(flight)
    low, high = Shard(0).cut(0, WORDS, over.rank, over.size)
    hidden, head, bias, weights, targets = inputs()
    own = (hidden, head[low:high], bias[low:high], weights, targets)
    found = scored(
        own,
        lambda h, w, t, b: vocabulary_logprobs(
            h, w, t, low, over, temperature=temperature, softcap=softcap, bias=b, chunk=chunk
        ),
    )
    found[2] = over.all_reduce(found[2])  # whoever gathered the hidden states adds their gradients up
    flight.close()
    return [t.numpy() for t in found]


@pytest.mark.slow
@pytest.mark.parametrize(("softcap", "temperature", "chunk"), [(None, 1.0, 100), (5.0, 0.7, 3)])
def test_ranks_that_share_the_words_score_as_one(
    softcap: float | None, temperature: float, chunk: int, ranks: Ranks
) -> None:
    wanted = scored(
        inputs(),
        lambda h, w, t, b: token_logprobs(h, w, t, temperature=temperature, softcap=softcap, bias=b, chunk=chunk),
    )
    answers = ranks.call(by_words, softcap, temperature, chunk, on=4)
    told = [[torch.from_numpy(a) for a in answer] for answer in answers]
    for found in told:
        for ours, theirs in zip(found[:3], wanted[:3]):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for i in (3, 4):  # head and bias: each rank has the gradient of its words
        torch.testing.assert_close(torch.cat([found[i] for found in told]), wanted[i], atol=1e-5, rtol=1e-5)
