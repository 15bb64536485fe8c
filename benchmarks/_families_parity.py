"""Parity of one tiny model with the same in transformers alone: of rollout by tokens, of the learner by gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._families_tiny import VOCAB
from tidemill.batch import Batch, Column
from tidemill.learn.forward import forward
from tidemill.learn.rows.packing import pack
from tidemill.models.attention.contexts import choose
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.hf import HFEngine
from tidemill.rollout.native.engine import NativeEngine

EOS = 2
TEMPERATURE = 0.7
CLOSE = 2e-4  # of a log-probability
NEAR = 1e-4  # of a gradient, relative to the norm of all of it
# Prompts that cross pages and steps; some are groups.
LENGTHS, TOKENS = (1, 5, 5, 13, 30), 14
FEW: dict[str, Any] = {"max_seqs": 5, "max_len": 96, "page_size": 4, "step_tokens": 10}

Samples = dict[tuple[int, int], Completion]


def make_engine(model: Any, **how: Any) -> NativeEngine:
    return NativeEngine(model, eos_ids=[EOS], **{**FEW, **how})


def check(ours: Any, theirs: Any) -> None:
    """Raise AssertionError at the first number that differs."""
    requests = _requests()
    wanted = _roll(HFEngine(theirs, eos_ids=[EOS]), requests)
    _same(_roll(make_engine(ours), requests), wanted, "rollout")
    for keeps in (False, True):
        _same(_roll(make_engine(ours), requests, pause_after=7, keeps=keeps), wanted, f"after a pause ({keeps=})")
    _turns(ours, theirs, wanted)
    _learner(ours, theirs)


def _requests() -> list[Request]:
    rng = np.random.default_rng(1)
    how = Sampling(temperature=0, max_tokens=TOKENS)
    return [Request(i, rng.integers(3, VOCAB, n).tolist(), how, n=1 + i % 2) for i, n in enumerate(LENGTHS)]


def _roll(engine: Any, requests: Iterable[Request], pause_after: int = 0, keeps: bool = False) -> Samples:
    for request in requests:
        engine.submit(request)
    done: Samples = {}
    steps = 0
    while engine.has_work:
        for completion in engine.step():
            done[completion.request.id, completion.index] = completion
        steps += 1
        if steps == pause_after:
            engine.resume(engine.pause(keep_cache=keeps))
    return done


def _same(made: Samples, wanted: Samples, what: str) -> None:
    assert made.keys() == wanted.keys(), what
    for key, completion in made.items():
        assert completion.finish != "error", f"{what}: {completion.error}"
        assert completion.tokens == wanted[key].tokens, f"{what}: tokens of sample {key}"
        gap = np.abs(np.array(completion.logprobs) - np.array(wanted[key].logprobs)).max()
        assert gap < CLOSE, f"{what}: log-probabilities of sample {key} differ by {gap:.1e}"


def _turns(ours: Any, theirs: Any, first: Samples) -> None:
    """Each sample goes on behind a few tokens more, three times, with what the engine remembers of the turns before."""
    engine = make_engine(ours, reuse_prefix=True)
    how = Sampling(temperature=0, max_tokens=5)
    rng = np.random.default_rng(2)
    texts = [list(one.request.prompt) for key, one in sorted(first.items()) if key[1] == 0][:3]
    for turn in range(3):
        requests = [Request(10 * turn + i, text, how) for i, text in enumerate(texts)]
        made = _roll(engine, requests)
        _same(made, _roll(HFEngine(theirs, eos_ids=[EOS]), requests), f"turn {turn + 1}")
        more = rng.integers(3, VOCAB, 3).tolist()
        texts = [[*text, *made[10 * turn + i, 0].tokens, *more] for i, text in enumerate(texts)]


def _learner(ours: Any, theirs: Any) -> None:
    for what, gap, apart in learner_gaps(ours, theirs):
        assert gap < CLOSE, f"{what}: log-probabilities differ by {gap:.1e}"
        assert apart < NEAR, f"{what}: gradients differ by {apart:.1e}"


def learner_gaps(ours: Any, theirs: Any) -> Iterator[tuple[str, float, float]]:
    """By how much log-probabilities and their gradient of packed samples differ from those of each alone, with a shared
    prompt and without."""
    batch, device = _batch(), next(ours.parameters()).device
    wanted, wanted_grads = _alone(theirs, batch)
    config = Config.model_validate({"algorithm": "grpo", "rollout": {"temperature": TEMPERATURE}})
    for shares in (True, False):
        what = "learner with shared prompts" if shares else "learner"
        ours.zero_grad()
        logprobs, _ = forward(ours, pack(batch, device, shares, choose(ours)), config)
        (logprobs * _weights(logprobs)).sum().backward()
        grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
        assert grads.keys() == wanted_grads.keys(), f"{what}: gradients of {grads.keys() ^ wanted_grads.keys()}"
        apart = _norm(grads[name] - wanted_grads[name] for name in grads) / _norm(wanted_grads.values())
        yield what, (logprobs - wanted).abs().max().item(), apart


def _batch() -> Batch:
    """Three groups of three, of all lengths; one response has a single token."""
    rng = np.random.default_rng(3)
    rows, prompts, groups = [], [], []
    for group, (prompt, responses) in enumerate([(4, (1, 9, 5)), (11, (3, 16, 2)), (4, (7, 6, 20))]):
        start = rng.integers(3, VOCAB, prompt).tolist()
        for n in responses:
            rows.append([*start, *rng.integers(3, VOCAB, n).tolist()])
            prompts.append(prompt)
            groups.append(group)
    return Batch(
        {
            "id": np.arange(len(rows)),
            "group": np.array(groups),
            "tokens": Column.jagged(rows, np.int32),
            "prompt_length": np.array(prompts, np.int32),
        }
    )


def _weights(logprobs: Tensor) -> Tensor:
    """So that no token's gradient can stand in for another's."""
    return torch.linspace(-1.0, 1.0, len(logprobs), device=logprobs.device)


def _alone(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Every sample by itself through transformers' own forward pass."""
    found = []
    for row in range(batch.rows):
        tokens = torch.from_numpy(batch["tokens"][row].astype(np.int64)).to(model.device)
        first = int(batch.values("prompt_length")[row])
        scores = (model(input_ids=tokens[None], use_cache=False).logits[0].float() / TEMPERATURE).log_softmax(-1)
        found.append(scores[first - 1 : -1].gather(1, tokens[first:, None])[:, 0])
    logprobs = torch.cat(found)
    model.zero_grad()
    (logprobs * _weights(logprobs)).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.double().pow(2).sum() for t in tensors]).sum().sqrt())
