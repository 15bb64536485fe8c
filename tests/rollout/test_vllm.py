"""The vLLM engine's bookkeeping, over a stand-in for vLLM that computes with a real tiny model. vLLM itself is checked
by `benchmarks/gpu_vllm.py`."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.errors import ModelError
from tidemill.models import lora
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine, _plain
from tidemill.rollout.vllm import VLLMEngine
from tidemill.rollout.vllm_worker import WeightLoader


class FakeVLLM(WeightLoader):
    """`LLM`, its engine and its worker in one: greedy, one token per request and step, with weights of its own."""

    def __init__(self, model: Any, *, head_stays: bool = False) -> None:
        self.llm_engine = self.model_runner = self
        self.device = "cpu"
        self.model = copy.deepcopy(model)
        self.head_stays = head_stays
        self.queue: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.slept: list[int] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.queue[name] = (prompt["prompt_token_ids"], params, [])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.queue.pop(name, None)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self, method)(*args)]

    def reload_weights(self, weights_iterator: Any) -> None:
        named = {n: t.clone() for n, t in weights_iterator if not (self.head_stays and n.startswith("lm_head"))}
        self.model.load_state_dict(named, strict=False)

    def reset_prefix_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        assert not self.queue
        self.slept.append(level)

    def wake_up(self) -> None: ...

    @torch.no_grad()
    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, params, made) in list(self.queue.items()):
            with _plain(self.model):
                logits = self.model(torch.tensor([[*prompt, *made]]), use_cache=False).logits[0].float()
            scores = logits.log_softmax(-1)
            token = int(scores[-1].argmax())
            made.append(token)
            reason = "stop" if token in (params.stop_token_ids or ()) else None
            reason = reason or ("length" if len(made) >= params.max_tokens else None)
            chosen = [{token: SimpleNamespace(logprob=float(scores[-1, token]))}]
            scored = [None] + [{t: SimpleNamespace(logprob=float(row[t]))} for t, row in zip(prompt[1:], scores)]
            part = SimpleNamespace(token_ids=[token], logprobs=chosen, finish_reason=reason)
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[part], finished=reason is not None, prompt_logprobs=scored)
            )
            if reason:
                del self.queue[name]
        return outputs


def params(**how: Any) -> Any:
    return SimpleNamespace(**{"stop_token_ids": None, **how})


def make(model: Any, **fake: Any) -> tuple[VLLMEngine, FakeVLLM]:
    llm = FakeVLLM(model, **fake)
    return VLLMEngine(llm, params, model, eos_ids=[2], max_len=64), llm


def asked(count: int = 3, **how: Any) -> list[Request]:
    rng = np.random.default_rng(1)
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": 9, **how})
    return [Request(i, rng.integers(3, VOCAB, 3 + i).tolist(), sampling, n=2) for i in range(count)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_completions_equal_the_reference_engines(model: Any) -> None:
    made, wanted = roll(make(model)[0], asked()), roll(HFEngine(model, eos_ids=[2]), asked())
    for key, completion in wanted.items():
        assert (made[key].tokens, made[key].finish) == (completion.tokens, completion.finish)
        np.testing.assert_allclose(made[key].logprobs, completion.logprobs, atol=1e-4)


def test_a_paused_sample_goes_on_under_new_weights_and_says_which_made_each_token(model: Any) -> None:
    engine, _ = make(model)
    for request in asked(1):
        engine.submit(request)
    for _ in range(3):
        engine.step()
    partials = engine.pause()
    assert [len(p.tokens) for p in partials] == [3, 3] and not engine.has_work
    engine.load(None, 1)
    engine.resume(partials)
    done = roll(engine, [])
    assert all(c.versions == [0] * 3 + [1] * (len(c.tokens) - 3) for c in done.values())
    assert [c.tokens for c in done.values()] == [c.tokens for c in roll(make(model)[0], asked(1)).values()]


def test_a_load_brings_the_learners_weights(model: Any) -> None:
    learner = copy.deepcopy(model)
    engine, llm = make(learner)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.load(None, 1)
    assert engine.parity is not None and engine.parity.max < 1e-4
    assert all(torch.equal(a, b) for a, b in zip(learner.parameters(), llm.model.parameters()))


def test_adapters_are_merged_on_the_way(model: Any) -> None:
    learner = copy.deepcopy(model)
    engine, llm = make(learner)
    lora.attach(learner, 4, 8.0)
    with torch.no_grad():
        for parameter in lora.adapters(learner).values():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    engine.load(None, 1)
    assert engine.parity is not None and engine.parity.max < 1e-4
    assert not torch.equal(llm.model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_load_that_leaves_the_output_layer_stale_is_refused(model: Any) -> None:
    learner = copy.deepcopy(model)
    engine, _ = make(learner, head_stays=True)
    with torch.no_grad():
        learner.lm_head.weight.copy_(torch.randn_like(learner.lm_head.weight))
    with pytest.raises(ModelError, match="nats from the learner"):
        engine.load(None, 1)


def test_sleep_keeps_what_was_running(model: Any) -> None:
    engine, llm = make(model)
    for request in asked(2):
        engine.submit(request)
    engine.step()
    engine.sleep()
    assert llm.slept == [1]
    engine.wake()
    done = roll(engine, [])
    assert len(done) == 4 and all(len(c.tokens) == len(c.logprobs) for c in done.values())


def test_what_vllm_cannot_account_for_is_an_error_of_that_request_alone(model: Any) -> None:
    engine, _ = make(model)
    bad = Request(7, [5, 6], Sampling(top_p=0.9), n=1)
    done = roll(engine, [bad, *asked(1)])
    assert done[7, 0].finish == "error" and "native" in (done[7, 0].error or "")
    assert done[0, 0].finish in ("stop", "length")


def test_a_cancelled_request_leaves_nothing_behind(model: Any) -> None:
    engine, llm = make(model)
    for request in asked(2):
        engine.submit(request)
    engine.step()
    engine.cancel(0)
    assert all(name.startswith("1/") for name in llm.queue)
    assert [c.finish for c in engine.step() if c.request.id == 0] == ["cancelled"] * 2
