"""States beside the pages: groups copy them, pauses keep them, turns find them, and no slot leaves any to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks import _families_tiny as tiny
from tests.rollout.tiny import roll

from tidemill.errors import ConfigError, ModelError
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.batch.prefixes import StatePrefixes
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.pages.cache import PagePool
from tidemill.rollout.native.trial import try_rollout

GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.models("qwen3_5_text")[0]


def engine(model: Any, **how: Any) -> NativeEngine:
    return NativeEngine(model, eos_ids=[2], **{"max_seqs": 4, "max_len": 64, "page_size": 4, **how})


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, tiny.VOCAB, n).tolist() for n in lengths]


def alone(model: Any, prompt: list[int]) -> Completion:
    return roll(engine(model), [Request(0, prompt, GREEDY)])[0, 0]


def test_a_slot_leaves_nothing_to_its_next_tenant(model: Any) -> None:
    texts = prompts(0, [5, 9, 2, 7, 3, 11, 4, 6])
    made = roll(engine(model, max_seqs=2), [Request(i, text, GREEDY) for i, text in enumerate(texts)])
    for i, text in enumerate(texts):
        assert made[i, 0].tokens == alone(model, text).tokens


def test_sequences_that_had_to_leave_are_read_again(model: Any) -> None:
    texts = prompts(1, [10, 12, 9, 11])
    short = engine(model, cache_tokens=56)
    made = roll(short, [Request(i, text, GREEDY) for i, text in enumerate(texts)])
    assert short.scheduler.preemptions
    for i, text in enumerate(texts):
        assert made[i, 0].tokens == alone(model, text).tokens


def test_sleep_gives_the_states_memory_back(model: Any) -> None:
    one = engine(model)
    text = prompts(2, [8])[0]
    one.submit(Request(0, text, GREEDY, n=2))
    for _ in range(5):
        one.step()
    assert one.states is not None and one.states.nbytes
    one.sleep()
    assert one.states.nbytes == 0
    one.wake()
    made = roll(one, [])
    assert [made[0, i].tokens for i in range(2)] == [alone(model, text).tokens] * 2


def test_the_next_turn_reads_only_what_is_new(model: Any) -> None:
    one = engine(model, reuse_prefix=True)
    text = prompts(3, [9])[0]
    first = roll(one, [Request(0, text, GREEDY)])[0, 0]
    longer = [*text, *first.tokens, *prompts(4, [5])[0]]
    one.submit(Request(1, longer, GREEDY))
    readings = one.admit()
    assert [(r.first, r.last) for r in readings] == [(len(text) + len(first.tokens) - 1, len(longer))]
    one.scheduler.restart_reading()
    assert roll(one, [])[1, 0].tokens == alone(model, longer).tokens


def test_a_turn_that_says_something_else_shares_nothing(model: Any) -> None:
    one = engine(model, reuse_prefix=True)
    text = prompts(5, [12])[0]
    first = roll(one, [Request(0, text, GREEDY)])[0, 0]
    other = [*text[:-1], (text[-1] + 1) % tiny.VOCAB, *first.tokens]
    assert roll(one, [Request(1, other, GREEDY)])[1, 0].tokens == alone(model, other).tokens


def test_beginnings_are_forgotten_before_a_sequence_must_leave(model: Any) -> None:
    one = engine(model, reuse_prefix=True, cache_tokens=64)
    for turn in range(6):
        roll(one, [Request(turn, text, GREEDY) for text in prompts(10 + turn, [9])])
    text = prompts(20, [40])[0]
    assert roll(one, [Request(99, text, GREEDY)])[99, 0].tokens == alone(model, text).tokens
    assert not one.scheduler.preemptions


def test_pages_of_beginnings_are_all_given_back() -> None:
    rng = np.random.default_rng(0)
    pool = PagePool(40, 4)
    known = StatePrefixes(pool, most=3)
    for _ in range(200):
        tokens = rng.integers(0, 2, int(rng.integers(1, 14)))
        if rng.random() < 0.5 and pool.available > 4 + known.most:
            pages = [pool.take() for _ in range(-(-len(tokens) // 4))]
            pool.index.remember(tokens, pages)
            known.remember(tokens, pages, {})
            for page in reversed(pages):
                pool.drop(page)
        elif (found := known.find(tokens)) is not None:
            assert found.length < len(tokens)
            assert len(found.pages) == found.length // 4 and (found.tail is None) == (found.length % 4 == 0)
            for page in reversed(found.pages):
                pool.drop(page)
        assert len(known.entries) <= known.most
    known.forget_all()
    pool.index.forget_all()
    assert len(pool.free) == pool.pages and not pool.holders.any()


def test_new_weights_forget_beginnings(model: Any) -> None:
    one = engine(model, reuse_prefix=True)
    text = prompts(6, [9])[0]
    first = roll(one, [Request(0, text, GREEDY)])[0, 0]
    one.load(None, 1)
    one.submit(Request(1, [*text, *first.tokens, 5], GREEDY))
    assert one.admit()[0].first == 0


def test_drafts_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="layers with a state"):
        engine(model, speculate="on")


def test_a_model_that_keeps_something_unknown_between_tokens_is_refused() -> None:
    ours, _ = tiny.models("recurrent_gemma")
    ours.config._attn_implementation = "eager"
    with pytest.raises(ModelError, match="keeps something between tokens"):
        try_rollout(engine(ours))
