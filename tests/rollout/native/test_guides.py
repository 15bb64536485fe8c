"""Grammars, likeliest tokens, and tokens told as they are made: the same on the host, in graphs, in the reference."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.rollout.native.test_graphs import DEVICE, HAS_DEVICE, ahead
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.models.tiny import make_tokenizer
from tidemill.recipe.config import TinyModel
from tidemill.rollout.engine import Completion, Fresh, Grammar, Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine

pytest.importorskip("llguidance")
ALPHABET = '0123456789{}[]":,.- abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps({**SCHEMA, "x-guidance": {"whitespace_flexible": False}}))
WORDS = make_tokenizer(TinyModel(alphabet=ALPHABET))
EOS = 1


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    assert len(WORDS) <= VOCAB
    return tiny_model("qwen3")


def asked(count: int = 4, n: int = 2, **how: Any) -> list[Request]:
    options = {"max_tokens": 40, "grammar": JSON, "seed": 3, **how}
    return [Request(i, [5 + i, 6, 7], Sampling(**options), n=n) for i in range(count)]


def texts(done: dict[tuple[int, int], Completion]) -> list[str]:
    return [WORDS.decode(c.tokens, skip_special_tokens=True) for _, c in sorted(done.items())]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_response_fits_its_schema(model: torch.nn.Module, temperature: float) -> None:
    engine = NativeEngine(model, eos_ids=[EOS], max_seqs=8, max_len=64, tokenizer=WORDS)
    done = roll(engine, asked(temperature=temperature))
    for text in texts(done):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(c.finish == "stop" and c.tokens[-1] == EOS for c in done.values())


def test_log_probabilities_stay_the_models_own_and_the_mass_kept_is_recorded(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[EOS], max_seqs=8, max_len=64, tokenizer=WORDS)
    wanted = roll(HFEngine(model, eos_ids=[EOS], tokenizer=WORDS), asked())
    for key, made in roll(engine, asked()).items():
        assert made.tokens == wanted[key].tokens
        np.testing.assert_allclose(made.logprobs, wanted[key].logprobs, atol=1e-4)
        assert made.kept is not None and max(made.kept) <= 1e-6 and min(made.kept) < -0.1
        np.testing.assert_allclose(made.kept, wanted[key].kept, atol=1e-4)


def test_grammars_are_followed_beside_plain_rows_in_graphs_and_through_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    plain = [Request(10 + i, [9, 9 + i], Sampling(max_tokens=20, seed=3), n=2) for i in range(2)]
    mixed = [*asked(2), *plain, *asked(2, temperature=0.0)]
    mixed = [Request(i, r.prompt, r.sampling, n=r.n) for i, r in enumerate(mixed)]
    wanted = roll(NativeEngine(model, eos_ids=[EOS], max_len=64, tokenizer=WORDS, plain=True), mixed)
    engine = ahead(monkeypatch, model, eos_ids=[EOS], tokenizer=WORDS)
    for request in mixed:
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    for _ in range(3):
        for completion in [c for _ in range(5) for c in engine.step()]:
            done[completion.request.id, completion.index] = completion
        engine.resume(engine.pause())
    done |= roll(engine, [])
    assert {k: c.tokens for k, c in done.items()} == {k: c.tokens for k, c in wanted.items()}


def test_a_regular_expression_and_a_lark_grammar_are_followed(model: torch.nn.Module) -> None:
    engine = NativeEngine(model, eos_ids=[EOS], max_seqs=8, max_len=64, tokenizer=WORDS)
    for grammar, pattern in (
        (Grammar("regex", "[ab]{3}-[0-9]"), "[ab]{3}-[0-9]"),
        (Grammar("lark", 'start: "x" /y+/ "z"'), "xy+z"),
    ):
        for text in texts(roll(engine, asked(2, grammar=grammar))):
            assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_grammar_that_cannot_be_read_costs_its_request_alone(model: torch.nn.Module, engine: str) -> None:
    options: dict[str, Any] = {"eos_ids": [EOS], "max_len": 64, "tokenizer": WORDS}
    made = NativeEngine(model, **options) if engine == "native" else HFEngine(model, **options)
    bad = [Grammar("json_schema", '{"type": "what"}'), Grammar("lark", "start: ("), Grammar("json_schema", "{")]
    requests = [Request(i, [5, 6], Sampling(grammar=each, max_tokens=4)) for i, each in enumerate(bad)]
    done = roll(made, [*requests, Request(9, [5, 6], Sampling(max_tokens=4))])
    assert [done[i, 0].finish for i in range(3)] == ["error"] * 3 and "grammar" in str(done[0, 0].error)
    assert done[9, 0].finish != "error"


def test_without_a_tokenizer_a_grammar_is_refused(model: torch.nn.Module) -> None:
    (made,) = roll(NativeEngine(model, eos_ids=[EOS], max_len=64), asked(1, n=1)).values()
    assert made.finish == "error" and "needs a tokenizer" in str(made.error)


def test_the_likeliest_tokens_are_given_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    hows = [{"top_logprobs": 5}, {}, {"top_logprobs": 2, "temperature": 0.5}, {"top_logprobs": 3, "top_k": 4}]
    requests = [Request(i, [5, 6, 7 + i], Sampling(max_tokens=7, **how), n=2) for i, how in enumerate(hows)]
    wanted = roll(HFEngine(model, eos_ids=[EOS]), requests)
    engines = [NativeEngine(model, eos_ids=[EOS], max_len=64), ahead(monkeypatch, model, eos_ids=[EOS])]
    for engine in engines:
        for key, made in roll(engine, requests).items():
            asked_for = hows[key[0]].get("top_logprobs", 0)
            if not asked_for:
                assert made.tops is None
                continue
            assert made.tops is not None and [len(top) for top in made.tops] == [asked_for] * len(made.tokens)
            for ours, theirs in zip(made.tops, wanted[key].tops or ()):
                assert [t for t, _ in ours] == [t for t, _ in theirs]
                np.testing.assert_allclose(
                    [p for _, p in ours], [p for _, p in theirs], atol=5e-3 if HAS_DEVICE else 1e-4
                )


@pytest.mark.parametrize(
    "how", [{"frequency_penalty": 1.5}, {"frequency_penalty": -0.7, "presence_penalty": 0.5}], ids=str
)
def test_tokens_that_came_often_are_drawn_less(monkeypatch: pytest.MonkeyPatch, how: dict[str, float]) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    requests = [Request(i, [5, 6, 7 + i], Sampling(max_tokens=25, **how), n=2) for i in range(3)]
    wanted = {k: c.tokens for k, c in roll(HFEngine(model, eos_ids=[]), requests).items()}
    for engine in (NativeEngine(model, eos_ids=[], max_len=64), ahead(monkeypatch, model, eos_ids=[])):
        assert {k: c.tokens for k, c in roll(engine, requests).items()} == wanted


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_are_told_once_each_as_they_are_made(monkeypatch: pytest.MonkeyPatch, is_ahead: bool) -> None:
    model = tiny_model("qwen3").to(DEVICE)
    engine = ahead(monkeypatch, model, eos_ids=[EOS]) if is_ahead else NativeEngine(model, eos_ids=[EOS], max_len=64)
    told: dict[int, list[tuple[int, float]]] = {}

    def hear(fresh: Fresh) -> None:
        for stream, token, logprob in zip(fresh.streams.tolist(), fresh.tokens.tolist(), fresh.logprobs.tolist()):
            told.setdefault(stream, []).append((token, logprob))

    engine.on_tokens = hear
    quiet = Request(7, [5, 5], Sampling(max_tokens=9))
    for request in [Request(i, [5, 6, 7 + i], Sampling(max_tokens=9), n=2, stream=100 * i) for i in range(3)] + [quiet]:
        engine.submit(request)
    done: dict[tuple[int, int], Completion] = {}
    for step in range(60):
        for completion in engine.step() if engine.has_work else ():
            done[completion.request.id, completion.index] = completion
        if step in (3, 6):
            engine.resume(engine.pause())
    del done[7, 0]
    assert len(done) == 6 and set(told) == {100 * id + k for id, k in done}
    for (id, k), completion in done.items():
        assert told[100 * id + k] == list(zip(completion.tokens, completion.logprobs))
