"""The vLLM engine over vLLM itself: what it makes, loads in place, pauses and requests that come while others run.

`make test-vllm` runs these on a CPU in an environment of their own; where vLLM is missing they are skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else two workers want two NUMA nodes

from tests.rollout.tiny import roll
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from tidemill.errors import ModelError
from tidemill.models import lora
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.hf import HFEngine, _plain
from tidemill.rollout.mismatch import Mismatch, measure
from tidemill.rollout.vllm.engine import VLLMEngine, start

VOCAB = 512
# Of log-probabilities in float32, on average.
ROUNDING = 1e-4


def small_model(is_tied: bool) -> Any:
    import tidemill.models.attention.registry  # noqa: F401  registers the attention

    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=is_tied, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=torch.float32).eval()
    with torch.no_grad():  # else the distribution is flat and any weights agree
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module", params=["tied", "own"])
def engine(request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    model = small_model(request.param == "tied")
    engine = start(model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, truncates=True)
    yield engine
    engine.close()


def asked(count: int = 4, first: int = 0, **how: Any) -> list[Request]:
    rng = np.random.default_rng(first)
    sampling = Sampling(**{"max_tokens": 24, **how})
    return [Request(first + i, rng.integers(3, VOCAB, 5 + 9 * i).tolist(), sampling, n=2) for i in range(count)]


def gap(engine: VLLMEngine, done: dict[Any, Completion], temperature: float = 1.0) -> Mismatch:
    """Log-probabilities that came with the samples against a plain forward pass of the learner's model."""
    ours, theirs = [], []
    for completion in done.values():
        start = len(completion.request.prompt)
        ids = torch.tensor([[*completion.request.prompt, *completion.tokens]])
        with torch.no_grad(), _plain(engine.model):
            logits = engine.model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / temperature
        theirs.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].numpy())
        ours.append(np.array(completion.logprobs, np.float32))
    return measure(np.concatenate(ours), np.concatenate(theirs))


def shuffle(model: Any, seed: int, only: str = "") -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and only in name:
                parameter.copy_(parameter[torch.randperm(parameter.shape[0])])


def test_greedy_tokens_equal_the_reference_engines(engine: VLLMEngine) -> None:
    made = roll(engine, asked(temperature=0.0))
    wanted = roll(HFEngine(engine.model, eos_ids=[2], max_len=160), asked(temperature=0.0))
    for key, completion in wanted.items():
        assert (made[key].tokens, made[key].finish) == (completion.tokens, completion.finish)
        np.testing.assert_allclose(made[key].logprobs, completion.logprobs, atol=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_models_at_the_sampling_temperature(engine: VLLMEngine, temperature: float) -> None:
    done = roll(engine, asked(temperature=temperature))
    assert len(done) == 8 and gap(engine, done, temperature).mean < ROUNDING


@pytest.mark.parametrize("kind", ["the learner's own", "a mapping", "without the tied name", "one layer"])
def test_every_kind_of_load_serves_the_new_weights(engine: VLLMEngine, kind: str) -> None:
    model, version = engine.model, engine.version + 1
    shuffle(model, version, only="layers.1." if kind == "one layer" else "")
    stale = gap(engine, roll(engine, asked()))
    named = dict(model.named_parameters())
    engine.load(
        {
            "the learner's own": None,
            "a mapping": model.state_dict(),
            "without the tied name": named,
            "one layer": [(name, tensor) for name, tensor in named.items() if "layers.1." in name],
        }[kind],
        version,
    )
    fresh = gap(engine, roll(engine, asked()))
    assert stale.mean > 0.1 and fresh.mean < ROUNDING
    assert engine.parity is not None and engine.parity.mean < ROUNDING


def test_a_load_that_does_not_arrive_is_refused(engine: VLLMEngine) -> None:
    shuffle(engine.model, 77)
    with pytest.raises(ModelError, match="nats from the learner"):
        engine.load([(n, t) for n, t in engine.model.named_parameters() if "layers.1." in n], engine.version + 1)
    engine.load(None, engine.version)


def test_a_paused_sample_goes_on_under_new_weights(engine: VLLMEngine) -> None:
    for request in asked(ignore_eos=True):
        engine.submit(request)
    for _ in range(6):
        engine.step()
    partials = engine.pause()
    assert not engine.has_work and all(0 < len(p.tokens) == len(p.logprobs) < 24 for p in partials)
    before = {(p.request.id, p.index): list(p.tokens) for p in partials}
    old = engine.version
    shuffle(engine.model, 5)
    engine.load(None, old + 1)
    engine.resume(partials)
    done = roll(engine, [])
    for key, tokens in before.items():
        assert done[key].tokens[: len(tokens)] == tokens and len(done[key].tokens) == 24
        assert done[key].versions == [old] * len(tokens) + [old + 1] * (24 - len(tokens))


def test_requests_come_while_others_run_and_call_back_when_they_end(engine: VLLMEngine) -> None:
    ended: list[int] = []
    first = Request(0, [5, 6, 7], Sampling(max_tokens=40, ignore_eos=True), on_done=lambda c: ended.append(0))
    second = Request(1, [8, 9], Sampling(max_tokens=4, ignore_eos=True), on_done=lambda c: ended.append(1))
    engine.submit(first)
    for _ in range(5):
        engine.step()
    engine.submit(second)
    done = roll(engine, [])
    assert ended == [1, 0] and [len(done[i, 0].tokens) for i in (0, 1)] == [40, 4]


def test_a_cancelled_request_ends_and_others_go_on(engine: VLLMEngine) -> None:
    for request in asked(2, ignore_eos=True):
        engine.submit(request)
    engine.step()
    engine.cancel(0)
    done = roll(engine, [])
    assert [done[0, i].finish for i in (0, 1)] == ["cancelled"] * 2
    assert [len(done[1, i].tokens) for i in (0, 1)] == [24, 24]


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.6, "temperature": 0.7}, {"min_p": 0.2}], ids=str)
def test_truncated_tokens_come_with_the_mass_that_was_kept(engine: VLLMEngine, how: dict[str, Any]) -> None:
    """Beside plain requests, with more samples than rows, so that vLLM moves rows about."""
    done = roll(engine, [*asked(6, **how), *asked(6, first=20)])
    assert gap(engine, {k: c for k, c in done.items() if k[0] < 20}, how.get("temperature", 1.0)).mean < ROUNDING
    for (request, _), completion in done.items():
        if request >= 20:
            assert completion.kept is None
            continue
        start, heat = len(completion.request.prompt), completion.request.sampling.temperature
        ids = torch.tensor([[*completion.request.prompt, *completion.tokens]])
        with torch.no_grad(), _plain(engine.model):
            logits = engine.model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / heat
        for row, token, kept in zip(logits.softmax(-1), completion.tokens, completion.kept or ()):
            p = row.sort(descending=True).values
            p[how.get("top_k", VOCAB) :] = 0
            p[(p.cumsum(0) - p) >= how.get("top_p", 2.0) * p.sum()] = 0
            p[p < how.get("min_p", 0.0) * p[0]] = 0
            assert row[token] >= p[p > 0].min() * 0.999
            assert kept == pytest.approx(float(p.sum().log()), abs=5e-3)  # an edge may round to the other side
        assert completion.kept is not None and len(completion.kept) == len(completion.tokens)


def test_at_level_2_the_next_load_brings_the_weights(engine: VLLMEngine) -> None:
    engine.sleep_level = 2
    try:
        for request in asked(2, ignore_eos=True):
            engine.submit(request)
        engine.step()
        engine.sleep()
        shuffle(engine.model, 31)
        engine.wake()
        assert not engine.has_weights
        engine.load(None, engine.version + 1)
        done = roll(engine, [])
        assert len(done) == 4 and gap(engine, roll(engine, asked())).mean < ROUNDING
    finally:
        engine.sleep_level = 1


def test_sleep_and_wake_keep_what_was_running(engine: VLLMEngine) -> None:
    """vLLM gives no memory back on a CPU; what runs must come through all the same."""
    for request in asked(2, ignore_eos=True):
        engine.submit(request)
    for _ in range(3):
        engine.step()
    engine.sleep()
    engine.wake()
    done = roll(engine, [])
    assert all(len(c.tokens) == 24 for c in done.values()) and gap(engine, done).mean < ROUNDING


def test_more_requests_than_slots_all_end(engine: VLLMEngine) -> None:
    how = Sampling(max_tokens=3, ignore_eos=True)
    done = roll(engine, [Request(i, [5, 6, 7 + i], how, n=2) for i in range(40)])
    assert len(done) == 80 and all(len(c.tokens) == 3 for c in done.values())


def test_a_bad_request_is_one_error(engine: VLLMEngine) -> None:
    done = roll(
        engine, [Request(7, [VOCAB + 3], Sampling()), Request(8, [5], Sampling(logit_bias={3: 1.0})), *asked(1)]
    )
    assert done[7, 0].finish == done[8, 0].finish == "error" and done[0, 0].finish in ("stop", "length")


def test_later_requests_do_not_find_keys_and_values_of_the_weights_before(engine: VLLMEngine) -> None:
    """While requests run, vLLM does not forget its prefix cache."""
    prompt = np.random.default_rng(9).integers(3, VOCAB, 140).tolist()  # longer than a page of the cache
    how = Sampling(max_tokens=16, ignore_eos=True)
    engine.submit(Request(0, prompt, how))
    for _ in range(3):
        engine.step()
    shuffle(engine.model, 12)
    engine.load(None, engine.version + 1)
    done = roll(engine, [Request(1, prompt, how)])
    assert gap(engine, {(1, 0): done[1, 0]}).mean < ROUNDING


def learn_adapters(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in lora.adapters(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.1)


def adapted(engine: VLLMEngine) -> int:
    """Publish two versions of the adapters, the second to requests under way; return the bytes of one."""
    own = sum(tensor.nbytes for tensor in lora.adapters(engine.model).values())
    for version in (1, 2):
        stale = gap(engine, roll(engine, asked()))
        assert stale.mean < ROUNDING
        requests = asked(ignore_eos=True) if version == 2 else []
        for request in requests:
            engine.submit(request)
        for _ in range(6 * len(requests)):
            engine.step()
        learn_adapters(engine.model, version)
        engine.load(None, version)
        assert engine.brought_bytes == own and engine.parity is not None and engine.parity.mean < ROUNDING
        for completion in roll(engine, []).values():
            assert set(completion.versions) == {version - 1, version}
        assert gap(engine, roll(engine, asked())).mean < ROUNDING
    return own


@pytest.mark.parametrize("modules", [(), ("q_proj", "v_proj", "down_proj")], ids=["all", "some"])
def test_adapters_are_served_as_such_and_nothing_else_is_sent(modules: tuple[str, ...]) -> None:
    model = small_model(True)
    lora.attach(model, 4, 8.0, modules=modules)
    engine = start(model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, truncates=True)
    try:
        assert engine.adapter is not None
        whole = engine.brought_bytes
        assert adapted(engine) < whole / 20
        engine.load(lora.merged(model), 3)  # whole weights, without the adapter
        assert gap(engine, roll(engine, asked())).mean < ROUNDING
        engine.sleep_level = 2
        engine.sleep()
        learn_adapters(model, 5)
        engine.load(None, 4)
        done = roll(engine, asked())
        assert engine.brought_bytes > whole / 2 and gap(engine, done).mean < ROUNDING
        assert all(set(completion.versions) == {4} for completion in done.values())
    finally:
        engine.close()


def test_adapters_with_magnitudes_are_merged(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model(False)
    lora.attach(model, 4, 8.0, magnitudes=True)
    engine = start(model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True)
    try:
        assert engine.adapter is None and "learn.dora" in caplog.text
        learn_adapters(model, 1)
        engine.load(None, 1)
        assert gap(engine, roll(engine, asked())).mean < ROUNDING
    finally:
        engine.close()


def small_mixture() -> Any:
    import tidemill.models.attention.registry  # noqa: F401  registers the attention

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=None, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tidemill", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def served_anew(engine: VLLMEngine) -> None:
    """Exchange experts with their neighbours, and load."""
    assert engine.parity is not None and engine.parity.mean < ROUNDING
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if ".experts." in name:
                parameter.copy_(parameter.roll(1, 0))
    assert gap(engine, roll(engine, asked())).mean > 0.1
    engine.load(None, 1)
    assert gap(engine, roll(engine, asked())).mean < ROUNDING


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mixture_takes_every_load(workers: int) -> None:
    sizes = {"tensor_parallel_size": workers}
    engine = start(small_mixture(), eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, **sizes)
    try:
        served_anew(engine)
    finally:
        engine.close()


def test_two_workers_share_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM cuts, loads and adds up as on accelerators; only the kernel of experts is a stand-in."""
    monkeypatch.setattr("tidemill.rollout.vllm.start.EXTENSION", "tests.rollout.plain_experts.Loader")
    how = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    engine = start(small_mixture(), eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, **how)
    try:
        assert engine.engine.collective_rpc("held_experts") == [[(2, 64, 128)] * 2] * 2
        served_anew(engine)
    finally:
        engine.close()


def test_two_workers_serve_adapters_too() -> None:
    model = small_model(True)
    lora.attach(model, 4, 8.0)
    engine = start(model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, tensor_parallel_size=2)
    try:
        assert engine.adapter is not None and adapted(engine)
    finally:
        engine.close()


def test_an_engine_over_two_workers_takes_weights_and_scores_as_the_learner_does() -> None:
    model = small_model(True)
    engine = start(model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, tensor_parallel_size=2)
    try:
        done = roll(engine, asked())
        assert all(c.error is None and c.tokens for c in done.values())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.load(None, 1)
        assert engine.parity is not None and engine.parity.mean < ROUNDING
    finally:
        engine.close()


def test_in_an_interpreter_of_its_own_it_serves_the_learners_weights_and_truncates() -> None:
    model = small_model(is_tied=True)
    engine = start(
        model, eos_ids=[2], max_len=160, max_seqs=16, enforce_eager=True, truncates=True, python=sys.executable
    )
    try:
        assert engine.parity is not None and engine.parity.mean < ROUNDING
        assert gap(engine, roll(engine, asked(temperature=0.8)), 0.8).mean < ROUNDING
        done = roll(engine, asked(top_p=0.8))
        assert all(len(c.kept or []) == len(c.tokens) for c in done.values())
        assert gap(engine, done).mean < ROUNDING
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        engine.load(None, 1)
        assert engine.parity.mean < ROUNDING
    finally:
        engine.close()
