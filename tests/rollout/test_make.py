"""What a recipe asks of its engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.environment.test_turns import EOS, Echo, Words
from tests.rollout.tiny import tiny_model

from tidemill.environment.api import Task
from tidemill.environment.speech import Speech
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config, EnvironmentSettings
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.make import make_plain
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.turns import TurnsEngine


@pytest.mark.parametrize("environment", [None, {"name": "nim"}])
def test_turns_are_read_once_where_there_are_some(environment: dict[str, str] | None) -> None:
    config = Config(environment=environment)  # type: ignore[arg-type]
    engine = make_plain(LoadedModel(tiny_model("qwen2"), None, (2,), 256), config)
    assert isinstance(engine, NativeEngine) and engine.reuse_prefix == (environment is not None)


def test_arguments_for_vllm_reach_it_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("tidemill.rollout.vllm.engine.start", lambda model, **options: told.update(options))
    settings = {"additional_config": {"weight_nz_mode": 0, "rl_config": {"enabled": True}}, "quantization": "fp8"}
    config = Config.model_validate({"rollout": {"engine": "vllm", "vllm": {"args": settings}}})
    make_plain(LoadedModel(tiny_model("qwen2"), None, (2,), 256), config)
    assert {name: told[name] for name in settings} == settings


def test_each_turn_reads_only_what_is_new() -> None:
    inner = NativeEngine(tiny_model("qwen2"), eos_ids=[EOS], max_seqs=4, max_len=256, page_size=4, reuse_prefix=True)
    read: list[tuple[int, int]] = []
    admit = inner.scheduler.admit

    def noted() -> list:  # type: ignore[type-arg]
        readings = admit()
        read.extend((reading.first, reading.last) for reading in readings)
        return readings

    inner.scheduler.admit = noted  # type: ignore[method-assign]
    playing = TurnsEngine(
        inner, EnvironmentSettings(name="nim", max_turn_tokens=6), Speech(Words(), is_chat=False), [EOS]
    )
    playing.make = lambda task, **args: Echo(task, **args)
    playing.submit(Request(5, list(range(20, 70)), Sampling(max_tokens=80, ignore_eos=True), task=Task("answer")))
    while playing.has_work:
        playing.step()
    assert len(read) == 3 and read[0] == (0, 50)
    for (_, before), (first, last) in pairwise(read):
        assert first >= before and last - first < 16  # the turn's tokens, and less than a page of those before
