"""Whether the engine rolls a model out as transformers computes it, tried with a few tokens before the first request.

Families with a lean forward pass are known. Of any other model the cache is what could be wrong without an error: what
a layer keeps in it, for how many calls of one module, and what of a prompt's states goes to each of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.errors import ModelError
from tidemill.models.attention.registry import plain
from tidemill.models.modes import at_rest
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.forward.dense import DenseRunner
from tidemill.rollout.native.forward.runner import PlainRunner

if TYPE_CHECKING:
    from tidemill.rollout.native.engine import NativeEngine

PROMPT, MADE, SAMPLES = 6, 3, 2  # tokens; samples of one group
STRIDE = 7919  # between tried tokens, modulo the vocabulary
# Of a log-probability. A wrong cache shows in the second token made, in float32 by far more than rounding does.
MOST, MOST_ROUNDED = 2e-3, 0.25


def try_rollout(engine: NativeEngine) -> None:
    """Greedy tokens of a group must have the log-probabilities that transformers gives the whole text."""
    if not isinstance(engine.runner, PlainRunner | DenseRunner) or engine.eyes is not None:
        return
    if engine.max_len < PROMPT + MADE or engine.scheduler.max_seqs < SAMPLES:
        return
    kind = type(engine.model).__name__
    remedy = "docs/models.md lists models that work; rollout.engine=hf takes any, slowly"
    try:
        made = _roll(engine)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{kind} cannot be rolled out by the native engine: {why}", remedy) from error
    finally:
        engine.scheduler.forget()
    broken = [one.error for one in made if one.finish == "error"]
    if broken:
        raise ModelError(f"{kind} cannot be rolled out by the native engine: {broken[0]}", remedy)
    apart = max(_apart(engine.model, one) for one in made)
    is_exact = next(engine.model.parameters()).dtype == torch.float32 and engine.store.kind is None
    most = MOST if is_exact else MOST_ROUNDED
    if not apart < most:
        raise ModelError(
            f"{kind} gives other log-probabilities token by token than of the whole text (by {apart:.2g}): it keeps "
            "something between tokens that is not known",
            remedy,
        )


def _roll(engine: NativeEngine) -> list[Completion]:
    prompt = (np.arange(1, PROMPT + 1) * STRIDE % engine.vocab).tolist()
    how = Sampling(temperature=0, max_tokens=MADE, ignore_eos=True)
    engine.submit(Request(-1, prompt, how, n=SAMPLES))
    made: list[Completion] = []
    while engine.has_work:
        made += engine.step()
    return made


@torch.no_grad()
def _apart(model: Any, one: Completion) -> float:
    tokens = torch.tensor([*one.request.prompt, *one.tokens], device=next(model.parameters()).device)
    with plain(model), at_rest(model.modules()):
        scores = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
    theirs = scores[PROMPT - 1 : -1].gather(1, tokens[PROMPT:, None])[:, 0].cpu()
    return float((theirs - torch.tensor(one.logprobs)).abs().max())
