"""The native rollout engine: continuous batching over a paged cache, with the learner's own model.

A step reads some prompt tokens, advances every running sequence by one token and gives what finished. Sequences enter
and leave between steps; nothing waits for a batch to drain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device import has_triton, mapped
from tidemill.models.mixture import routing
from tidemill.models.recurrent import mixers
from tidemill.models.vision.eyes import eyes
from tidemill.rollout.engine import Completion, Finish, Grammar, OnTokens, Partial, Request, load_part, run_callbacks
from tidemill.rollout.native import passes, resuming
from tidemill.rollout.native.ahead import launch
from tidemill.rollout.native.batch.rows import RunningRows
from tidemill.rollout.native.batch.scheduler import Scheduler
from tidemill.rollout.native.batch.sequences import Kept, Reading, Sequence, Trunk
from tidemill.rollout.native.check import RequestLimits, find_problem, refused
from tidemill.rollout.native.draw.guides import Grammars, Guides
from tidemill.rollout.native.draw.sampling import Drawn
from tidemill.rollout.native.forward import runner as runners
from tidemill.rollout.native.forward.graphs import GraphDecoder
from tidemill.rollout.native.forward.invariant import rowwise_runner
from tidemill.rollout.native.forward.routes import RouteRecorder
from tidemill.rollout.native.kernels.compiled import kernels_for
from tidemill.rollout.native.looking import Looking
from tidemill.rollout.native.pages import host_room
from tidemill.rollout.native.pages.host_room import HostRoom, carry_out
from tidemill.rollout.native.pages.room import make_room
from tidemill.rollout.native.pages.states import Hand, StateStore
from tidemill.rollout.native.pending import Fetch, Pending
from tidemill.rollout.native.ranks import share
from tidemill.rollout.native.ranks.links import Links
from tidemill.rollout.native.resuming import completes_a_stop
from tidemill.rollout.native.speculate import When, speculator_for
from tidemill.rollout.native.telling import Teller


class NativeEngine:
    """Implements `RolloutEngine`. `model` is a transformers causal LM loaded with attn_implementation="tidemill"; its
    tensors are read in place and never changed.

    `reuse_prefix` keeps the pages of finished sequences until their room is needed, so that the next turn of a
    conversation, or another request with the same beginning, reads only what is new. `plain` runs the module itself
    instead of the lean forward pass; `kernels` allows compiled kernels and `graphs` captured decoding on an
    accelerator. All three are for comparison. `batch_invariant` (a CPU in float32) makes a token's numbers depend on
    its own sample alone, bit for bit, and equal to those of a learner in the same mode; it is slower. `speculate`
    drafts tokens by lookup ("auto": with the compiled kernels, where it is expected to pay; "on": in graphs too).
    `cache_dtype` int8 or fp8 keeps keys and values in one byte an element, with a scale per token and head; `weights`
    int8 or fp8 multiplies in 8 bits, by weights that each `load` makes again. `links` are
    those of a rank that holds its share of the model alone, to the ranks that have the others (`ranks.replicas`).
    `keeps_features`: new weights do not change how images look, because the tower is frozen. `host_bytes`: of host
    memory, for the caches of sequences that have to make room; those that find none there are read again, and without
    `keeps_asleep` those that run when the engine is put to sleep."""

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Many[int],
        max_seqs: int = 256,
        max_len: int = 2048,
        page_size: int | None = None,
        cache_tokens: int | None = None,
        step_tokens: int | None = None,
        tokenizer: Any = None,
        reuse_prefix: bool = False,
        plain: bool = False,
        kernels: bool = True,
        graphs: bool = True,
        links: Links | None = None,
        batch_invariant: bool = False,
        record_routes: bool = False,
        speculate: When = "off",
        cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
        weights: Literal["same", "int8", "fp8"] = "same",
        keeps_features: bool = False,
        host_bytes: int = 0,
        keeps_asleep: bool = True,
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.device, self.tokenizer = model, parameter.device, tokenizer
        self.max_len, self.reuse_prefix = max_len, reuse_prefix
        self.version = 0
        self.links = links
        self.vocab = share.of(model).vocabulary if links else int(model.get_output_embeddings().weight.shape[0])
        self.is_end = np.zeros(self.vocab, bool)
        self.is_end[[i for i in eos_ids if 0 <= i < self.vocab]] = True
        self.eight = runners.eight_dtype(weights, cache_dtype, self.device, batch_invariant)
        may_fuse = kernels and not plain and links is None and self.device.type != "cpu"
        fused = runners.fused_kernels(model, self.device) if may_fuse else None
        room = make_room(
            model,
            parameter.dtype,
            self.device,
            max_seqs=max_seqs,
            max_len=max_len,
            page_size=page_size,
            cache_tokens=cache_tokens,
            cache_dtype=cache_dtype,
            batch_invariant=batch_invariant,
            walks_pages=fused is not None and has_triton(self.device.type),
        )
        self.pool, self.store, self.library = room.pool, room.store, room.library
        self.batch_invariant = batch_invariant
        has_none = links is not None and routing.of(model) is None  # of this stage's layers
        self.routes = RouteRecorder(model, self.store) if record_routes and not has_none else None
        self.eyes = eyes.of(model)
        self.looking = Looking(self.eyes, self.device, keeps_features)
        self.limits = RequestLimits(self.vocab, max_len, self.pool.tokens, tokenizer is not None, self.eyes)
        self.states = StateStore(max_seqs, self.device) if mixers.has_some(model) else None
        step_tokens = max(step_tokens or room.step_tokens, max_seqs + self.pool.page_size)
        self.scheduler = Scheduler(
            self.pool, max_seqs, max_len, step_tokens, self.eyes, has_states=self.states is not None
        )
        self.rows = RunningRows(self.scheduler, self.device)
        self.kernels = kernels_for(parameter, self.store) if kernels and not batch_invariant else None
        self.runner: runners.Runner = (
            rowwise_runner(model)
            if batch_invariant
            else runners.make_runner(model, max_len, self.kernels, plain, fused, links, self.eight)
        )
        self._no_grad = runners.no_grad_for(self.runner)
        self.decoder = self._graph_decoder() if graphs else None
        self.speculator = speculator_for(
            speculate, self.scheduler, self.decoder is not None, self.kernels is not None, self.states is not None
        )
        self.guides: Guides | None = None  # from the first request with a grammar
        self.teller = Teller(self.scheduler)
        self.passes = 0  # made so far by `forward`
        self.host_bytes, self.keeps_asleep = host_bytes, keeps_asleep
        self.host: HostRoom | None = None  # from the first pass on
        self.inflight: list[Pending] = []
        self._refused: list[Completion] = []

    def _graph_decoder(self) -> GraphDecoder | None:
        if self.device.type == "cpu" or not hasattr(self.runner, "device_kernels"):
            return None
        self.store.memory = mapped.open(self.device)
        if self.states is not None:
            self.states.memory = self.store.memory
        return self._graph_decoder_of(cast(runners.CapturableRunner, self.runner))

    def _graph_decoder_of(self, runner: runners.CapturableRunner) -> GraphDecoder:
        return GraphDecoder(
            runner, self.store, self.scheduler.slots, self.vocab, self.routes, self.library, self.states
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. One that cannot work comes back from `step` as completions with finish="error"."""
        problem = find_problem(request, self.limits) or self._problem_of_grammar(request.sampling.grammar)
        if problem:
            self._refused += refused(request, problem)
            return
        members = deque(Sequence(request, index) for index in range(request.n))
        self.scheduler.add(self.scheduler.trunk(members, is_sole=request.n == 1))

    def _problem_of_grammar(self, grammar: Grammar | None) -> str | None:
        if grammar is None:
            return None
        if self.guides is None:
            self.guides = Guides(Grammars(self.tokenizer, self.vocab, np.flatnonzero(self.is_end).tolist()))
        return self.guides.grammars.problem(grammar)

    @property
    def on_tokens(self) -> OnTokens | None:
        """Hears of tokens as they are made, of requests that have a `stream`."""
        return self.teller.on_tokens

    @on_tokens.setter
    def on_tokens(self, hear: OnTokens | None) -> None:
        self.teller.on_tokens = hear

    @property
    def has_work(self) -> bool:
        return bool(self._refused or self.inflight or self.scheduler.has_work)

    def step(self) -> list[Completion]:
        self.store.restore()  # nothing, unless it is asleep
        done, self._refused = self._refused, []
        with self._no_grad():
            self.host = self.host or host_room.opened(self)
            done += self._advance()
        return run_callbacks(done, self._refused)

    # -- one step ------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Completion]:
        """Start a step and give what the one before came to. On the host a step is over when it has been started; a
        device still works on it while the next is prepared."""
        launched = self._launch() if self.decoder is None else launch(self, self.decoder)
        due, self.inflight = (launched, []) if self.decoder is None else (self.inflight, launched)
        return [completion for pending in due for completion in self._settle(pending)]

    def _launch(self) -> list[Pending]:
        """Prompt tokens and one token of every running sequence in one pass, with what was drafted after it."""
        scheduler, slots = self.scheduler, self.scheduler.slots
        scheduler.grow(self.drain)
        readings = self.admit()
        rows = np.flatnonzero(slots.active)
        drafts = self.speculator.propose(rows) if self.speculator is not None and len(rows) else None
        if drafts is None:
            wide, ids, ahead = rows, slots.token[rows], np.zeros(len(rows), np.int64)
        else:
            wide, ids, ahead = drafts.spread(rows, slots.token[rows])
        logits = self.forward(wide, readings, ids, ahead) if len(rows) or readings else None
        slots.length[rows] += 1
        born = self.branch(readings, None if logits is None else logits[len(wide) :])
        if born:
            first = torch.stack([trunk.logits for trunk, _ in born])  # type: ignore[misc]
            logits = torch.cat([logits[: len(wide)], first]) if logits is not None and len(wide) else first
            seated = np.array([sequence.slot for _, sequence in born], np.int64)
            rows, wide = np.concatenate([rows, seated]), np.concatenate([wide, seated])
            ahead = np.concatenate([ahead, np.zeros(len(seated), np.int64)])
        if not len(rows):
            return []
        assert logits is not None
        drawn = self._draw(wide, logits[: len(wide)], ahead)
        if drafts is None:
            return [self.pending_of(rows, drawn)]
        assert self.speculator is not None
        return self.speculator.judge(drafts, rows, ahead, drawn)[0]

    def pending_of(self, rows: Array, drawn: Drawn | Fetch) -> Pending:
        self.scheduler.slots.launched[rows] += 1
        return Pending(rows, self.scheduler.slots.arrival[rows], drawn)

    def branch(self, readings: list[Reading], logits: Tensor | None) -> list[tuple[Trunk, Sequence]]:
        """Give samples of trunks that are read to the end their slots; `logits` has a row for each such trunk."""
        ended = [reading.trunk for reading in readings if self.scheduler.has_read(reading)]
        for trunk, row in zip(ended, () if logits is None else logits):
            trunk.logits = row
        born = self.scheduler.branch()
        self._carry_out()
        for trunk, sequence in born:
            if self.states is not None:
                self.states.put(sequence.slot, trunk.hand)
            sequence.spans = [(0, self.version)]
            if self.guides is not None:
                self.guides.seat(sequence.slot, sequence.request.sampling.grammar, sequence.tokens)
        return born

    def admit(self) -> list[Reading]:
        """Which prompt tokens to read in this step."""
        readings = self.scheduler.admit()
        self._carry_out()
        return readings

    def _carry_out(self) -> None:
        """Copy pages as the scheduler has decided."""
        moves, self.scheduler.moves = self.scheduler.moves, []
        with self._no_grad():
            carry_out(moves, self.store, self.host)

    def drain(self) -> None:
        """Wait for the step under way; what it ends is given by the next `step`."""
        due, self.inflight = self.inflight, []
        with self._no_grad():
            for pending in due:
                self._refused += self._settle(pending)

    def forward(self, rows: Array, readings: list[Reading], newest: Array, ahead: Array) -> Tensor:
        self.passes += 1
        return passes.forward(self, rows, readings, newest, ahead)

    def _draw(self, rows: Array, logits: Tensor, ahead: Array | int = 0) -> Drawn:
        return passes.draw(self, rows, logits, ahead)

    def _settle(self, pending: Pending) -> list[Completion]:
        """Write the new tokens down and take out what has ended."""
        slots = self.scheduler.slots
        drawn = pending.made()
        # A slot may have been left, or given to another, while the device worked.
        still = slots.active[pending.rows] & (slots.arrival[pending.rows] == pending.arrival)
        rows, tokens, logprobs = pending.rows[still], drawn.tokens[still], drawn.logprobs[still]
        kept = None if drawn.kept is None else drawn.kept[still]
        if pending.is_draft:  # it was in the pass beside the token before it
            slots.length[rows] += 1
            slots.launched[rows] += 1
        made = slots.made[rows]
        slots.tokens[rows, made], slots.logprobs[rows, made] = tokens, logprobs
        if slots.truncated[rows].any():
            slots.kept[rows, made] = 0.0 if kept is None else kept
        if drawn.tops is not None:
            self.teller.keep_tops(rows, self.scheduler.sequence, (drawn.tops[0][still], drawn.tops[1][still]))
        self.teller.tell(rows, tokens, logprobs, kept)
        if self.guides is not None and (guided := slots.guided[rows]).any():
            self.guides.accept(rows[guided], tokens[guided])
        slots.token[rows] = tokens
        slots.made[rows] = made + 1
        broken = ~np.isfinite(logprobs)
        stopped = self.is_end[tokens] & ~slots.ignore_eos[rows]
        for i in np.flatnonzero(slots.watched[rows] & ~stopped):
            stopped[i] = completes_a_stop(self.scheduler, int(rows[i]), self.tokenizer)
        full = slots.made[rows] >= slots.limit[rows]
        done: list[Completion] = []
        for i in np.flatnonzero(broken | stopped | full):
            sequence = self.scheduler.sequence[rows[i]]
            assert sequence is not None
            finish: Finish = "error" if broken[i] else "stop" if stopped[i] else "length"
            done.append(self._finish(sequence, finish))
        return done

    def _finish(self, sequence: Sequence, finish: Finish) -> Completion:
        cached = int(self.scheduler.slots.length[sequence.slot])
        self.scheduler.slots.save(sequence)
        error = None
        if finish == "error":
            error = "the model gave logits that are not numbers"
            for made in (sequence.tokens, sequence.logprobs, sequence.versions, sequence.kept or [0.0]):
                made.pop()
        # Decoding ahead of the host may have read the last token too; only those before it are inputs.
        inputs = min(cached, len(sequence.identity()) - 1)
        routes = None if self.routes is None else self.routes.of(sequence.pages, inputs)
        if self.speculator is not None:
            self.speculator.ended(sequence)
        is_worth_keeping = self.reuse_prefix and finish in ("stop", "length")
        pages = sequence.pages
        if is_worth_keeping:
            self.scheduler.leave(sequence, remember=sequence.identity()[:cached], hand=self._hand(sequence))
        else:
            self.scheduler.leave(sequence)
        if finish == "error":
            self._scrub(pages)
        return sequence.as_completion(finish, error, routes)

    def _hand(self, sequence: Sequence) -> Hand:
        """The states of a running sequence, apart from its slot."""
        return {} if self.states is None else self.states.take(sequence.slot)

    def _scrub(self, pages: list[int]) -> None:
        """Zero those pages that are now free: they may hold NaN, which masked positions would let through. Pages that
        others hold are left alone: where a shared prompt is at fault, the last of its samples scrubs it."""
        free = self.pool.unused(pages)
        if free and self.store.keys:
            with self._no_grad():
                self.store.scrub(free)

    def _scrub_abandoned(self) -> None:
        """What was read of them may hold NaN that no logits have shown yet."""
        self._carry_out()
        pages, self.scheduler.abandoned = self.scheduler.abandoned, []
        self._scrub(pages)

    def cache_counts(self) -> dict[str, int]:
        return self.scheduler.counts() | host_room.counts(self.host)

    # -- control -------------------------------------------------------------------------------------------------

    def cancel(self, request_id: int) -> None:
        """Drop what is left of a request; each unfinished sample comes back from `step` with finish="cancelled"."""
        self.drain()
        for sequence in [s for s in self.scheduler.running() if s.request.id == request_id]:
            self._refused.append(self._finish(sequence, "cancelled"))
        self._refused += [sequence.as_completion("cancelled") for sequence in self.scheduler.remove(request_id)]
        if self.speculator is not None:
            self.speculator.forget(request_id)
        self._scrub_abandoned()

    def pause(self, keep_cache: bool = False) -> list[Partial]:
        """Take everything unfinished out. Full pages stay findable, so that `resume` under the same weights reads
        little again. With `keep_cache` running samples keep all their keys and values, also through `load`; what is
        not resumed must be given to `release`."""
        self.drain()
        if self.speculator is not None:
            self.speculator.forget()
        partials = list(resuming.taken_out(self.scheduler, self._hand, keep_cache))
        self._scrub_abandoned()
        return partials

    def release(self, partials: Many[Partial]) -> None:
        """Free what paused samples kept of the cache; resumed after all, they are read again."""
        for p in partials:
            if isinstance(p.cache, Kept):
                self.scheduler.release(p.cache)

    def resume(self, partials: Many[Partial]) -> None:
        """Go on with paused samples, of this engine or another. One that cannot work here comes back from `step` as an
        error."""
        for p, became in resuming.taken_up(self.scheduler, partials, self.limits):
            if isinstance(became, Completion):
                self.release([p])
                self._refused.append(became)
                continue
            if self.speculator is not None:
                self.speculator.expect(p.request)
            if became is not None:
                self.scheduler.add(became)

    def load(self, weights: Any, version: int) -> None:
        """Serve new weights. In one process they are the learner's own tensors and only the version changes. Running
        sequences go on with the keys and values they have; what was remembered for reuse is forgotten."""
        self.drain()
        if weights is not None:
            load_part(self.model, weights)
        self.version = version
        runners.refresh(self.runner)
        self.looking.new_weights()
        if self.speculator is not None:
            self.speculator.reset()
        self.scheduler.restart_reading()
        self._scrub_abandoned()
        self.scheduler.forget()
        for sequence in self.scheduler.running():
            sequence.spans.append((int(self.scheduler.slots.made[sequence.slot]), version))

    def rebuild(self) -> None:
        """Read every running sequence again, under the weights of now; also what was resumed with its cache."""
        self.drain()
        self.scheduler.vacate(keeps=False)
        self._scrub_abandoned()

    def sleep(self) -> None:
        """Give the cache's memory back; what was running goes on after `wake`, with what the host has room for, and is
        read again else. Captured graphs stay where the cache's addresses do."""
        self.drain()
        self.scheduler.vacate(keeps=self.keeps_asleep)
        while self.scheduler.give_up_resumed() or self.scheduler.give_up_kept():
            pass
        self._scrub_abandoned()
        self.scheduler.forget()
        self.store.clear()
        if self.states is not None:
            self.states.clear()
        self.looking.clear()
        if self.decoder is not None and self.store.memory is None:
            self.decoder.forget_graphs()  # they hold the addresses of what was just given back

    def wake(self) -> None:
        """Take the memory again; what is not taken here comes with the first token written to it."""
        self.store.restore()
