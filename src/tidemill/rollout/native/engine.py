"""The native rollout engine: continuous batching over a paged cache, with the learner's own model.

A step reads some prompt tokens, advances every running sequence by one token and gives what finished. Sequences enter
and leave between steps; nothing waits for a batch to drain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.rollout.engine import Completion, Finish, Partial, Request, token_limit
from tidemill.rollout.native.attention import Chunk, Paged
from tidemill.rollout.native.cache import PagePool, PageStore
from tidemill.rollout.native.kernels import LANES, Kernels
from tidemill.rollout.native.kernels import load as load_kernels
from tidemill.rollout.native.rows import Rows
from tidemill.rollout.native.runner import PlainRunner, make_runner
from tidemill.rollout.native.sampling import Draw, Drawn, draw, steer, uniform_array
from tidemill.rollout.native.scheduler import Reading, Scheduler, Sequence, Trunk

# Prompt tokens read in one step. Larger products gain nothing on a CPU; running sequences would only wait longer.
STEP_TOKENS = 2048


class NativeEngine:
    """Implements `RolloutEngine`. `model` is a transformers causal LM loaded with attn_implementation="tidemill"; its
    tensors are read in place and never changed.

    `reuse_prefix` keeps the pages of finished sequences until their room is needed, so that the next turn of a
    conversation, or another request with the same beginning, reads only what is new. `plain` runs the module itself
    instead of the lean forward pass; `kernels` allows the compiled CPU kernels. Both are for comparison."""

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Many[int],
        max_seqs: int = 256,
        max_len: int = 2048,
        page_size: int = 16,
        cache_tokens: int | None = None,
        step_tokens: int = STEP_TOKENS,
        tokenizer: Any = None,
        reuse_prefix: bool = False,
        plain: bool = False,
        kernels: bool = True,
    ) -> None:
        parameter = next(model.parameters())
        self.device = parameter.device
        self.model = model
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.reuse_prefix = reuse_prefix
        self.version = 0
        self.vocab = int(model.get_output_embeddings().weight.shape[0])
        self.is_end = np.zeros(self.vocab, bool)
        self.is_end[[i for i in eos_ids if 0 <= i < self.vocab]] = True
        pages = -(-(cache_tokens or max_seqs * max_len) // page_size)
        self.pool = PagePool(pages, page_size)
        self.store = PageStore(pages, page_size, self.device)
        self.scheduler = Scheduler(self.pool, max_seqs, max_len, max(step_tokens, max_seqs + page_size))
        self.rows = Rows(self.scheduler, self.device)
        self.kernels = self._kernels(parameter) if kernels else None
        self.runner = make_runner(model, max_len, self.kernels, plain)
        # Inference mode saves bookkeeping per operation, but a foreign module may keep a tensor it makes.
        self._no_grad = torch.no_grad if isinstance(self.runner, PlainRunner) else torch.inference_mode
        self._refused: list[Completion] = []

    def _kernels(self, parameter: Tensor) -> Kernels | None:
        is_host_float = parameter.device.type == "cpu" and parameter.dtype == torch.float32
        return load_kernels() if is_host_float and self.pool.page_size % LANES == 0 else None

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that cannot work comes back from `step` as completions with finish="error"."""
        problem = self._problem(request)
        if problem:
            for index in range(max(request.n, 1)):
                self._refused.append(Completion(request, index, [], [], [], "error", problem))
            return
        members = deque(Sequence(request, index) for index in range(request.n))
        self.scheduler.add(Trunk(np.asarray(request.prompt, np.int64), members, is_sole=request.n == 1))

    def _problem(self, request: Request) -> str | None:
        how, prompt = request.sampling, np.asarray(request.prompt, np.int64)
        size = self.pool.page_size
        if request.n < 1:
            return f"n is {request.n}; a request needs at least one sample"
        if request.limits is not None and len(request.limits) != request.n:
            return f"limits has {len(request.limits)} entries for {request.n} samples"
        limits = [token_limit(request, i) for i in range(request.n)]
        total = min(len(prompt) + max(limits), self.max_len)
        if not len(prompt):
            return "the prompt is empty"
        if prompt.min() < 0 or prompt.max() >= self.vocab:
            odd = prompt.min() if prompt.min() < 0 else prompt.max()
            return f"the prompt holds token {odd}; the model knows 0 … {self.vocab - 1}"
        if len(prompt) >= self.max_len:
            return f"the prompt has {len(prompt)} tokens; with max_len {self.max_len} at most {self.max_len - 1} fit"
        if min(limits) < 1:
            return f"max_tokens is {min(limits)}; at least one token must be made"
        if -(-total // size) > self.pool.pages:
            return f"prompt and response may take {total} tokens; the cache has room for {self.pool.pages * size}"
        if how.temperature < 0 or not np.isfinite(how.temperature):
            return f"temperature is {how.temperature}; it must be 0 (greedy) or more"
        if not 0 < how.top_p <= 1 or how.top_k < 0 or not 0 <= how.min_p <= 1:
            got = f"top_p {how.top_p}, top_k {how.top_k}, min_p {how.min_p}"
            return f"{got}: top_p is in (0, 1], top_k at least 0, min_p in [0, 1]"
        return self._problem_of_tokens(request)

    def _problem_of_tokens(self, request: Request) -> str | None:
        how = request.sampling
        named = {
            "stop_tokens": how.stop_tokens,
            "logit_bias": tuple(how.logit_bias or ()),
            "allowed_tokens": how.allowed_tokens or (),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < self.vocab:
                    return f"{name} holds token {token}; the model knows 0 … {self.vocab - 1}"
        if how.allowed_tokens is not None and not how.allowed_tokens:
            return "allowed_tokens is empty: nothing could be drawn"
        if how.stop_strings and self.tokenizer is None:
            return "stop_strings need a tokenizer, and the engine was made without one"
        if any(not stop for stop in how.stop_strings):
            return "stop_strings holds an empty string"
        return None

    @property
    def has_work(self) -> bool:
        s = self.scheduler
        return bool(self._refused or s.waiting or s.reading or s.ready or len(s.free_slots) < s.max_seqs)

    def step(self) -> list[Completion]:
        done, self._refused = self._refused, []
        with self._no_grad():
            done += self._advance()
        for completion in done:
            if completion.request.on_done is not None:
                completion.request.on_done(completion)
        return done

    # -- one step ------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Completion]:
        scheduler, slots = self.scheduler, self.scheduler.slots
        scheduler.grow()
        readings = scheduler.admit()
        rows = np.flatnonzero(slots.active)
        logits = self._forward(rows, readings) if len(rows) or readings else None
        slots.length[rows] += 1
        finished = [i for i, reading in enumerate(readings) if scheduler.has_read(reading)]
        for place, i in enumerate(finished):
            assert logits is not None
            readings[i].trunk.logits = logits[len(rows) + place]
        born, copies = scheduler.branch()
        if copies:
            self.store.copy(*zip(*copies))
        if born:
            rows = np.concatenate([rows, np.array([sequence.slot for _, sequence in born], np.int64)])
            logits = self._with_born(logits, len(rows) - len(born), born)
        if not len(rows):
            return []
        assert logits is not None
        return self._settle(rows, self._draw(rows, logits[: len(rows)]))

    def _with_born(self, logits: Tensor | None, running: int, born: list[tuple[Trunk, Sequence]]) -> Tensor:
        for _, sequence in born:
            sequence.spans = [(0, self.version)]
        first = torch.stack([trunk.logits for trunk, _ in born])  # type: ignore[misc]
        return first if logits is None or not running else torch.cat([logits[:running], first])

    def _forward(self, rows: Array, readings: list[Reading]) -> Tensor:
        slots, size = self.scheduler.slots, self.pool.page_size
        at = slots.length[rows]
        ids, positions = [slots.token[rows]], [at]
        pages = [slots.table[rows, at // size]]
        chunks: list[Chunk] = []
        keep = list(range(len(rows)))
        first = len(rows)
        for reading in readings:
            trunk, where = reading.trunk, np.arange(reading.first, reading.last)
            table = np.asarray(trunk.pages, np.int64)
            ids.append(trunk.tokens[reading.first : reading.last])
            positions.append(where)
            pages.append(table[where // size])
            last = first + len(where)
            chunks.append(Chunk(first, last, reading.first, self._tensor(table[: -(-reading.last // size)])))
            if reading.last == len(trunk.tokens):
                keep.append(last - 1)
            first = last
        position = self._tensor(np.concatenate(positions))
        context = Paged(
            store=self.store,
            page=self._tensor(np.concatenate(pages)),
            offset=position % size,
            rows=self.rows.of(rows, at + 1),
            chunks=chunks,
            kernels=self.kernels,
        )
        wanted = torch.as_tensor(keep, device=self.device) if readings else None
        return self.runner.forward(self._tensor(np.concatenate(ids)), position, context, wanted)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _draw(self, rows: Array, logits: Tensor) -> Drawn:
        slots = self.scheduler.slots
        temperature, greedy = slots.temperature[rows], slots.greedy[rows]
        truncated = np.flatnonzero(slots.truncated[rows])
        steered = np.flatnonzero(slots.steered[rows])
        if self.kernels is not None and not len(truncated) and not len(steered):
            u = uniform_array(slots.key[rows], slots.before[rows] + slots.made[rows])
            tokens, logprobs = self.kernels.draw(logits.contiguous(), temperature, u, greedy)
            return Drawn(torch.from_numpy(tokens), torch.from_numpy(logprobs), None)
        cut = rows[truncated]
        has_cut = len(cut) > 0
        how = Draw(
            key=self._tensor(slots.key[rows]),
            position=self._tensor(slots.before[rows] + slots.made[rows]),
            temperature=self._tensor(temperature) if (temperature != 1).any() else None,
            greedy=self._tensor(greedy) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            truncated=self._tensor(truncated) if has_cut else None,
            top_k=self._tensor(slots.top_k[cut]) if has_cut else None,
            top_p=self._tensor(slots.top_p[cut]) if has_cut else None,
            min_p=self._tensor(slots.min_p[cut]) if has_cut else None,
            steered=self._steered(rows, steered, logits) if len(steered) else None,
        )
        return draw(logits, how)

    def _steered(self, rows: Array, which: Array, logits: Tensor) -> Tensor:
        slots = self.scheduler.slots
        out = logits.float().clone()
        for i in which:
            slot = rows[i]
            sequence = self.scheduler.sequence[slot]
            assert sequence is not None
            made = sequence.tokens + slots.tokens[slot, : slots.made[slot]].tolist()
            out[i] = steer(logits[i], sequence.request.sampling, [*sequence.request.prompt, *made], made)
        return out

    def _settle(self, rows: Array, drawn: Drawn) -> list[Completion]:
        """Write the new tokens down and take out what has ended."""
        slots = self.scheduler.slots
        tokens, logprobs = drawn.tokens.cpu().numpy(), drawn.logprobs.cpu().numpy()
        made = slots.made[rows]
        slots.tokens[rows, made] = tokens
        slots.logprobs[rows, made] = logprobs
        if slots.truncated[rows].any():
            slots.kept[rows, made] = 0.0 if drawn.kept is None else drawn.kept.cpu().numpy()
        slots.token[rows] = tokens
        slots.made[rows] = made + 1
        broken = ~np.isfinite(logprobs)
        stopped = self.is_end[tokens] & ~slots.ignore_eos[rows]
        for i in np.flatnonzero(slots.watched[rows] & ~stopped):
            stopped[i] = self._stops(rows[i])
        full = slots.made[rows] >= slots.limit[rows]
        done: list[Completion] = []
        for i in np.flatnonzero(broken | stopped | full):
            sequence = self.scheduler.sequence[rows[i]]
            assert sequence is not None
            finish: Finish = "error" if broken[i] else "stop" if stopped[i] else "length"
            done.append(self._finish(sequence, finish))
        return done

    def _stops(self, slot: int) -> bool:
        """Whether the newest token of the slot completes one of the request's own stops."""
        slots, sequence = self.scheduler.slots, self.scheduler.sequence[slot]
        assert sequence is not None
        how = sequence.request.sampling
        if int(slots.token[slot]) in how.stop_tokens:
            return True
        if not how.stop_strings:
            return False
        # A stop string of c bytes lies within the last c tokens, plus one that may end inside a character.
        reach = max(len(stop.encode()) for stop in how.stop_strings) + 1
        tail = (sequence.tokens + slots.tokens[slot, : slots.made[slot]].tolist())[-reach:]
        text = self.tokenizer.decode(tail)
        return any(stop in text for stop in how.stop_strings)

    def _finish(self, sequence: Sequence, finish: Finish) -> Completion:
        cached = int(self.scheduler.slots.length[sequence.slot])
        self.scheduler.slots.save(sequence)
        error = None
        if finish == "error":
            error = "the model gave logits that are not numbers"
            for made in (sequence.tokens, sequence.logprobs, sequence.versions, sequence.kept or [0.0]):
                made.pop()
            self.store.scrub(sequence.pages)
        is_worth_keeping = self.reuse_prefix and finish in ("stop", "length")
        self.scheduler.leave(sequence, remember=_context(sequence)[:cached] if is_worth_keeping else None)
        return _completion(sequence, finish, error)

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Drop what is left of a request; each unfinished sample comes back from `step` with finish="cancelled"."""
        for sequence in [s for s in self.scheduler.running() if s.request.id == request_id]:
            self._refused.append(self._finish(sequence, "cancelled"))
        for sequence in self.scheduler.remove(request_id):
            self._refused.append(_completion(sequence, "cancelled"))

    def pause(self) -> list[Partial]:
        """Take everything unfinished out. Full pages stay findable, so that `resume` under the same weights reads again
        only what did not fill a page."""
        scheduler = self.scheduler
        partials = []
        for sequence in sorted(scheduler.running(), key=lambda s: int(scheduler.slots.arrival[s.slot])):
            cached = int(scheduler.slots.length[sequence.slot])
            scheduler.slots.save(sequence)
            scheduler.leave(sequence, remember=_context(sequence)[:cached])
            partials.append(sequence)
        partials += scheduler.remove(None)
        return [Partial(s.request, s.index, s.tokens, s.logprobs, s.versions, s.kept) for s in partials]

    def resume(self, partials: Many[Partial]) -> None:
        fresh: dict[int, deque[Sequence]] = {}
        for p in partials:
            sequence = Sequence(p.request, p.index, list(p.tokens), list(p.logprobs), list(p.versions), p.kept)
            if p.tokens:
                self.scheduler.add(Trunk(_context(sequence), deque([sequence]), is_sole=True))
            elif p.request.id in fresh:
                fresh[p.request.id].append(sequence)
            else:
                members = fresh[p.request.id] = deque([sequence])
                self.scheduler.add(Trunk(_context(sequence), members, is_sole=False))

    def load(self, weights: Any, version: int) -> None:
        """Serve new weights. In one process they are the learner's own tensors and only the version changes. Running
        sequences go on with the keys and values they have; what was remembered for reuse is forgotten."""
        if weights is not None:
            self.model.load_state_dict(dict(weights), strict=False)
        self.version = version
        self.scheduler.restart_reading()
        self.pool.index.forget_all()
        for sequence in self.scheduler.running():
            sequence.spans.append((int(self.scheduler.slots.made[sequence.slot]), version))

    def rebuild(self) -> None:
        """Read every running sequence again, under the weights of now."""
        for sequence in sorted(self.scheduler.running(), key=lambda s: -int(self.scheduler.slots.arrival[s.slot])):
            self.scheduler.preempt(sequence)
        self.scheduler.restart_reading()

    def sleep(self) -> None:
        """Give the cache's memory back; what was running is read again after `wake`."""
        self.rebuild()
        self.pool.index.forget_all()
        self.store.clear()

    def wake(self) -> None:
        """The cache takes its memory again with the first token written to it."""


def _context(sequence: Sequence) -> Array:
    return np.array([*sequence.request.prompt, *sequence.tokens], np.int64)


def _completion(s: Sequence, finish: Finish, error: str | None = None) -> Completion:
    return Completion(s.request, s.index, s.tokens, s.logprobs, s.versions, finish, error, s.kept)
