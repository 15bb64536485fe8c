"""LoRA adapters that vLLM serves as adapters, over the stand-in for vLLM. `make test-vllm` does the same over vLLM."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.cluster.ports import Copy
from tests.rollout.test_vllm import FakeVLLM, asked, params
from tests.rollout.tiny import roll, tiny_model
from torch import nn

from tidemill.models import lora
from tidemill.recipe.config import Config
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.make import make_apart
from tidemill.rollout.vllm.adapter import ServedAdapter, adapter_options, if_all_adapted, left_out, refusal
from tidemill.rollout.vllm.engine import VLLMEngine
from tidemill.rollout.vllm.worker import WeightLoader

RANK = 4


@dataclass(frozen=True)
class LoRARequest:
    name: str
    number: int
    path: str
    load_inplace: bool = False


def learner(kind: str = "llama", **how: Any) -> Any:
    model = copy.deepcopy(tiny_model(kind))
    lora.attach(model, RANK, 8.0, **how)
    return model


def learn(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in lora.adapters(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.1)


def make(model: Any, sleep_level: int = 1) -> tuple[VLLMEngine, FakeVLLM]:
    plain = copy.deepcopy(model)
    lora.detach(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()  # vLLM starts with weights of its own
    llm = FakeVLLM(plain)
    adapter = ServedAdapter(model, LoRARequest)
    engine = VLLMEngine(
        llm, params, model, eos_ids=[2], max_len=64, sleep_level=sleep_level, adapter=adapter
    )  # fmt: skip
    engine.load(None, 0)
    return engine, llm


def same_as_merged(engine: VLLMEngine, llm: FakeVLLM) -> bool:
    served = dict(llm.model.named_parameters())
    return all(torch.allclose(served[n], t, atol=1e-5) for n, t in lora.merged(engine.model).items())


def test_after_the_first_load_only_the_adapter_goes_to_vllm() -> None:
    engine, llm = make(learner())
    own = sum(tensor.nbytes for tensor in lora.adapters(engine.model).values())
    base = sum(tensor.nbytes for tensor in engine.model.parameters()) - own
    assert engine.brought_bytes == base + own and llm.loads == 1
    for version in (1, 2):
        learn(engine.model, version)
        engine.load(None, version)
        assert engine.brought_bytes == own and llm.loads == 1
        assert engine.parity is not None and engine.parity.max < 1e-4
        assert same_as_merged(engine, llm)


def test_requests_under_way_continue_with_the_new_adapter() -> None:
    engine, _ = make(learner())
    for request in asked(2):
        engine.submit(request)
    engine.step()
    learn(engine.model, 1)
    engine.load(None, 1)
    done = roll(engine, [])
    assert len(done) == 4 and all(c.versions == [0] + [1] * (len(c.tokens) - 1) for c in done.values())
    fresh, wanted = roll(engine, asked(2)), roll(HFEngine(engine.model, eos_ids=[2]), asked(2))
    assert {k: c.tokens for k, c in fresh.items()} == {k: c.tokens for k, c in wanted.items()}


@pytest.mark.parametrize(("level", "loads"), [(1, 1), (2, 2)])
def test_an_update_in_its_sleep_brings_base_weights_only_where_the_sleep_dropped_them(level: int, loads: int) -> None:
    engine, llm = make(learner(), sleep_level=level)
    engine.sleep()
    learn(engine.model, 1)
    engine.load(None, 1)
    engine.wake()
    done = roll(engine, asked(1))
    assert llm.loads == loads and all(set(c.versions) == {1} for c in done.values())
    assert same_as_merged(engine, llm)


def test_given_weights_are_served_without_the_adapter_and_the_learners_come_back() -> None:
    engine, llm = make(learner())
    learn(engine.model, 1)
    whole = lora.merged(engine.model)
    engine.load([(n, t) for n, t in whole.items() if "layers.0." in n], 1)
    assert same_as_merged(engine, llm) and llm.loads == 2
    engine.load(None, 2)
    assert same_as_merged(engine, llm) and llm.loads == 3


def test_a_rollout_worker_receives_the_adapters_tensors_alone() -> None:
    """While it works: the version is written aside and taken up between two tokens."""
    learned = learner()
    engine, llm = make(copy.deepcopy(learned))
    own = Copy(learned, engine.model, engine)
    for request in asked(1):
        engine.submit(request)
    engine.step()
    for version in (1, 2):
        learn(learned, version)
        received = own.port.receive(version).nbytes
        own.take_up(version)
        assert received == engine.brought_bytes == sum(t.nbytes for t in lora.adapters(learned).values())
        assert same_as_merged(engine, llm) and engine.version == version
        for name, weight in lora.merged(learned).items():
            torch.testing.assert_close(lora.merged(engine.model)[name], weight)
    assert {c.versions[-1] for c in roll(engine, []).values()} == {2}


@pytest.mark.parametrize(("is_taken", "rank"), [(True, RANK), (False, RANK), (True, 0)])
def test_a_copy_has_adapters_where_the_learner_has_them_and_the_engine_takes_them(
    monkeypatch: pytest.MonkeyPatch, is_taken: bool, rank: int
) -> None:
    adapter = object() if is_taken else None
    monkeypatch.setattr("tidemill.rollout.make.make_plain", lambda *_: SimpleNamespace(adapter=adapter))
    loaded: Any = SimpleNamespace(model=copy.deepcopy(tiny_model("llama")))
    config = Config.model_validate({"rollout": {"engine": "vllm"}, "learn": {"lora_rank": rank}})
    make_apart(loaded, config)
    assert lora.is_attached(loaded.model) == (is_taken and rank > 0)


@pytest.mark.parametrize(
    ("kind", "how", "options", "reason"),
    [
        ("llama", {"magnitudes": True}, {}, "learn.dora"),
        ("qwen3-moe", {}, {}, "learn.lora_experts=false"),
        ("qwen3-moe", {"experts": False}, {}, "on a CPU"),
        ("llama", {}, {"enable_lora": False}, "enable_lora: false"),
        ("llama", {}, {}, None),
    ],
)
def test_what_vllm_cannot_take_is_known_before_it_starts(
    kind: str, how: dict[str, Any], options: dict[str, Any], reason: str | None
) -> None:
    found = refusal(learner(kind, **how), options)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


def test_vllm_makes_room_for_the_rank_and_the_modules_that_learn() -> None:
    chosen = adapter_options(learner(modules=["q_proj", "down_proj"]))
    assert chosen["max_lora_rank"] == 8 and chosen["lora_target_modules"] == ["down_proj", "q_proj"]


def test_the_parts_of_a_fused_module_are_known_by_their_own_names() -> None:
    class Adapted(nn.Module):
        packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Module()])
            for name in ("qkv_proj", "o_proj"):
                wrapper = nn.Module()
                wrapper.base_layer = nn.Linear(2, 2)
                self.layers[0].add_module(name, wrapper)

    worker = WeightLoader()
    worker.model_runner = SimpleNamespace(get_model=Adapted)
    assert worker.tidemill_adapted() == [f"layers.0.{name}_proj" for name in "qkvo"]


def test_a_module_that_vllm_does_not_adapt_is_named_and_weights_go_merged(caplog: pytest.LogCaptureFixture) -> None:
    model = learner()
    wrapped = [n for n, m in model.named_modules() if isinstance(m, lora.LoraLinear)]
    assert left_out(model, [f"language_model.{name}" for name in wrapped]) == []
    engine = SimpleNamespace(collective_rpc=lambda _: [wrapped[1:3], wrapped[2:]])
    with caplog.at_level(logging.WARNING):
        assert if_all_adapted(ServedAdapter(model, LoRARequest), engine) is None
    assert wrapped[0] in caplog.text and "merged" in caplog.text
