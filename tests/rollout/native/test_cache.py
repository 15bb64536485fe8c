"""Pages: shared inside a group, found again by content, never leaked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.pages.cache import PagePool


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("qwen2")


def test_samples_of_a_group_share_the_pages_of_their_prompt(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[], max_seqs=8, max_len=64, page_size=4)
    engine.submit(Request(0, list(range(3, 25)), Sampling(max_tokens=2), n=8))
    engine.step()
    # 22 tokens: five full pages held once by all, and one partly filled page each.
    assert engine.pool.used == 5 + 8
    roll(engine, [])
    assert engine.pool.used == 0


def test_a_conversation_goes_on_without_reading_its_past_again(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=96, page_size=4, reuse_prefix=True)
    fresh = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=96, page_size=4)
    how = Sampling(max_tokens=9)
    first = roll(engine, [Request(0, list(range(3, 20)), how)])[0, 0]
    turn = Request(1, [*range(3, 20), *first.tokens, 50, 51, 52], how, n=2)
    engine.submit(turn)
    readings = engine.scheduler.admit()
    assert readings[0].first == 24  # 17 + 9 - 1 tokens were cached, six full pages of them
    engine.scheduler.restart_reading()
    again = roll(engine, [])
    assert {k: c.tokens for k, c in again.items()} == {k: c.tokens for k, c in roll(fresh, [turn]).items()}


def test_new_weights_forget_what_was_remembered(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=96, page_size=4, reuse_prefix=True)
    roll(engine, [Request(0, list(range(3, 20)), Sampling(max_tokens=9))])
    assert engine.pool.index.idle
    engine.load(None, 1)
    assert not engine.pool.index.idle and len(engine.pool.free) == engine.pool.pages


def test_remembered_pages_give_way_to_running_sequences(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4, cache_tokens=80, reuse_prefix=True)
    rng = np.random.default_rng(0)
    for i in range(20):
        prompt = rng.integers(3, VOCAB, 21).tolist()
        assert roll(engine, [Request(i, prompt, Sampling(max_tokens=20))])[i, 0].finish == "length"
    assert engine.pool.used == 0
    assert engine.pool.available == engine.pool.pages


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_of_a_remembered_text_the_end_gives_way_first(model: torch.nn.Module, is_cut_short: bool) -> None:
    """Without its beginning no page of it could be found."""
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4, cache_tokens=64, reuse_prefix=True)
    how, text = Sampling(max_tokens=1), list(range(3, 44))
    roll(engine, [Request(0, text, how)])  # ten full pages of the sixteen stay
    if is_cut_short:  # found, and let go of before a token was made
        engine.submit(Request(1, text, how))
        engine.scheduler.admit()
        engine.cancel(1)
    roll(engine, [Request(2, list(range(50, 75)), how)])  # takes the six that are free, and one more
    engine.submit(Request(3, text, how))
    assert engine.scheduler.admit()[0].first == 36


def test_pages_are_found_only_by_their_whole_past() -> None:
    pool = PagePool(8, 2)
    tokens = np.arange(6)
    pages = [pool.take() for _ in range(3)]
    pool.index.remember(tokens, pages)
    assert pool.index.find(np.array([0, 1, 2, 3, 9, 9, 9])) == pages[:2]
    assert pool.index.find(np.array([7, 1, 2, 3, 4, 5, 6])) == []
    assert pool.index.find(np.array([0, 1])) == []  # the last token is always read


@pytest.mark.parametrize("way", ["ended", "paused", "kept"])
def test_pages_that_older_weights_began_are_not_found_by_others(way: str) -> None:
    """A sample may go on through a load with the keys it has; a new request with its prompt must be read anew."""
    model = tiny_model("qwen2")
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=96, page_size=4, reuse_prefix=True)
    how = Sampling(max_tokens=9, temperature=0.0)
    prompt = list(range(3, 25))
    engine.submit(Request(0, prompt, how))
    engine.step()
    kept = engine.pause(keep_cache=True) if way == "kept" else []
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter[torch.randperm(parameter.shape[0])])
    engine.load(None, 1)
    engine.resume(kept)
    if way == "paused":
        engine.pause()
    made = roll(engine, [])
    assert bool(made) == (way != "paused")
    got = roll(engine, [Request(1, prompt, how)])[1, 0]
    wanted = roll(HFEngine(model, eos_ids=[]), [Request(1, prompt, how)])[1, 0]
    assert got.tokens == wanted.tokens
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    engine.submit(Request(2, prompt, how))
    assert engine.scheduler.admit()[0].first == 20  # what the new weights wrote is found
    engine.pause()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_ten_thousand_requests_leak_nothing(kernels: bool) -> None:
    """Finished, cancelled and paused ones, under pressure for pages."""
    model = tiny_model("llama")
    engine = NativeEngine(
        model, eos_ids=[2, 3, 4, 5], max_seqs=64, max_len=48, page_size=16, cache_tokens=1024, kernels=kernels
    )
    rng = np.random.default_rng(0)
    count = 10_000 if kernels else 1_000
    ended = 0
    for i in range(0, count, 100):
        for j in range(i, i + 100):
            prompt = rng.integers(3, VOCAB, rng.integers(1, 24)).tolist()
            engine.submit(Request(j, prompt, Sampling(max_tokens=int(rng.integers(1, 20))), n=1 + j % 2))
        for _ in range(8):
            ended += len(engine.step())
        for j in rng.integers(max(0, i - 50), i + 100, 10).tolist():
            engine.cancel(j)
        if i % 500 == 0:
            engine.resume(engine.pause())
    while engine.has_work:
        ended += len(engine.step())
    assert ended == count * 3 // 2
    assert engine.pool.used == 0 and not engine.pool.holders.any()
    assert engine.pool.available == engine.pool.pages
    assert len(engine.scheduler.free_slots) == 64 and engine.scheduler.promised == 0
