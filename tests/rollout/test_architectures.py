"""Greedy tokens of the native engine equal the reference's, for every architecture in docs/models.md."""

from __future__ import annotations

import numpy as np
import pytest
from tests.rollout.tiny import MODELS, VOCAB, roll, tiny_model

from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_equal_the_reference(name: str) -> None:
    model = tiny_model(name)
    rng = np.random.default_rng(1)
    requests = [
        Request(i, rng.integers(3, VOCAB, length).tolist(), Sampling(temperature=0, max_tokens=14), n=1 + i % 2)
        for i, length in enumerate([1, 5, 5, 13, 30])
    ]
    wanted = roll(HFEngine(model, eos_ids=[2]), requests)
    # A page of 4 and few tokens a step: several pages, shared ones, chunked prompts beside running sequences.
    made = roll(NativeEngine(model, eos_ids=[2], max_seqs=5, max_len=64, page_size=4, step_tokens=10), requests)
    assert made.keys() == wanted.keys()
    for key, completion in made.items():
        assert completion.tokens == wanted[key].tokens, key
        assert completion.finish == wanted[key].finish
        np.testing.assert_allclose(completion.logprobs, wanted[key].logprobs, atol=1e-4)
