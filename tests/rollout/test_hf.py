"""The reference engine answers for every request, also for those it cannot serve."""

from __future__ import annotations

import pytest
from tests.rollout.tiny import VOCAB, roll, tiny_model

from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.hf import HFEngine

BAD = {
    "no samples": (Request(7, [5], Sampling(max_tokens=3), n=0), "n is 0"),
    "a prompt too long": (Request(7, [5] * 12, Sampling(max_tokens=3)), "12 tokens"),
    "an unknown token": (Request(7, [VOCAB], Sampling(max_tokens=3)), str(VOCAB)),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_request_that_cannot_work_is_an_error_of_its_own(kind: str) -> None:
    bad, why = BAD[kind]
    engine = HFEngine(tiny_model("llama"), eos_ids=[2], max_len=12)
    good = Request(1, [5, 6], Sampling(max_tokens=3, temperature=0.0))
    done = {c.request.id: c for c in roll(engine, [bad, good]).values()}
    assert done[7].finish == "error" and why in (done[7].error or "")
    assert done[1].finish in ("stop", "length") and done[1].tokens and not engine.has_work


def test_a_cancelled_request_says_so() -> None:
    engine = HFEngine(tiny_model("llama"), eos_ids=[2], max_len=12)
    engine.submit(Request(3, [5, 6], Sampling(max_tokens=3), n=2))
    engine.cancel(3)
    assert [c.finish for c in engine.step()] == ["cancelled", "cancelled"] and not engine.has_work
