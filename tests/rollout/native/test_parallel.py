"""Tensor-parallel ranks make the tokens that one rank makes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.rollout.tiny import roll, tiny_model

from tidemill.errors import ModelError
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.parallel import check_divides

Samples = dict[tuple[int, int], tuple[list[int], list[float]]]


def samples(model: Any, group: Any = None) -> Samples:
    rng = np.random.default_rng(2)
    asked = [
        Request(i, rng.integers(3, 96, 2 + 5 * i).tolist(), Sampling(temperature=0.4 * i, max_tokens=14), n=2)
        for i in range(4)
    ]
    engine = NativeEngine(
        model, eos_ids=[2], max_seqs=5, max_len=64, page_size=4, cache_tokens=128, step_tokens=16, kernels=False,
        group=group,
    )  # fmt: skip
    return {key: (c.tokens, c.logprobs) for key, c in roll(engine, asked).items()}


def even_model(name: str) -> Any:
    """With a vocabulary that two ranks can share."""
    model = tiny_model(name)
    model.resize_token_embeddings(96)
    return model


def _rank(rank: int, file: Path, name: str, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        sender.send(samples(even_model(name), dist.group.WORLD))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_two_ranks_make_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # what is imported is not imported again
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, tmp_path / "meet", name, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    made = [receiver.recv() if receiver.poll(120) else None for receiver, _ in pipes]
    for process in ranks:
        process.join(10)
    alone = samples(even_model(name))
    assert made[0] == made[1] and made[0] is not None
    for key, (tokens, logprobs) in alone.items():
        assert made[0][key][0] == tokens
        np.testing.assert_allclose(made[0][key][1], logprobs, atol=1e-4)
    assert sum(len(tokens) for tokens, _ in alone.values()) > 60


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="key/value heads of 2"):
        check_divides(SimpleNamespace(num_key_value_heads=2, intermediate_size=64, vocab_size=96), 4)
