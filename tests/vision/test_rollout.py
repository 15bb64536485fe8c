"""The native engine looks as transformers does: greedy tokens of every family, however prompts are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.rollout.tiny import roll
from tests.vision.tiny import FAMILIES, prompt_of, tile_of, tiny_model
from tidemill.models.load import LoadedModel
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward.lean import LeanRunner

LEAN = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava")


def requests_of(loaded: LoadedModel, images: list[int], seed: int = 1, **how: Any) -> list[Request]:
    rng = np.random.default_rng(seed)
    made = []
    for i, count in enumerate(images):
        prompt, tiles = prompt_of(rng, loaded, count, 9)
        made.append(
            Request(i, prompt, Sampling(**{"temperature": 0, "max_tokens": 12} | how), n=1 + i % 2, tiles=tiles)
        )
    return made


def native(loaded: LoadedModel, **options: Any) -> NativeEngine:
    """Pages of 4 tokens and few tokens a step: shared pages, and prompts read in chunks beside running sequences."""
    settings: dict[str, Any] = {"eos_ids": [2], "max_seqs": 5, "max_len": 320, "page_size": 4, "step_tokens": 10}
    return NativeEngine(loaded.model, **{**settings, **options})


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers_own(name: str) -> None:
    loaded = tiny_model(name)
    requests = requests_of(loaded, [1, 0, 2, 3, 1])
    wanted = roll(HFEngine(loaded.model, eos_ids=[2], max_len=320), requests)
    engine = native(loaded)
    assert isinstance(engine.runner, LeanRunner) == (name in LEAN)
    made = roll(engine, requests)
    assert made.keys() == wanted.keys()
    for key, completion in made.items():
        assert completion.error is None, completion.error
        assert completion.tokens == wanted[key].tokens, key
        assert completion.finish == wanted[key].finish
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("keep_cache", [False, True])
def test_paused_samples_go_on_as_if_nothing_had_been(name: str, keep_cache: bool) -> None:
    loaded = tiny_model(name)
    requests = requests_of(loaded, [2, 1, 0], max_tokens=16)
    wanted = roll(native(loaded), requests)
    # With little room some are read again.
    engine = native(loaded, cache_tokens=None if keep_cache else 320, step_tokens=60)
    for request in requests:
        engine.submit(request)
    done = {}
    for i in range(200):
        for completion in engine.step():
            done[completion.request.id, completion.index] = completion
        if not engine.has_work:
            break
        if i % 7 == 6:
            engine.resume(engine.pause(keep_cache=keep_cache))
    assert {key: c.tokens for key, c in done.items()} == {key: c.tokens for key, c in wanted.items()}


def test_an_image_is_looked_at_once_for_each_version_of_the_weights() -> None:
    loaded = tiny_model("qwen3_vl")
    (request,) = requests_of(loaded, [2])
    engine = native(loaded)
    roll(engine, [replace(request, id=i, n=3) for i in range(3)])
    assert engine.looking.looks == 2
    engine.load(None, 1)
    roll(engine, [request])
    assert engine.looking.looks == 4
    frozen = native(loaded, keeps_features=True)
    roll(frozen, [request])
    frozen.load(None, 1)
    roll(frozen, [request])
    assert frozen.looking.looks == 2


def test_pages_of_the_same_words_about_another_image_are_not_taken_for_it() -> None:
    loaded = tiny_model("qwen2_5_vl")
    (request,) = requests_of(loaded, [1])
    other = tile_of(np.random.default_rng(5), loaded, request.tiles[0].at)
    other = replace(other, pixels=255 - request.tiles[0].pixels, tokens=request.tiles[0].tokens, _digest=[])
    engine = native(loaded, reuse_prefix=True)
    first = roll(engine, [request])
    again = roll(engine, [replace(request, tiles=(other,))])
    alone = roll(native(loaded), [replace(request, tiles=(other,))])
    assert again[0, 0].logprobs == pytest.approx(alone[0, 0].logprobs, abs=1e-4)
    assert again[0, 0].logprobs != pytest.approx(first[0, 0].logprobs, abs=1e-3)
    assert roll(engine, [request])[0, 0].logprobs == pytest.approx(first[0, 0].logprobs, abs=1e-4)


def test_a_request_whose_image_is_lost_or_moved_is_an_error() -> None:
    loaded = tiny_model("qwen2_5_vl")
    (request,) = requests_of(loaded, [2])
    first, second = request.tiles
    wrong = {
        "lost": (first,),
        "moved": (first, second.moved(1)),
        "twice": (first, first),
        "tokens": (first, replace(second, tokens=second.tokens - 1)),
    }
    made = roll(native(loaded), [replace(request, id=i, tiles=tiles) for i, tiles in enumerate(wrong.values())])
    assert {i: c.finish for (i, _), c in made.items()} == dict.fromkeys(range(4), "error")
    assert "places for images" in str(made[0, 0].error)
    blind = roll(native(loaded), [replace(request, tiles=())])
    assert blind[0, 0].finish == "error", "places without an image are words that mean nothing"


def test_a_model_that_reads_text_alone_refuses_images() -> None:
    from tests.rollout.tiny import tiny_model as text_model

    loaded = tiny_model("qwen3_vl")
    (request,) = requests_of(loaded, [1])
    made = roll(NativeEngine(text_model("qwen3"), eos_ids=[2], max_len=256), [request])
    assert "reads text alone" in str(made[0, 0].error)
