"""Speculation changes how many passes a sample takes, and nothing else: its tokens, its distribution, its pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.errors import ConfigError
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.kernels import compiled as kernels
from tidemill.rollout.native.speculate import MOST, Drafts, Speculator

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="drafts are decoded by the compiled kernels")


def make(model: Any, speculate: str, **options: Any) -> NativeEngine:
    settings = {"max_seqs": 8, "max_len": 160, "page_size": 16, "step_tokens": 64, **options}
    return NativeEngine(model, eos_ids=[2], speculate=speculate, **settings)


@pytest.mark.parametrize("lacks", [{"kernels": False}, {"cache_dtype": "fp8"}])
def test_drafts_that_nothing_here_decodes_are_refused_where_they_were_asked_for(lacks: dict[str, Any]) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ConfigError, match="speculate=on"):
        make(model, "on", **lacks)
    assert make(model, "auto", **lacks).speculator is None


def loops(count: int, **how: Any) -> list[Request]:
    """Prompts that repeat themselves, so that there is something to look up."""
    rng = np.random.default_rng(4)
    sampling = Sampling(**{"max_tokens": 90, "ignore_eos": True, **how})
    return [Request(i, np.tile(rng.integers(3, VOCAB, 3 + i), 4).tolist(), sampling, n=3) for i in range(count)]


def plain(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], Any]:
    return {key: (c.tokens, c.finish, c.versions) for key, c in done.items()}


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 0.05},
        {"temperature": 0.1, "top_p": 0.5},
        {"temperature": 0.05, "stop_tokens": (11, 12, 13)},
        {"temperature": 0.3, "repetition_penalty": 1.3},
        {"temperature": 0.05, "ignore_eos": False},
    ],
)
@pytest.mark.parametrize("cache_tokens", [None, 288])
def test_tokens_are_those_without_it(how: dict[str, Any], cache_tokens: int | None) -> None:
    """Also where the cache is so small that samples leave and come back."""
    model = tiny_model("qwen3")
    engine = make(model, "on", cache_tokens=cache_tokens)
    found = roll(engine, loops(4, **how))
    wanted = roll(make(model, "off", cache_tokens=cache_tokens), loops(4, **how))
    assert plain(found) == plain(wanted)
    for key, completion in wanted.items():
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)
        np.testing.assert_allclose(found[key].kept or [], completion.kept or [], atol=1e-4)
    assert engine.speculator is not None and (engine.speculator.kept > 40 or "repetition_penalty" in how)
    assert engine.pool.used == 0 and not engine.speculator._texts


def test_a_text_that_repeats_takes_a_fraction_of_the_passes() -> None:
    model = tiny_model("qwen3")
    how = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    passes = {}
    for when in ("on", "auto", "off"):
        engine = make(model, when, max_seqs=1)  # the second and third sample repeat the first
        engine.submit(Request(0, [5, 6, 7, 8], how, n=3))
        passes[when] = 0
        while engine.has_work:
            engine.step()
            passes[when] += 1
    assert passes["on"] <= passes["auto"] < 0.6 * passes["off"]


def test_auto_gives_up_on_text_that_does_not_repeat() -> None:
    engine = make(tiny_model("qwen3"), "auto", max_seqs=64, max_len=120)
    rng = np.random.default_rng(0)
    how = Sampling(temperature=2.0, max_tokens=100, ignore_eos=True)
    done = roll(engine, [Request(i, rng.integers(3, VOCAB, 8).tolist(), how) for i in range(64)])
    made = sum(len(c.tokens) for c in done.values())
    assert engine.speculator is not None and engine.speculator.drafted < 0.05 * made


def test_the_distribution_is_the_models_own() -> None:
    """Pairs of tokens after a prompt that suggests a certain pair, against the probabilities worked out from the model:
    chi-square over many seeds."""
    model, count, temperature = tiny_model("qwen3"), 4000, 0.7
    prompt = np.tile([5, 6, 7, 8, 9], 6).tolist()
    engine = make(model, "on", max_seqs=64, max_len=64)
    how = [Sampling(temperature=temperature, max_tokens=3, ignore_eos=True, seed=seed) for seed in range(4)]
    done = roll(engine, [Request(i, prompt, s, n=count // 4) for i, s in enumerate(how)])
    assert engine.speculator is not None and engine.speculator.drafted > 500
    pairs = np.array([c.tokens[1:] for c in done.values()])

    def chances(context: list[int]) -> np.ndarray:
        from tidemill.rollout.hf import _plain

        with torch.no_grad(), _plain(model):
            logits = model(torch.tensor([context]), use_cache=False).logits[0, -1]
        return (logits / temperature).double().softmax(-1).numpy()

    firsts = [c.tokens[0] for c in done.values()]
    top = np.bincount(firsts).argsort()[-3:]  # given the first token, the other two
    for first in top:
        mine = pairs[np.array(firsts) == first]
        one = chances([*prompt, int(first)])
        expected, seen = [], []
        for token in np.argsort(one)[-6:]:
            two = chances([*prompt, int(first), int(token)])
            for after in np.argsort(two)[-4:]:
                expected.append(one[token] * two[after] * len(mine))
                seen.append(int(((mine[:, 0] == token) & (mine[:, 1] == after)).sum()))
        expected.append(len(mine) - sum(expected))
        seen.append(len(mine) - sum(seen))
        big = np.array(expected) >= 5
        e = np.append(np.array(expected)[big], np.array(expected)[~big].sum() + 1e-9)
        s = np.append(np.array(seen)[big], np.array(seen)[~big].sum())
        statistic, freedom = float(((s - e) ** 2 / np.maximum(e, 1)).sum()), len(e) - 1
        assert statistic < freedom + 4 * np.sqrt(2 * freedom), (first, statistic, freedom)


def test_samples_look_up_what_others_of_their_group_made() -> None:
    model = tiny_model("qwen3")
    engine = make(model, "on", max_seqs=1)  # one after another
    prompt = np.random.default_rng(1).integers(3, VOCAB, 5).tolist()
    done = roll(engine, [Request(0, prompt, Sampling(temperature=0.0, max_tokens=30, ignore_eos=True), n=3)])
    assert engine.speculator is not None and engine.speculator.kept > 30
    assert done[0, 0].tokens == done[0, 1].tokens == done[0, 2].tokens


def test_drafts_are_judged_up_to_the_first_wrong_token() -> None:
    tokens = np.zeros((3, MOST), np.int64)
    tokens[0, :3], tokens[2, :2] = [4, 5, 6], [7, 8]
    drafts = Drafts(np.array([3, 0, 2]), tokens)
    wide, ids, ahead = drafts.spread(np.array([10, 11, 12]), np.array([1, 2, 3]))
    assert wide.tolist() == [10] * 4 + [11] + [12] * 3 and ids.tolist() == [1, 4, 5, 6, 2, 3, 7, 8]
    assert ahead.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert drafts.accepted(np.array([4, 5, 9, 9, 1, 7, 8, 1])).tolist() == [2, 0, 2]


def test_paused_and_cancelled_work_leaves_nothing_behind() -> None:
    model = tiny_model("qwen3")
    engine = make(model, "on")
    for request in loops(3, temperature=0.0):
        engine.submit(request)
    for _ in range(6):
        engine.step()
    engine.cancel(0)
    partials = engine.pause()
    engine.load(None, 1)
    engine.resume(partials)
    done = roll(engine, [])
    wanted = roll(make(model, "off"), loops(3, temperature=0.0))
    assert all(done[key].tokens == c.tokens for key, c in wanted.items() if key[0] != 0)
    assert isinstance(engine.speculator, Speculator) and not engine.speculator._texts and engine.pool.used == 0


@pytest.mark.parametrize("when", ["auto", "on"])
def test_texts_are_forgotten_also_where_siblings_ended_before_anything_was_drafted(when: str) -> None:
    engine = make(tiny_model("qwen3"), when)
    rng = np.random.default_rng(0)
    for i in range(20):
        prompt = rng.integers(3, VOCAB, 6).tolist()
        engine.submit(Request(i, prompt, Sampling(ignore_eos=True), n=3, limits=(1, 12, 20)))
    for _ in range(16):
        engine.step()
    engine.resume(engine.pause())  # with some of the samples over
    roll(engine, [])
    assert engine.speculator is not None and not engine.speculator._texts
