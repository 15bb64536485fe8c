"""The cache paged to host memory: the same tokens in a cache much too small, nothing read again while the host has
room, bounded, and nothing left behind."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
from benchmarks import _families_tiny as families
from tests.rollout.native.test_engine import shuffle, tokens
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine

PLENTY = 1 << 26
MODELS = {
    "dense": "qwen3",
    "hybrid": "qwen3_5_text",
    "latent": "deepseek-v3",
    "windows": "gemma3",
}


@cache
def model_of(kind: str) -> Any:
    return families.models(MODELS[kind])[0] if kind == "hybrid" else tiny_model(MODELS[kind])


def engine_of(model: Any, host_bytes: int = 0, cache_tokens: int | None = None, **how: Any) -> NativeEngine:
    options = {"eos_ids": [], "max_seqs": 8, "max_len": 96, "page_size": 4, "step_tokens": 32, **how}
    return NativeEngine(model, cache_tokens=cache_tokens, host_bytes=host_bytes, **options)


def load_of(seed: int) -> list[Request]:
    """Groups and single samples, greedy, drawn and truncated, of all lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(7):
        how = {"temperature": float(rng.choice([0.0, 0.7, 1.0])), "top_p": float(rng.choice([1.0, 0.8]))}
        sampling = Sampling(max_tokens=int(rng.integers(8, 45)), ignore_eos=True, seed=seed, **how)
        n = int(rng.integers(1, 5))
        found.append(Request(i, rng.integers(3, VOCAB, rng.integers(1, 40)).tolist(), sampling, n=n))
    return found


def check_same(made: dict[tuple[int, int], Completion], wanted: dict[tuple[int, int], Completion]) -> None:
    assert tokens(made) == tokens(wanted)
    for key, completion in made.items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=1e-5)
        if completion.kept is not None:
            np.testing.assert_allclose(completion.kept, wanted[key].kept, atol=1e-5)


def check_empty(engine: NativeEngine) -> None:
    host = engine.scheduler.host
    assert engine.pool.used == 0 and engine.pool.available == engine.pool.pages
    assert host.used == 0 and not host.holders.any() and not host._row_of and not host._home
    assert not engine.scheduler.kept and not engine.scheduler.moves and engine.scheduler.promised == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_too_small_makes_what_one_with_room_makes(kind: str, seed: int) -> None:
    model, asked = model_of(kind), load_of(seed)
    wanted = roll(engine_of(model), asked)
    tight = engine_of(model, PLENTY, cache_tokens=100)
    check_same(roll(tight, asked), wanted)
    assert tight.scheduler.preemptions > 3 and tight.scheduler.recomputed == 0
    assert tight.host is not None and tight.host.bytes_out > 0 and tight.host.bytes_in > 0
    check_empty(tight)


@pytest.mark.parametrize("kind", MODELS)
def test_what_finds_no_room_on_the_host_is_read_again(kind: str) -> None:
    model, asked = model_of(kind), load_of(9)
    wanted = roll(engine_of(model), asked)
    probe = engine_of(model, PLENTY, cache_tokens=100)
    roll(probe, asked)
    assert probe.host is not None
    recomputed = []
    for share in (0, 24, PLENTY // probe.host.row_bytes):
        engine = engine_of(model, share * probe.host.row_bytes, cache_tokens=100)
        check_same(roll(engine, asked), wanted)
        recomputed.append(engine.scheduler.recomputed)
        check_empty(engine)
        if share == 24:
            assert engine.scheduler.host.pages_in > 0
    assert recomputed[0] > recomputed[1] > recomputed[2] == 0


def test_the_host_is_never_asked_for_more_than_its_bound() -> None:
    model, asked = model_of("dense"), load_of(3)
    for nbytes in (1, 5_000, 40_000, 300_000):
        engine = engine_of(model, nbytes, cache_tokens=100)
        for request in asked:
            engine.submit(request)
        while engine.has_work:
            engine.step()
            assert engine.host is None or engine.host.nbytes <= nbytes
            assert engine.scheduler.host.used <= engine.scheduler.host.rows
        check_empty(engine)


@pytest.mark.parametrize(
    "how",
    [
        {"cache_dtype": "int8"},
        {"cache_dtype": "fp8"},
        {"batch_invariant": True},
        {"plain": True},
        {"reuse_prefix": True},
        {"kernels": False},
    ],
    ids=str,
)
def test_every_kind_of_cache_can_lie_on_the_host(how: dict[str, Any]) -> None:
    model, asked = model_of("dense"), load_of(5)
    tight = engine_of(model, PLENTY, cache_tokens=100, **how)
    made = roll(tight, asked)
    # A row of one token and a chunk of one are rounded differently in 8 bits.
    is_narrow = "cache_dtype" in how
    wanted = roll(engine_of(model, **how), asked)
    if is_narrow:
        same = sum(made[key].tokens == wanted[key].tokens for key in wanted)
        assert same >= len(wanted) - 2
    else:
        check_same(made, wanted)
    assert tight.scheduler.preemptions > 0 and tight.scheduler.recomputed == 0
    if "reuse_prefix" not in how:
        check_empty(tight)


def test_routes_come_back_with_their_pages() -> None:
    model, asked = tiny_model("qwen3-moe"), load_of(2)
    wanted = roll(engine_of(model, record_routes=True), asked)
    tight = engine_of(model, PLENTY, cache_tokens=100, record_routes=True)
    made = roll(tight, asked)
    check_same(made, wanted)
    for key, completion in made.items():
        np.testing.assert_array_equal(completion.routes, wanted[key].routes)
    assert tight.scheduler.recomputed == 0 < tight.scheduler.preemptions


def crowded(model: Any, host_bytes: int = PLENTY, **how: Any) -> NativeEngine:
    """With some samples on the host."""
    engine = engine_of(model, host_bytes, cache_tokens=64, **how)
    for i in range(4):
        engine.submit(Request(i, list(range(5 + i, 17 + i)), Sampling(max_tokens=40, ignore_eos=True), n=2))
    while not engine.scheduler.host.used:
        engine.step()
    return engine


def test_a_group_shares_its_prompt_on_the_host_and_after_it_has_come_back() -> None:
    engine = engine_of(model_of("dense"), PLENTY, max_seqs=4)
    engine.submit(Request(0, list(range(5, 26)), Sampling(max_tokens=30, ignore_eos=True), n=4))
    for _ in range(8):
        engine.step()
    held = engine.pool.used
    engine.sleep()
    host = engine.scheduler.host
    assert engine.pool.used == 0 and host.used == held  # five full pages of the prompt once
    engine.wake()
    engine.step()
    assert engine.scheduler.recomputed == 0 and host.used == 0
    assert (engine.pool.holders == 4).sum() == 5
    roll(engine, [])
    check_empty(engine)


@pytest.mark.parametrize("way", ["cancel", "pause", "rebuild", "release"])
def test_nothing_stays_on_the_host_that_is_not_gone_on_with(way: str) -> None:
    engine = crowded(model_of("dense"))
    if way == "cancel":
        for i in range(4):
            engine.cancel(i)
    elif way == "pause":
        engine.pause()
    elif way == "release":
        engine.release(engine.pause(keep_cache=True))
    else:
        engine.rebuild()
        assert engine.scheduler.host.used == 0
        engine.pause()
    while engine.has_work:
        engine.step()
    engine.scheduler.forget()
    check_empty(engine)


def test_cancelling_a_request_frees_its_rows_alone() -> None:
    engine = crowded(model_of("dense"))
    away = [trunk.members[0].request.id for trunk in engine.scheduler.waiting if trunk.kept is not None]
    used = engine.scheduler.host.used
    engine.cancel(away[0])
    assert engine.scheduler.host.used < used
    done = roll(engine, [])
    assert {c.finish for c in done.values() if c.request.id == away[0]} == {"cancelled"}
    assert {c.finish for c in done.values() if c.request.id != away[0]} == {"length"}
    check_empty(engine)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("keeps", [True, False])
def test_new_weights_meet_samples_on_the_host(kind: str, keeps: bool) -> None:
    """Kept: as if the weights had changed while they ran. Else all they have is a prompt to the new weights."""
    how = Sampling(max_tokens=24, ignore_eos=True, temperature=0.0)
    done = {}
    for way in ("asleep", "wanted"):
        model = tiny_model("qwen3") if kind == "dense" else deepcopy(model_of(kind))
        engine = engine_of(model, PLENTY, kernels=False, keeps_asleep=keeps)
        for i in range(3):
            engine.submit(Request(i, list(range(5 + i, 14 + i)), how, n=2))
        for _ in range(9):
            engine.step()
        if way == "asleep":
            engine.sleep()
            assert (engine.scheduler.host.used > 0) == keeps and engine.store.nbytes == 0
        shuffle(model)
        engine.load(None, 1)
        if way == "wanted" and not keeps:
            engine.rebuild()
        done[way] = roll(engine, [])
        check_empty(engine)
    check_same(done["asleep"], done["wanted"])
    assert all(done["asleep"][key].versions == done["wanted"][key].versions for key in done["wanted"])


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_pause_that_keeps_the_cache_keeps_what_lies_on_the_host(kind: str) -> None:
    engine = crowded(model_of(kind))
    partials = engine.pause(keep_cache=True)
    assert not engine.has_work and engine.scheduler.host.used > 0
    engine.resume(partials)
    made = roll(engine, [])
    assert engine.scheduler.recomputed == 0
    check_empty(engine)
    asked = [made[i, 0].request for i in range(4)]
    wanted = roll(engine_of(model_of(kind)), asked)
    for key, completion in made.items():
        assert completion.tokens == wanted[key].tokens


def test_prompts_that_fill_the_cache_are_not_read_again_for_each_sample() -> None:
    model = model_of("dense")
    asked = [Request(i, list(range(5, 46 + i)), Sampling(max_tokens=4, ignore_eos=True), n=3) for i in range(3)]
    tight = engine_of(model, PLENTY, cache_tokens=44, max_len=44)
    check_same(roll(tight, asked), roll(engine_of(model, max_len=44), asked))
    assert tight.scheduler.recomputed == 0 < tight.scheduler.host.pages_in
    check_empty(tight)
