"""The vLLM engine's bookkeeping, over a stand-in for vLLM that computes with a real tiny model. vLLM itself is checked
by `benchmarks/gpu_vllm.py`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.errors import ConfigError, ModelError
from tidemill.models import lora
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine, _plain
from tidemill.rollout.vllm.engine import VLLMEngine, _router_biases, options_of, start
from tidemill.rollout.vllm.kept import KeptMass
from tidemill.rollout.vllm.start import check_version
from tidemill.rollout.vllm.worker import WeightLoader


class FakeVLLM(WeightLoader):
    """`LLM`, its engine and its worker in one: greedy where nothing is truncated, one token per request and step, with
    weights of its own. Like vLLM it gives log-probabilities of what it drew from."""

    def __init__(self, model: Any, *, head_stays: bool = False, kept: KeptMass | None = None) -> None:
        self.llm_engine = self.model_runner = self
        self.device = "cpu"
        self.model = copy.deepcopy(model)
        self.head_stays = head_stays
        self.queue: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.slept: list[int] = []
        self.kept = kept
        self.loads = 0
        self.salts: dict[str, str] = {}  # of the prefix cache, by request
        self.base: dict[str, torch.Tensor] = {}  # weights of adapted modules without their adapter

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any = None) -> None:
        assert (lora_request is not None) == bool(self.base), "every request names the adapter, if there is one"
        self.queue[name] = (prompt["prompt_token_ids"], params, [])
        self.salts[name] = prompt["cache_salt"]

    @torch.no_grad()
    def add_lora(self, request: Any) -> None:
        """Like vLLM, from a folder, and over an adapter of the same number only if told so."""
        assert request.load_inplace
        about = json.loads((Path(request.path) / "adapter_config.json").read_text())
        tensors = load_file(Path(request.path) / "adapter_model.safetensors")
        weights = dict(self.model.named_parameters())
        for a in (name for name in tensors if name.endswith(".lora_A.weight")):
            name = a.removeprefix("base_model.model.").replace(".lora_A.", ".")
            base = self.base.setdefault(name, weights[name].clone())
            change = tensors[a.replace(".lora_A.", ".lora_B.")] @ tensors[a]
            weights[name].copy_(base + change * about["lora_alpha"] / about["r"])

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.queue.pop(name, None)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self, method)(*args)]

    def get_model(self) -> Any:
        return self.model

    def reload_weights(self, weights_iterator: Any) -> None:
        named = {n: t.clone() for n, t in weights_iterator if not (self.head_stays and n.startswith("lm_head"))}
        self.model.load_state_dict(named, strict=False)
        self.base = {}  # vLLM forgets its adapters
        self.loads += 1

    def sleep(self, level: int) -> None:
        assert not self.queue
        self.slept.append(level)
        if level == 2:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

    def wake_up(self) -> None: ...

    @torch.no_grad()
    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, params, made) in list(self.queue.items()):
            with _plain(self.model):
                logits = self.model(torch.tensor([[*prompt, *made]]), use_cache=False).logits[0].float()
            if self.kept is not None:
                self.kept.update([0], [(0, params, prompt, made)], [])
                logits[-1:] = self.kept.truncate(logits[-1:])
            scores = (logits / (params.temperature or 1.0)).log_softmax(-1)
            token = int(scores[-1].argmax())
            if scores[-1].isinf().any():  # truncated: the least likely of what is left
                token = int(scores[-1].masked_fill(scores[-1].isinf(), 0.0).argmin())
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
    return SimpleNamespace(**{"stop_token_ids": None, "extra_args": None, **how})


def make(model: Any, sleep_level: int = 1, **fake: Any) -> tuple[VLLMEngine, FakeVLLM]:
    llm = FakeVLLM(model, **fake)
    options = {"kept": llm.kept, "sleep_level": sleep_level}
    return VLLMEngine(llm, params, model, eos_ids=[2], max_len=64, **options), llm


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


def test_a_stop_string_that_the_last_token_allowed_completes_is_a_stop(model: Any) -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(f"<{token}>" for token in tokens))
    said = roll(make(model)[0], asked(1, max_tokens=4, ignore_eos=True))[0, 0].tokens
    ends = asked(1, max_tokens=4, ignore_eos=True, stop_strings=(tokenizer.decode(said),))
    engine = VLLMEngine(FakeVLLM(model), params, model, eos_ids=[2], max_len=64, tokenizer=tokenizer)
    made, wanted = roll(engine, ends), roll(HFEngine(model, eos_ids=[2], tokenizer=tokenizer), ends)
    assert made[0, 0].finish == wanted[0, 0].finish == "stop"
    assert made[0, 0].tokens == wanted[0, 0].tokens and len(made[0, 0].tokens) == 4


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


def test_keys_and_values_of_other_weights_are_not_found(model: Any) -> None:
    """Where requests run, vLLM does not forget its prefix cache; a salt keeps versions apart."""
    engine, llm = make(model)
    for version in (0, 1):
        if version:
            engine.load(None, version)
        engine.submit(Request(version, [5, 6, 7], Sampling(max_tokens=9, ignore_eos=True), n=2))
        engine.step()
    first, second = ({llm.salts[n] for n in llm.queue if n.startswith(f"{i}/")} for i in (0, 1))
    assert len(first) == len(second) == 1 and first != second


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


def test_a_sleeping_engine_lets_go_of_what_is_cancelled_or_paused_and_wakes_for_the_rest(model: Any) -> None:
    engine, _ = make(model)
    wanted = {key: c.tokens for key, c in roll(engine, asked(3)).items()}
    for request in asked(3):
        engine.submit(request)
    engine.step()
    engine.sleep()
    engine.cancel(1)
    assert engine.has_work
    done = roll(engine, [])
    assert not engine.is_asleep and len(done) == 6
    assert {key for key, c in done.items() if c.finish == "cancelled"} == {(1, 0), (1, 1)}
    assert {k: c.tokens for k, c in done.items() if k[0] != 1} == {k: v for k, v in wanted.items() if k[0] != 1}
    engine.submit(asked(1)[0])
    engine.sleep()
    assert len(engine.pause()) == 2 and not engine.has_work


def test_at_level_2_the_weights_come_with_the_next_load_and_only_once(model: Any) -> None:
    learner = copy.deepcopy(model)
    engine, llm = make(learner, sleep_level=2)
    wanted = {key: c.tokens for key, c in roll(engine, asked(2)).items()}
    for request in asked(2):
        engine.submit(request)
    engine.step()
    engine.sleep()
    assert llm.slept == [2]
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(1.02)
    engine.wake()
    assert llm.loads == 0
    engine.load(None, 1)
    assert llm.loads == 1 and all(torch.equal(a, b) for a, b in zip(learner.parameters(), llm.model.parameters()))
    done = roll(engine, [])
    assert len(done) == 4 and all(c.versions == [0] + [1] * (len(c.tokens) - 1) for c in done.values())
    engine.sleep()
    engine.wake()
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.div_(1.02)
    assert {key: c.tokens for key, c in roll(engine, asked(2)).items()} == wanted  # no load came: the learner's of now
    assert llm.loads == 2


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_that_comes_in_its_sleep_is_served_after_waking(model: Any, level: int) -> None:
    learner = copy.deepcopy(model)
    engine, llm = make(learner, sleep_level=level)
    engine.sleep()
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(1.1)
    engine.load(None, 1)
    assert llm.loads == 0  # asleep, there is nowhere to put them
    engine.wake()
    done = roll(engine, asked(2))
    assert llm.loads == 1 and all(torch.equal(a, b) for a, b in zip(learner.parameters(), llm.model.parameters()))
    assert all(set(c.versions) == {1} for c in done.values())


def test_after_level_2_a_load_of_some_weights_brings_the_others_too(model: Any) -> None:
    engine, llm = make(model, sleep_level=2)
    engine.sleep()
    engine.wake()
    engine.load([(n, p) for n, p in model.named_parameters() if "layers.0." in n], 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), llm.model.parameters()))


@pytest.mark.parametrize("how", [{"top_p": 0.9}, {"logit_bias": {3: 1.0}}, {"allowed_tokens": (3, 4)}], ids=str)
def test_what_vllm_cannot_account_for_is_an_error_of_that_request_alone(model: Any, how: dict[str, Any]) -> None:
    engine, _ = make(model)
    bad = Request(7, [5, 6], Sampling(**how), n=1)
    done = roll(engine, [bad, *asked(1)])
    assert done[7, 0].finish == "error" and "native" in (done[7, 0].error or "")
    assert done[0, 0].finish in ("stop", "length")


@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.5, "temperature": 0.7}, {"min_p": 0.3}], ids=str)
def test_the_mass_that_truncation_keeps_is_recorded(model: Any, how: dict[str, Any]) -> None:
    """Log-probabilities are of the whole distribution, as with the other engines, also after a pause."""
    engine, _ = make(model, kept=KeptMass())
    plain = Request(9, [5, 6, 7], Sampling(temperature=0.0, max_tokens=9), n=2)
    for request in [*asked(2, **{"temperature": 1.0, **how}), plain]:
        engine.submit(request)
    early = engine.step() + engine.step()
    engine.resume(engine.pause())
    done = [*early, *roll(engine, []).values()]
    truncated = [c for c in done if c.kept is not None]
    assert len(truncated) == 4 and len(done) == 6
    for completion in truncated:
        start, heat = len(completion.request.prompt), completion.request.sampling.temperature
        with torch.no_grad(), _plain(model):
            ids = torch.tensor([[*completion.request.prompt, *completion.tokens]])
            logits = model(ids, use_cache=False).logits[0, start - 1 : -1].float() / heat
        whole = logits.log_softmax(-1)
        np.testing.assert_allclose(completion.logprobs, whole.gather(1, ids[0, start:, None])[:, 0].numpy(), atol=1e-4)
        for row, kept in zip(whole, completion.kept or ()):
            p = row.exp().sort(descending=True).values
            p[how.get("top_k", len(p)) :] = 0
            p[(p.cumsum(0) - p) >= how.get("top_p", 2.0) * p.sum()] = 0
            p[p < how.get("min_p", 0.0) * p[0]] = 0
            assert kept == pytest.approx(float(p.sum().log()), abs=1e-4)
    assert engine.kept is not None and not engine.kept._kept and not engine.kept._asked


def test_the_mass_follows_rows_that_vllm_moves() -> None:
    kept, logits = KeptMass(), torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    hows = {"a": Sampling(top_k=1), "b": Sampling(top_k=2), "c": Sampling()}
    for name, how in hows.items():
        kept.expect(name, how)
    rows = [(i, params(extra_args={"tidemill": name}), [], [9] * i) for i, name in enumerate(hows)]
    kept.update([], rows, [])
    assert kept.truncate(logits.clone()).isfinite().sum(1).tolist() == [1, 2, 20, 20]
    kept.update([], [], [(0, 3, False), (1, 2, True)])
    assert kept.truncate(logits.clone()).isfinite().sum(1).tolist() == [20, 20, 2, 1]
    kept.update([3], [], [])
    assert kept.truncate(logits.clone()).isfinite().sum(1).tolist() == [20, 20, 2, 20]
    best = logits.log_softmax(-1).sort(1, descending=True).values
    assert kept.of("a", 0, 1) == pytest.approx([float(best[3, 0])])  # written twice; the later one counts
    assert kept.of("b", 1, 1) == pytest.approx([float(best[2, :2].logsumexp(0))])


@pytest.mark.parametrize(("version", "is_old"), [("0.19.3", True), ("0.20.0", False), ("0.32.0+cpu", False),
                                                 ("1.0", False), ("0.1.dev1+g3a", False), ("dev", False)])  # fmt: skip
def test_a_vllm_that_is_too_old_is_refused_by_name(version: str, is_old: bool) -> None:
    if is_old:
        with pytest.raises(ModelError, match=r"0\.20 or newer; 0\.19\.3"):
            check_version(version)
    else:
        check_version(version)


def test_a_cancelled_request_leaves_nothing_behind(model: Any) -> None:
    engine, llm = make(model)
    for request in asked(2):
        engine.submit(request)
    engine.step()
    engine.cancel(0)
    assert all(name.startswith("1/") for name in llm.queue)
    assert [c.finish for c in engine.step() if c.request.id == 0] == ["cancelled"] * 2


def test_the_bias_that_experts_are_chosen_by_goes_with_the_weights_and_our_own_does_not() -> None:
    model = torch.nn.Module()
    model.gate = torch.nn.Module()
    model.gate.register_buffer("e_score_correction_bias", torch.ones(4))
    model.gate.register_buffer("tide_bias", torch.ones(4))
    assert list(_router_biases(model)) == ["gate.e_score_correction_bias"]


def test_weights_stay_replaceable_on_npus_unless_told_otherwise() -> None:
    assert options_of("cuda", {"seed": 1}) == {"seed": 1}
    assert options_of("npu", {})["additional_config"] == {"weight_nz_mode": 0}
    given = {"additional_config": {"weight_nz_mode": 1, "refresh": True}}
    assert options_of("npu", given) == given


def test_an_argument_that_vllm_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def llm(*, model: str, load_format: str, **known: Any) -> Any:
        if "quantisation" in known:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'quantisation'")

    modules = {
        "vllm": SimpleNamespace(LLM=llm, SamplingParams=None, __version__="0.24.0"),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(ConfigError, match=r"(?s)vLLM 0.24.0: .*'quantisation'.*rollout.vllm.args"):
        start(tiny_model("qwen2"), eos_ids=[2], max_len=32, max_seqs=4, quantisation="fp8")
