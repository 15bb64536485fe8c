"""The reference engine: one request at a time through transformers' own cache and attention. Slow, short, and what the
other engines are compared with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.models.attention import registry as attention
from tidemill.models.calling import parameters_of
from tidemill.models.modes import at_rest
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.eyes import TilePixels
from tidemill.rollout.engine import Completion, Finish, Partial, Request, Top, load_part, run_callbacks, token_limit
from tidemill.rollout.native.check import RequestLimits, find_problem, refused
from tidemill.rollout.native.draw.guides import Grammars, Guides
from tidemill.rollout.native.draw.sampling import Draw, draw, is_steered, is_truncated, steer, stream_key

SLOT = np.zeros(1, np.int64)  # the one whose grammar is followed


class HFEngine:
    """Implements `RolloutEngine`; each `step` makes all samples of one request."""

    def __init__(self, model: Any, *, eos_ids: Sequence[int], max_len: int = 2048, tokenizer: Any = None) -> None:
        self.model = model
        self.eos_ids = set(eos_ids)
        self.max_len = max_len
        self.tokenizer = tokenizer
        self.version = 0
        vocab = int(model.get_output_embeddings().weight.shape[0])
        self.eyes = eyes.of(model)
        self.limits = RequestLimits(vocab, max_len, 1 << 62, tokenizer is not None, self.eyes)
        self.grammars = Grammars(tokenizer, vocab, list(eos_ids))
        self.waiting: deque[tuple[Request, list[Partial]]] = deque()
        self.ended: list[Completion] = []  # refused or cancelled: what the next step gives

    def submit(self, request: Request) -> None:
        problem = find_problem(request, self.limits) or self.grammars.problem(request.sampling.grammar)
        if problem:
            self.ended += refused(request, problem)
            return
        self.waiting.append((request, [Partial(request, i, [], [], []) for i in range(request.n)]))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.ended)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        done, self.ended = self.ended, []
        if not done and self.waiting:
            request, samples = self.waiting.popleft()
            with _plain(self.model):
                done = [completion for sample in samples for completion in self._complete(request, sample)]
        return run_callbacks(done, self.ended)

    def _complete(self, request: Request, sample: Partial) -> Iterator[Completion]:
        how, device = request.sampling, next(self.model.parameters()).device
        key = torch.tensor([stream_key(how.seed, request.draws_as, sample.index)], device=device)
        limit = min(token_limit(request, sample.index), self.max_len - len(request.prompt))
        cache: Any = None
        ids = torch.tensor([[*map(int, request.prompt), *sample.tokens]], device=device)
        finish: Finish = "length"
        shown = self._shown(request, ids)
        guides, tops = Guides(self.grammars), list[Top]()
        guides.seat(0, how.grammar, sample.tokens)
        while len(sample.tokens) < limit:
            given, shown = shown, {}
            before = len(request.prompt) + len(sample.tokens) - ids.shape[1]
            made = self.model(**self._inputs(ids, cache, before), **given)
            cache = made.get("past_key_values", made.get("cache_params"))
            logits = made.logits[:, -1]
            drawn = draw(logits, self._how(sample, key, logits, guides))
            if not torch.isfinite(drawn.logprobs).all():
                yield self._completion(sample, "error", "the model gave logits that are not numbers")
                return
            sample.tokens.append(int(drawn.tokens))
            if how.grammar is not None:
                guides.accept(SLOT, drawn.tokens.cpu().numpy())
            if drawn.tops is not None:
                tops.append(list(zip(drawn.tops[0][0].tolist(), drawn.tops[1][0].tolist())))
            sample.logprobs.append(float(drawn.logprobs))
            sample.versions.append(self.version)
            if drawn.kept is not None:
                sample.kept = [*(sample.kept or []), float(drawn.kept)]
            if self._stops(how, sample.tokens):
                finish = "stop"
                break
            ids = drawn.tokens.unsqueeze(1)
        yield replace(self._completion(sample, finish), tops=tops or None)

    def _inputs(self, ids: Tensor, cache: Any, before: int) -> dict[str, Any]:
        """What the model's own generation calls it with, behind `before` tokens that are in the cache. The model makes
        the cache itself: some have one of a kind of their own."""
        named, takes_more = parameters_of(self.model)
        given: dict[str, Any] = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        given["cache_params" if "cache_params" in named else "past_key_values"] = cache
        if self.eyes is None:  # a model that looks works positions out from what it is shown
            given["position_ids"] = torch.arange(before, before + ids.shape[1], device=ids.device)[None]
        return {name: value for name, value in given.items() if takes_more or name in named}

    def _shown(self, request: Request, ids: Tensor) -> dict[str, Any]:
        """The prompt's images, as the model's own forward pass takes them with the first tokens."""
        if self.eyes is None:
            return {}
        self.model.model.rope_deltas = None  # Qwen's model keeps those of the prompt before
        return self.eyes.foreign(TilePixels.of(request.tiles, ids.device), ids) if request.tiles else {}

    @staticmethod
    def _how(sample: Partial, key: Tensor, logits: Tensor, guides: Guides) -> Draw:
        how, tensor = sample.request.sampling, partial(torch.tensor, device=logits.device)
        seen = [*sample.request.prompt, *sample.tokens]
        steered = steer(logits[0], how, seen, sample.tokens).unsqueeze(0) if is_steered(how) else None
        if how.grammar is not None and steered is not None:
            allowed = torch.from_numpy(guides.allowed(SLOT)).to(logits.device)
            steered = steered.masked_fill(~allowed, -float("inf"))
        return Draw(
            key=key,
            position=tensor([len(sample.tokens)]),
            temperature=tensor([float(how.temperature) or 1.0]),
            all_greedy=how.temperature == 0,
            truncated=tensor([0]) if is_truncated(how) else None,
            top_k=tensor([min(how.top_k, 1 << 40) or 1 << 40]),
            top_p=tensor([float(how.top_p) if how.top_p < 1 else 2.0]),
            min_p=tensor([float(how.min_p)]),
            steered=steered,
            tops=how.top_logprobs,
        )

    def _stops(self, how: Any, tokens: list[int]) -> bool:
        if tokens[-1] in how.stop_tokens or (tokens[-1] in self.eos_ids and not how.ignore_eos):
            return True
        return bool(how.stop_strings) and any(stop in self.tokenizer.decode(tokens) for stop in how.stop_strings)

    @staticmethod
    def _completion(s: Partial, finish: Finish, error: str | None = None) -> Completion:
        return Completion(s.request, s.index, s.tokens, s.logprobs, s.versions, finish, error, s.kept)

    def pause(self) -> list[Partial]:
        partials = [sample for _, samples in self.waiting for sample in samples]
        self.waiting.clear()
        return partials

    def resume(self, partials: Sequence[Partial]) -> None:
        self.waiting += [(sample.request, [sample]) for sample in partials]

    def cancel(self, request_id: int) -> None:
        for request, samples in self.waiting:
            if request.id == request_id:
                self.ended += [self._completion(sample, "cancelled") for sample in samples]
        self.waiting = deque(item for item in self.waiting if item[0].id != request_id)

    def load(self, weights: Any, version: int) -> None:
        if weights is not None:
            load_part(self.model, weights)
        self.version = version

    def sleep(self) -> None:
        """Nothing is kept between requests."""

    def wake(self) -> None:
        """Nothing to take back."""


@contextmanager
def _plain(model: Any) -> Iterator[None]:
    """transformers' own attention and no dropout, whatever the model is otherwise used for."""
    with attention.plain(model), at_rest(model.modules()):
        yield
