"""vLLM in an interpreter of its own gives what it gives in this one: over a stand-in of vLLM's package, which only that
interpreter has. `make test-vllm` does the same with vLLM itself."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cluster.runs import measured, train
from tests.rollout.test_vllm import FakeVLLM, asked, params
from tests.rollout.test_vllm_adapter import learn, learner
from tests.rollout.tiny import roll, tiny_model

from tidemill.errors import ConfigError, InterpreterError, TidemillError
from tidemill.models import lora
from tidemill.rollout.vllm.engine import VLLMEngine, start
from tidemill.rollout.vllm.kept import KeptMass

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def python_with(folder: Path, *packages: Path) -> str:
    """An interpreter that finds `packages`, too."""
    path = folder / "python"
    found = ":".join(map(str, packages))
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{found}" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with(tmp_path_factory.mktemp("python"), ROOT, HERE / "stand_in")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(model: Any, python: str) -> Iterator[VLLMEngine]:
    """Tests leave it as they found it: starting it takes seconds."""
    engine = start(copy.deepcopy(model), eos_ids=[2], max_len=64, max_seqs=8, python=python, truncates=True)
    yield engine
    engine.close()


def here(model: Any) -> VLLMEngine:
    """The same in this interpreter."""
    kept = KeptMass()
    return VLLMEngine(FakeVLLM(model, kept=kept), params, model, eos_ids=[2], max_len=64, kept=kept)


def assert_alike(made: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert made.keys() == wanted.keys()
    for key, completion in wanted.items():
        assert (made[key].tokens, made[key].finish) == (completion.tokens, completion.finish)
        np.testing.assert_allclose(made[key].logprobs, completion.logprobs, atol=1e-6)
        np.testing.assert_allclose(made[key].kept or [], completion.kept or [], atol=1e-6)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.0, "top_p": 0.6, "min_p": 0.05}]
)
def test_what_it_makes_is_what_this_interpreter_makes(engine: VLLMEngine, model: Any, how: dict[str, Any]) -> None:
    assert engine.parity is not None and engine.parity.max < 1e-4  # the weights went over
    made = roll(engine, asked(**how))
    assert_alike(made, roll(here(model), asked(**how)))
    assert bool(next(iter(made.values())).kept) == bool(how)


def test_plain_and_truncated_samples_go_side_by_side_and_new_ones_come_while_they_run(
    engine: VLLMEngine, model: Any
) -> None:
    def both(engine: VLLMEngine) -> dict[Any, Any]:
        first, *rest = [*asked(2), *asked(4, temperature=0.9, top_k=4)[2:]]
        engine.submit(first)
        done = engine.step()
        for request in rest:
            engine.submit(request)
        return roll(engine, []) | {(c.request.id, c.index): c for c in done}

    assert_alike(both(engine), both(here(model)))


def test_updates_pauses_and_sleep_reach_it(engine: VLLMEngine) -> None:
    before = {key: c.tokens for key, c in roll(engine, asked(2)).items()}
    for request in asked(2):
        engine.submit(request)
    engine.step()
    engine.cancel(1)
    partials = engine.pause()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.2)
    engine.load(None, 1)
    assert engine.parity is not None and engine.parity.max < 1e-4
    engine.resume(partials)
    engine.sleep()
    done = roll(engine, [])
    assert {key: c.finish for key, c in done.items() if key[0] == 1} == {(1, 0): "cancelled", (1, 1): "cancelled"}
    assert all(c.versions == [0] + [1] * (len(c.tokens) - 1) for c in done.values() if c.request.id == 0)
    some = {"lm_head.weight": engine.model.lm_head.weight}
    engine.load(some, 2)  # a part of them, through memory of its own
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.div_(1.2)
    engine.load(None, 3)
    assert {key: c.tokens for key, c in roll(engine, asked(2)).items()} == before


def test_one_of_16_bits_gets_its_weights_and_when_killed_is_named_with_what_killed_it(python: str) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    engine = start(model, eos_ids=[2], max_len=64, max_seqs=8, python=python)
    assert engine.parity is not None and engine.parity.max < 0.02  # rounding; other weights are whole nats away
    os.kill(engine.llm._process.process.pid, signal.SIGKILL)
    engine.submit(asked(1)[0])
    with pytest.raises(InterpreterError, match="vLLM's process was killed by SIGKILL"):
        engine.step()
    engine.close()


def test_adapters_go_over_as_adapters(python: str) -> None:
    model = learner()
    engine = start(model, eos_ids=[2], max_len=64, max_seqs=8, python=python)
    own = sum(tensor.nbytes for tensor in lora.adapters(model).values())
    for version in (1, 2):
        learn(model, version)
        engine.load(None, version)
        assert engine.brought_bytes == own
        assert engine.parity is not None and engine.parity.max < 1e-4
    assert len(roll(engine, asked(2))) == 4
    engine.close()


def test_an_interpreter_that_has_no_vllm_or_is_not_there_is_named(model: Any, python: str, tmp_path: Path) -> None:
    given = {"eos_ids": [2], "max_len": 64, "max_seqs": 8}
    with pytest.raises(ConfigError, match=r"rollout.vllm.python: there is no Python at .*nowhere"):
        start(model, python=str(tmp_path / "nowhere"), **given)
    with pytest.raises(TidemillError, match=r"rollout.engine=vllm needs vLLM"):
        start(model, python=python_with(tmp_path), **given)
    with pytest.raises(TidemillError, match=r"unexpected keyword argument 'quantisation'"):
        start(model, python=python, quantisation="fp8", **given)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["local", "processes"])
def test_a_run_learns_from_what_it_makes(tmp_path: Path, python: str, executor: str) -> None:
    rollout = {"engine": "vllm", "top_k": 5, "max_new_tokens": 6, "vllm": {"python": python, "sleep_level": 2}}
    steps = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2}
    train(tmp_path, cluster={"executor": executor}, rollout=rollout, train=steps)
    lines = [line for line in measured(tmp_path) if "loss" in line]
    assert [line["version"] for line in lines] == [2, 4]  # two updates a step
    assert all(line["mismatch/vllm/max"] < 1e-3 and 0 < line["kept_mass"] <= 1 for line in lines)
