"""Tensor-parallel ranks make the tokens that one rank makes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.rollout.tiny import roll, tiny_model

from tidemill.errors import ModelError
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward.parallel import check_divides, cut, gathered, layout

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


def _rank(rank: int, file: Path, name: str, holds_share: bool, sender: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        model = tiny_model(name)
        whole = {n: p.detach().clone() for n, p in model.named_parameters()}
        if holds_share:
            cut(model, rank, 2)
            _check_share(model, whole, rank)
        sender.send(samples(model, dist.group.WORLD))
    finally:
        dist.destroy_process_group()


def _check_share(model: Any, whole: dict[str, torch.Tensor], rank: int) -> None:
    """A share is as its layout says, holds no more memory, and all shares make up the whole."""
    held = layout(model, (0, 1)).homes(rank)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {n: shape for n, (shape, _) in held.items()}
    alike = ("embed", "norm", ".gate.weight", "shared_expert_gate")  # what every rank has whole
    outside = sum(p.numel() for n, p in whole.items() if any(part in n for part in alike))
    own = sum(p.untyped_storage().nbytes() // 4 for p in model.parameters())
    assert own <= outside + 0.51 * (sum(p.numel() for p in whole.values()) - outside)
    found = gathered(model, dist.group.WORLD)
    assert found.keys() == (whole.keys() if rank == 0 else set())
    assert all(torch.equal(tensor, whole[n]) for n, tensor in found.items())


@pytest.mark.parametrize("holds_share", [False, True], ids=["whole", "share"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3-moe-mixed", "qwen2-moe"])
def test_two_ranks_make_the_tokens_of_one(name: str, holds_share: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # what is imported is not imported again
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, tmp_path / "meet", name, holds_share, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    made = [receiver.recv() if receiver.poll(120) else None for receiver, _ in pipes]
    for process in ranks:
        process.join(10)
    alone = samples(tiny_model(name))
    assert made[0] == made[1] and made[0] is not None
    for key, (tokens, logprobs) in alone.items():
        assert made[0][key][0] == tokens
        np.testing.assert_allclose(made[0][key][1], logprobs, atol=1e-4)
    assert sum(len(tokens) for tokens, _ in alone.values()) > 60


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="key/value heads of 2"):
        check_divides(tiny_model("qwen2"), 4)
    three = tiny_model("qwen3-moe")
    three.config.num_key_value_heads = 6
    with pytest.raises(ModelError, match="number of experts of 4"):
        check_divides(three, 3)
