"""What the native engine promises: the same tokens whatever shares the batch, nothing leaked, one bad request alone."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.errors import ModelError
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.native.forward.lean import LeanRunner


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model("qwen3")


@pytest.fixture
def engine(model: torch.nn.Module) -> Iterator[NativeEngine]:
    """Every test ends with no page and no slot held."""
    engine = NativeEngine(model, eos_ids=[2], max_seqs=8, max_len=64, page_size=4, cache_tokens=512, step_tokens=32)
    yield engine
    assert engine.pool.used == 0
    assert engine.pool.available == engine.pool.pages
    assert len(engine.scheduler.free_slots) == 8
    assert engine.scheduler.promised == 0


def requests(count: int, *, n: int = 3, seed: int = 5, **sampling: object) -> list[Request]:
    rng = np.random.default_rng(seed)
    how = Sampling(**{"max_tokens": 12, "seed": 7, **sampling})  # type: ignore[arg-type]
    return [Request(i, rng.integers(3, VOCAB, rng.integers(1, 20)).tolist(), how, n=n) for i in range(count)]


def tokens(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    return {key: completion.tokens for key, completion in done.items()}


def test_sampled_tokens_do_not_depend_on_the_batch(engine: NativeEngine, model: torch.nn.Module) -> None:
    asked = requests(9)
    together = tokens(roll(engine, asked))
    backwards = tokens(roll(engine, asked[::-1]))
    alone = {k: v for request in asked for k, v in tokens(roll(engine, [request])).items()}
    assert together == backwards == alone == tokens(roll(HFEngine(model, eos_ids=[2]), asked))
    assert len({tuple(t) for t in together.values()}) > 20  # samples of one prompt differ


def test_another_seed_gives_other_tokens(engine: NativeEngine) -> None:
    assert tokens(roll(engine, requests(2, seed=5))) != tokens(roll(engine, requests(2, seed=6)))


def test_lean_and_plain_runners_agree(model: torch.nn.Module, engine: NativeEngine) -> None:
    assert isinstance(engine.runner, LeanRunner)
    plain = roll(NativeEngine(model, eos_ids=[2], max_seqs=8, max_len=64, plain=True), requests(6))
    for key, completion in roll(engine, requests(6)).items():
        assert completion.tokens == plain[key].tokens
        np.testing.assert_allclose(completion.logprobs, plain[key].logprobs, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-mixed", "qwen2-moe", "mixtral", "deepseek-v3"])
def test_lean_and_plain_runners_agree_on_mixtures_and_their_routes(name: str) -> None:
    model = tiny_model(name)
    options = {"eos_ids": [2], "max_seqs": 8, "max_len": 64, "record_routes": True}
    lean = NativeEngine(model, **options)
    assert isinstance(lean.runner, LeanRunner)
    plain = roll(NativeEngine(model, plain=True, **options), requests(6))
    for key, completion in roll(lean, requests(6)).items():
        assert completion.tokens == plain[key].tokens
        np.testing.assert_allclose(completion.logprobs, plain[key].logprobs, atol=1e-5)
        np.testing.assert_array_equal(completion.routes, plain[key].routes)


def test_logprobs_are_those_of_the_distribution_at_the_temperature(
    engine: NativeEngine, model: torch.nn.Module
) -> None:
    how = {"temperature": 0.6, "top_p": 0.8, "top_k": 30}
    wanted = roll(HFEngine(model, eos_ids=[2]), requests(4, **how))
    for key, completion in roll(engine, requests(4, **how)).items():
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=1e-4)
        np.testing.assert_allclose(completion.kept, wanted[key].kept, atol=1e-4)
        assert max(completion.kept) <= 1e-6


STEERING = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "bias": {"logit_bias": {11: 4.0, 12: -3.0}},
    "allowed": {"allowed_tokens": (4, 8, 15, 16, 23, 42)},
    "allowed greedy": {"allowed_tokens": (4, 8, 15, 16, 23, 42), "temperature": 0.0},
    "min_p": {"min_p": 0.2},
    "stop": {"stop_tokens": tuple(range(10, 30))},
}


@pytest.mark.parametrize("name", STEERING)
def test_steered_sampling_equals_the_reference(engine: NativeEngine, model: torch.nn.Module, name: str) -> None:
    asked = requests(4, **STEERING[name])
    wanted = roll(HFEngine(model, eos_ids=[2]), asked)
    made = roll(engine, asked)
    assert tokens(made) == tokens(wanted)
    if "allowed" in name:
        assert {t for c in made.values() for t in c.tokens} <= {4, 8, 15, 16, 23, 42}
    for key, completion in made.items():
        assert completion.finish == wanted[key].finish
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=1e-4)
        if completion.kept is not None:
            np.testing.assert_allclose(completion.kept, wanted[key].kept, atol=1e-4)


def test_preempted_sequences_make_the_same_tokens(model: torch.nn.Module) -> None:
    roomy = NativeEngine(model, eos_ids=[], max_seqs=8, max_len=64, page_size=4)
    tight = NativeEngine(model, eos_ids=[], max_seqs=8, max_len=64, page_size=4, cache_tokens=72)
    asked = requests(5, max_tokens=30)
    assert tokens(roll(tight, asked)) == tokens(roll(roomy, asked))
    assert tight.scheduler.preemptions > 0
    assert tight.pool.used == 0


def test_samples_of_a_request_may_have_limits_of_their_own(engine: NativeEngine) -> None:
    done = roll(engine, [Request(0, [5, 6, 7], Sampling(ignore_eos=True), n=3, limits=(2, 9, 1))])
    assert [len(done[0, i].tokens) for i in range(3)] == [2, 9, 1]


def test_training_mode_and_gradients_are_left_alone(model: torch.nn.Module) -> None:
    model.train()
    try:
        roll(NativeEngine(model, eos_ids=[2], max_len=64, plain=True), requests(1))
        assert model.training
        assert all(p.requires_grad and p.grad is None and not p.is_inference() for p in model.parameters())
    finally:
        model.eval()


def test_a_paused_run_goes_on_to_the_same_tokens(engine: NativeEngine) -> None:
    asked = requests(9)
    wanted = tokens(roll(engine, asked))
    for request in asked:
        engine.submit(request)
    done = {}
    for version in range(6):
        for completion in engine.step() + engine.step():
            done[completion.request.id, completion.index] = completion
        partials = engine.pause()
        assert not engine.has_work
        engine.load(None, version + 1)
        engine.resume(partials)
    done |= roll(engine, [])
    assert tokens(done) == wanted
    assert any(len(set(completion.versions)) > 1 for completion in done.values())
    for completion in done.values():
        assert len(completion.versions) == len(completion.tokens) == len(completion.logprobs)
        assert completion.versions == sorted(completion.versions)


def shuffle(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter[torch.randperm(parameter.shape[0])])


@pytest.mark.parametrize("keep_cache", [True, False])
def test_a_paused_sample_goes_on_under_new_weights_with_its_cache_kept_or_rebuilt(keep_cache: bool) -> None:
    """Kept: as if the weights had changed while it ran. Rebuilt: as if all it has were a prompt to the new weights."""
    how = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    asked = [Request(i, [5 + i, 6, 7, 8, 9], how, n=2) for i in range(3)]
    done = {}
    for way in ("paused", "wanted"):
        model = tiny_model("qwen3")
        engine = NativeEngine(model, eos_ids=[2], max_seqs=8, max_len=64, page_size=4, kernels=False)
        for request in asked:
            engine.submit(request)
        for _ in range(9):
            engine.step()
        if way == "paused":
            partials = engine.pause(keep_cache)
            assert not engine.has_work and (engine.pool.used > 0) == keep_cache
            shuffle(model)
            engine.load(None, 1)
            engine.resume(partials)
        else:
            shuffle(model)
            engine.load(None, 1)
            if not keep_cache:
                engine.rebuild()
        kept = engine.scheduler.waiting[0].kept if way == "paused" else None
        read = 0 if kept is None else kept.length
        assert read == (len(partials[0].tokens) + 4 if keep_cache and way == "paused" else 0)
        done[way] = tokens(roll(engine, []))
        assert engine.pool.used == 0 and engine.pool.available == engine.pool.pages
    assert done["paused"] == done["wanted"]


def test_kept_caches_give_way_and_are_freed(model: torch.nn.Module) -> None:
    how = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    engine = NativeEngine(model, eos_ids=[2], max_seqs=4, max_len=64, page_size=4, cache_tokens=80)
    wanted = tokens(roll(engine, [Request(0, [5, 6, 7], how, n=3)]))
    for ending in ("resume", "release", "sleep", "crowd"):
        engine.submit(Request(0, [5, 6, 7], how, n=3))
        for _ in range(8):
            engine.step()
        partials = engine.pause(keep_cache=True)
        assert engine.pool.used > 0
        if ending == "release":
            engine.release(partials)
            assert engine.pool.used == 0
        elif ending == "sleep":
            engine.sleep()
            engine.wake()
        elif ending == "crowd":  # others need the room
            roll(engine, [Request(9, list(range(5, 45)), how)])
        engine.resume(partials)
        assert tokens(roll(engine, [])) == wanted, ending
        assert engine.pool.used == 0 and engine.pool.available == engine.pool.pages
    engine.submit(Request(0, [5, 6, 7], how, n=3))
    for _ in range(8):
        engine.step()
    engine.resume(engine.pause(keep_cache=True))
    engine.cancel(0)
    roll(engine, [])
    assert engine.pool.used == 0 and not engine.scheduler.kept


def test_versions_change_in_the_middle_of_a_running_sequence(engine: NativeEngine) -> None:
    engine.submit(Request(0, [5, 6, 7], Sampling(max_tokens=6, ignore_eos=True)))
    engine.step()
    engine.step()
    engine.load(None, 4)
    (completion,) = roll(engine, []).values()
    assert completion.versions == [0, 0, 4, 4, 4, 4]


def test_cancelled_requests_come_back_as_cancelled(engine: NativeEngine) -> None:
    for request in requests(6):
        engine.submit(request)
    engine.step()
    for request_id in (0, 1, 5):
        engine.cancel(request_id)
    done = roll(engine, [])
    assert len(done) == 18
    cancelled = {key for key, completion in done.items() if completion.finish == "cancelled"}
    assert cancelled == {(r, i) for r in (0, 1, 5) for i in range(3)}


def test_sleep_gives_the_memory_back_and_work_goes_on_after(engine: NativeEngine) -> None:
    asked = requests(5)
    wanted = tokens(roll(engine, asked))
    for request in asked:
        engine.submit(request)
    early = engine.step() + engine.step()
    assert engine.store.nbytes > 0
    engine.sleep()
    assert engine.store.nbytes == 0
    engine.wake()
    done = roll(engine, []) | {(c.request.id, c.index): c for c in early}
    assert tokens(done) == wanted


BAD = {
    "n is 0": Request(0, [5], n=0),
    "prompt is empty": Request(0, []),
    "the model knows": Request(0, [VOCAB]),
    "with max_len 64": Request(0, [5] * 64),
    "max_tokens is 0": Request(0, [5], Sampling(max_tokens=0)),
    "temperature is -1": Request(0, [5], Sampling(temperature=-1)),
    "top_p 0": Request(0, [5], Sampling(top_p=0.0)),
    "stop_tokens holds token 999": Request(0, [5], Sampling(stop_tokens=(999,))),
    "need a tokenizer": Request(0, [5], Sampling(stop_strings=("x",))),
    "logit_bias holds token -3": Request(0, [5], Sampling(logit_bias={-3: 1.0})),
    "allowed_tokens is empty": Request(0, [5], Sampling(allowed_tokens=())),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_request_gets_an_error_and_the_others_go_on(engine: NativeEngine, message: str) -> None:
    heard: list[Completion] = []
    good = Request(1, [5, 6], Sampling(max_tokens=3, ignore_eos=True), on_done=heard.append)
    done = roll(engine, [BAD[message], good])
    assert done[0, 0].finish == "error"
    assert message in (done[0, 0].error or "")
    assert done[1, 0].finish == "length"
    assert heard == [done[1, 0]]


def test_nan_logits_end_their_own_request_only() -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4)
    how = Sampling(max_tokens=8, allowed_tokens=tuple(range(20, 40)))
    wanted = tokens(roll(engine, [Request(1, [5, 6, 7], how, n=2)]))
    done = roll(engine, [Request(0, [5, 6, 9], how, n=2), Request(1, [5, 6, 7], how, n=2)])
    assert [done[0, i].finish for i in range(2)] == ["error", "error"]
    assert "not numbers" in (done[0, 0].error or "")
    assert (
        tokens(roll(engine, [Request(1, [5, 6, 7], how, n=2)]))
        == wanted
        == {k: v for k, v in tokens(done).items() if k[0] == 1}
    )


# What cannot be divided by, added, counted or hashed, found before a step would fail for everybody.
ODD = {
    "logit_bias of token 5 is nan": {"logit_bias": {5: float("nan")}},
    "logit_bias of token 5 is -inf": {"logit_bias": {5: float("-inf")}},
    "logit_bias holds token '5'": {"logit_bias": {"5": 1.0}},
    "temperature is nan": {"temperature": float("nan")},
    "temperature is 1e-42": {"temperature": 1e-42},
    "temperature is None": {"temperature": None},
    "repetition_penalty is nan": {"repetition_penalty": float("nan")},
    "presence_penalty is inf": {"presence_penalty": float("inf")},
    "top_k is 2.5": {"top_k": 2.5},
    "seed is None": {"seed": None},
    "max_tokens is 2.5": {"max_tokens": 2.5},
    "stop_strings is 'END'": {"stop_strings": "END"},
    "stop_strings holds 3": {"stop_strings": (3,)},
    "stop_tokens holds token 'a'": {"stop_tokens": ("a",)},
    "temperature is 1e+300": {"temperature": 1e300, "allowed_tokens": (5, 6)},
    "temperature is 1000000": {"temperature": 10**400},
    "stop_strings is None": {"stop_strings": None},
    "stop_strings holds '\\ud800'": {"stop_strings": ("\ud800",)},
    "allowed_tokens is <list_iterator": {"allowed_tokens": iter([5, 6])},
}
ODD_REQUESTS = {name: Request(0, [5, 6], Sampling(**how)) for name, how in ODD.items()} | {
    "id is 'a'": Request("a", [5]),  # type: ignore[arg-type]
    "n is 2.5": Request(0, [5], n=2.5),  # type: ignore[arg-type]
    "n is 1000000000": Request(0, [5], n=10**9),
    "flat list of token numbers; it is [1.5]": Request(0, [1.5]),  # type: ignore[list-item]
    "flat list of token numbers; it is [[1, 2]]": Request(0, [[1, 2]]),  # type: ignore[list-item]
    "flat list of token numbers; it is None": Request(0, None),  # type: ignore[arg-type]
    "one of limits is None": Request(0, [5], n=2, limits=(1, None)),  # type: ignore[arg-type]
    "limits is 3": Request(0, [5], n=2, limits=3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_odd_values_are_errors_of_their_request_alone(model: torch.nn.Module, kind: str) -> None:
    for message, request in ODD_REQUESTS.items():
        engine = (
            NativeEngine(model, eos_ids=[2], max_seqs=4, max_len=64, page_size=4, tokenizer=object())
            if kind == "native"
            else HFEngine(model, eos_ids=[2], max_len=64, tokenizer=object())
        )
        done = roll(engine, [request, Request(1, [5, 6], Sampling(max_tokens=2, ignore_eos=True))])
        assert done[request.id, 0].finish == "error"
        assert message in (done[request.id, 0].error or "")
        assert len(done) == (3 if request.n == 2 else 2) and done[1, 0].finish == "length"


ALIKE = {
    "numpy numbers": (
        Request(np.int64(3), np.array([5, 6], np.uint8), Sampling(seed=np.int32(-4), max_tokens=np.int64(8))),
        Request(3, [5, 6], Sampling(seed=-4, max_tokens=8)),
    ),
    "penalties of a narrow prompt": (
        Request(3, np.array([5, 6], np.uint8), Sampling(repetition_penalty=1.5, max_tokens=8)),
        Request(3, [5, 6], Sampling(repetition_penalty=1.5, max_tokens=8)),
    ),
    "fractions": (
        Request(3, [5, 6], Sampling(temperature=Fraction(1, 2), top_p=Fraction(3, 4), max_tokens=8)),
        Request(3, [5, 6], Sampling(temperature=0.5, top_p=0.75, max_tokens=8)),
    ),
    "tokens as a set": (
        Request(3, [5, 6], Sampling(allowed_tokens={5, 6, 7}, stop_tokens={7}, max_tokens=8)),
        Request(3, [5, 6], Sampling(allowed_tokens=(5, 6, 7), stop_tokens=(7,), max_tokens=8)),
    ),
    "tokens as an array": (
        Request(3, [5, 6], Sampling(allowed_tokens=np.arange(5, 9, dtype=np.uint8), stop_tokens=np.array([7, 8]))),
        Request(3, [5, 6], Sampling(allowed_tokens=(5, 6, 7, 8), stop_tokens=(7, 8))),
    ),
}


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
@pytest.mark.parametrize("name", ALIKE)
def test_numbers_and_lists_of_other_kinds_mean_the_same(model: torch.nn.Module, kind: type, name: str) -> None:
    made = [roll(kind(model, eos_ids=[2], max_len=64), [request]) for request in ALIKE[name]]
    assert tokens(made[0]) == tokens(made[1])
    assert made[0][3, 0].finish == made[1][3, 0].finish != "error"


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_a_callback_that_raises_costs_no_completion(model: torch.nn.Module, kind: type) -> None:
    heard: list[Completion] = []

    def hear(completion: Completion) -> None:
        heard.append(completion)
        if completion.request.id == 1 and completion.index == 0:
            raise ZeroDivisionError

    how = Sampling(max_tokens=3, ignore_eos=True)
    engine = kind(model, eos_ids=[2], max_len=64)
    for i in range(3):
        engine.submit(Request(i, [5, 6 + i], how, n=2, on_done=hear))
    done, failures = [], 0
    while engine.has_work:
        try:
            done += engine.step()
        except ZeroDivisionError:
            failures += 1
    wanted = [(i, k) for i in range(3) for k in range(2)]
    assert failures == 1
    assert sorted((c.request.id, c.index) for c in done) == sorted((c.request.id, c.index) for c in heard) == wanted


def test_a_top_k_beyond_every_vocabulary_keeps_everything(engine: NativeEngine) -> None:
    assert tokens(roll(engine, requests(2, top_k=10**30))) == tokens(roll(engine, requests(2)))


@pytest.mark.parametrize("kernels", [True, False])
def test_a_sample_that_goes_wrong_leaves_the_prompt_of_its_group_alone(kernels: bool) -> None:
    """Some draw a token whose embedding is NaN. The others have the same prompt pages, and go on."""
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    how = Sampling(max_tokens=20, ignore_eos=True, logit_bias={9: 3.0}, temperature=1.5)
    asked = [Request(0, list(range(20, 53)), how, n=8)]
    wanted = roll(HFEngine(model, eos_ids=[2], max_len=64), asked)
    engine = NativeEngine(model, eos_ids=[2], max_seqs=8, max_len=64, page_size=16, kernels=kernels)
    done = roll(engine, asked)
    assert {c.finish for c in wanted.values()} == {"error", "length"}
    assert tokens(done) == tokens(wanted)
    assert {k: c.finish for k, c in done.items()} == {k: c.finish for k, c in wanted.items()}
    assert not any(held.isnan().any() for held in (*engine.store.keys.values(), *engine.store.values.values()))


@pytest.mark.parametrize("way", ["cancel", "pause", "load"])
def test_a_prompt_given_up_in_the_middle_leaves_no_nan_behind(way: str) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = float("nan")
    how = Sampling(max_tokens=8, allowed_tokens=tuple(range(20, 40)))
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=128, page_size=16, step_tokens=20, kernels=False)
    engine.submit(Request(0, [9] * 100, how))
    engine.step()
    engine.step()
    if way == "cancel":
        engine.cancel(0)
    elif way == "pause":
        engine.pause()
    else:
        engine.load(None, 1)
    assert engine.pool.used == 0
    assert not any(held.isnan().any() for held in (*engine.store.keys.values(), *engine.store.values.values()))


def test_samples_resumed_with_their_pages_do_not_wait_for_each_others(model: torch.nn.Module) -> None:
    """Together they hold the whole pool, and the first of them needs a page more."""
    how = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    asked = [Request(i, [5 + i, 6, 7], how) for i in range(3)]
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4, cache_tokens=40)
    wanted = tokens(roll(engine, asked))
    for steps in range(1, 20):
        for request in asked:
            engine.submit(request)
        done = [completion for _ in range(steps) for completion in engine.step()]
        engine.resume(engine.pause(keep_cache=True))
        for _ in range(200):
            done += engine.step()
        assert not engine.has_work, f"paused after {steps} steps"
        assert {(c.request.id, c.index): c.tokens for c in done} == wanted
        assert engine.pool.used == 0


@pytest.mark.parametrize("way", ["sleep", "rebuild"])
def test_what_was_resumed_with_its_cache_is_read_again_after_it_is_gone(way: str) -> None:
    model = tiny_model("qwen3")
    how = Sampling(max_tokens=20, ignore_eos=True, temperature=0.0)
    asked = [Request(i, [5 + i, 6, 7], how) for i in range(3)]
    done = {}
    for keeps in (True, False):
        engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4)
        for request in asked:
            engine.submit(request)
        for _ in range(8):
            engine.step()
        engine.resume(engine.pause(keep_cache=keeps))
        if way == "sleep":
            engine.sleep()
            engine.wake()
        else:
            engine.rebuild()
        assert not any(trunk.kept for trunk in engine.scheduler.waiting)
        done[keeps] = tokens(roll(engine, []))
    assert done[True] == done[False]


def test_paused_samples_that_do_not_fit_here_are_errors_of_their_own(model: torch.nn.Module) -> None:
    how = Sampling(max_tokens=40, ignore_eos=True)
    roomy = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4)
    for request in (Request(0, list(range(5, 25)), how), Request(1, [5, 6], how)):
        roomy.submit(request)
    for _ in range(12):
        roomy.step()
    partials = roomy.pause()
    small = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4, cache_tokens=44)
    small.resume(partials)
    done = roll(small, [])
    assert done[0, 0].finish == "error" and "room for 44" in (done[0, 0].error or "")
    assert done[0, 0].tokens == partials[0].tokens
    assert done[1, 0].finish == "length" and len(done[1, 0].tokens) == 40
    short = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=30, page_size=4)
    short.resume(partials)
    done = roll(short, [])
    assert done[0, 0].finish == "length" and done[0, 0].tokens == partials[0].tokens  # 20 + 12 are more than 30
    assert len(done[1, 0].tokens) == 28


def test_paused_requests_of_one_id_keep_their_own_prompts(model: torch.nn.Module) -> None:
    how = Sampling(max_tokens=6, ignore_eos=True, temperature=0.0)
    asked = [Request(0, [5, 6, 7], how), Request(0, [8, 9, 10, 11], how)]
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=64, page_size=4)
    wanted = [roll(engine, [request])[0, 0].tokens for request in asked]
    for request in asked:
        engine.submit(request)
    engine.resume(engine.pause())
    done = []
    while engine.has_work:
        done += engine.step()
    assert [c.tokens for c in sorted(done, key=lambda c: len(c.request.prompt))] == wanted


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_weights_by_a_name_that_the_model_does_not_have_are_refused(kind: type) -> None:
    engine = kind(tiny_model("qwen3"), eos_ids=[2], max_len=64)
    weight = engine.model.lm_head.weight.detach().clone()
    with pytest.raises(ModelError, match=r"no weight 'lm_head.weigth'.*did you mean lm_head.weight"):
        engine.load({"lm_head.weigth": weight}, 1)
    assert engine.version == 0
    engine.load({"lm_head.weight": weight * 2}, 2)
    assert engine.version == 2 and torch.equal(engine.model.lm_head.weight, weight * 2)


@pytest.mark.parametrize("n", [2, 5])
def test_samples_of_a_prompt_that_fills_the_cache_are_made_one_after_another(model: torch.nn.Module, n: int) -> None:
    """Each but the last needs a copy of the prompt's last page, and no page is left."""
    how = Sampling(max_tokens=4, ignore_eos=True)
    asked = [Request(i, list(range(5, 46 + i)), how, n=n) for i in range(3)]
    engine = NativeEngine(model, eos_ids=[], max_seqs=4, max_len=44, page_size=4, cache_tokens=44)
    for request in asked:
        engine.submit(request)
    done = [completion for _ in range(300) for completion in engine.step()]
    assert not engine.has_work and len(done) == 3 * n and engine.pool.used == 0
    wanted = tokens(roll(HFEngine(model, eos_ids=[], max_len=44), asked))
    assert {(c.request.id, c.index): c.tokens for c in done} == wanted
