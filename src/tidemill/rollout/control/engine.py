"""A rollout engine for networks: environments that step together, and one call of the policy for all of them.

A request is a group: the next fragment of a vector's environments, `rollout.max_new_tokens` decisions of each. All
vectors that are asked for at once are stepped side by side. A fragment depends on the weights, the run's seed, the
group's number and the fragments before it alone: which process makes it, and how often, changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.algorithms.shared import registry
from tidemill.batch import Batch
from tidemill.device import host
from tidemill.environment.vector.duel import DuelSlots
from tidemill.environment.vector.making import make_slots
from tidemill.environment.vector.processes import open_slots
from tidemill.environment.vector.random import seeds_of
from tidemill.environment.vector.slots import GOES_ON
from tidemill.errors import PlayError, TidemillError
from tidemill.recipe.config import Config
from tidemill.rollout.control.film import film
from tidemill.rollout.control.fragment import Made, outputs
from tidemill.rollout.control.opponents import Known, Opponents, known_players
from tidemill.rollout.control.vector import EVALUATION, Run, Vectors
from tidemill.rollout.engine import Completion, Partial, Request, Sampling, load_part, run_callbacks

SLICE_S = 0.02  # of work in one step
FIRST_TICKS = 4  # of a step, before it is known how long they take
EVALUATED_TOGETHER = 32


class VectorEngine:
    """Implements `RolloutEngine`."""

    outputs = staticmethod(outputs)

    def __init__(self, policy: Any, config: Config) -> None:
        assert config.environment is not None
        self.policy, self.config, self.settings = policy, config, config.environment
        self.run: Path | None = None
        self.writer = "0"
        self.version = 0
        self._vectors: Vectors | None = None
        self._waiting: list[tuple[Request, float]] = []  # and since when
        self._running: tuple[Run, list[Request]] | None = None
        self._ready: list[Completion] = []
        self._ticks = FIRST_TICKS
        self._film_at, self._filmed = 0.0, -1  # not before; of which version the last one is
        self.opponents: Opponents | None = None  # of a game of two players
        self._patience_s = self.settings.timeout_s if _has_peers(config) else 0.0

    def at(self, run: Path | None, writer: str) -> VectorEngine:
        """`run`: the run's folder, where its environments' moves are kept; `writer`: this worker's name there."""
        self.run, self.writer = run, writer
        return self

    # What rollout asks

    def requests(self, group: int, batch: Batch) -> list[Request]:
        is_again = "again" in batch and bool(batch.values("again")[0])
        user = (group, list(range(batch.rows)))
        return [Request(group, (), Sampling(), n=batch.rows, stream=int(is_again), user=user)]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ready)

    def submit(self, request: Request) -> None:
        self._waiting.append((request, time.monotonic()))

    def step(self) -> list[Completion]:
        done, self._ready = self._ready, []
        if self._running is None:
            self._begin()
        if self._running is not None:
            run, requests = self._running
            began, before = time.perf_counter(), run.t
            with self._environments():
                is_done = run.advance(self._ticks, self.version)
            done += self._finish(run, requests) if is_done else []
            spent = (time.perf_counter() - began) / max(1, run.t - before)
            self._ticks = max(1, int(SLICE_S / max(spent, 1e-6)))
        return run_callbacks(done, self._ready)

    def _begin(self) -> None:
        """Take the requests that can begin: one for each vector, those that are made again by themselves."""
        vectors, chosen = self.vectors, dict[int, Request]()
        is_again: bool | None = None
        for request, since in self._waiting:
            vector, number = self._place(request)
            if vector in chosen or is_again not in (None, bool(request.stream)):
                continue
            if not vectors.is_known(vector, number) and time.monotonic() - since < self._patience_s:
                continue  # another worker is still making the one before it
            chosen[vector], is_again = request, bool(request.stream)
        if not chosen:
            if self._waiting:
                time.sleep(0.001)
            return
        requests = [chosen[v] for v in sorted(chosen)]
        self._waiting = [(r, since) for r, since in self._waiting if not any(r is one for one in requests)]
        places = [self._place(r) for r in requests]
        with self._environments():
            self._running = vectors.begin(places, [r.id for r in requests], bool(is_again)), requests

    @contextmanager
    def _environments(self) -> Iterator[None]:
        """Within the context, whatever an environment raises ends the run and is told with its name."""
        try:
            yield
        except TidemillError:
            raise
        except Exception as error:
            said = f"environment {self.settings.name!r} raised {type(error).__name__}: {error}"
            raise PlayError(said, "mend the environment") from error

    def _place(self, request: Request) -> tuple[int, int]:
        """Vector, and number of its fragment."""
        return request.id % self.vectors.count, request.id // self.vectors.count

    def _finish(self, run: Run, requests: list[Request]) -> list[Completion]:
        self._running = None
        done: list[Completion] = []
        if self.opponents is not None:
            self.opponents.record()
        for request, fragment in zip(requests, run.fragments()):
            rows = [Made(request, i, [], [], [], "length") for i in range(request.n)]
            rows[0].fragment = fragment
            done += rows
        return done

    @property
    def vectors(self) -> Vectors:
        """Made when they are first asked for: some engines only evaluate."""
        if self._vectors is None:
            train, config = self.config.train, self.config
            count = train.prompts_per_step * train.samples_per_prompt
            workers = self.settings.workers if self.settings.workers >= 0 else host.cores() - 1
            algorithm = registry.of(config)
            slots = open_slots(self.settings, count, workers)
            if isinstance(slots, DuelSlots):
                self.opponents = slots.others = Opponents(self.policy, config, self.run, self.writer)
                self.opponents.serve(self.version)
            self._vectors = Vectors(
                self.policy,
                slots,
                train.samples_per_prompt,
                config.rollout.max_new_tokens,
                config.seed,
                config.algorithm.critic.gamma,
                algorithm.graph(config).stage("rollout").writes,
                self.run,
                lambda decisions: algorithm.explores(config, decisions),
            )
        return self._vectors

    def cancel(self, request_id: int) -> None:
        for request, _ in self._waiting:
            if request.id == request_id:
                self._ready += _ended(request)
        self._waiting = [(r, since) for r, since in self._waiting if r.id != request_id]
        # a fragment under way is made to its end: its environments go on from there all the same

    def pause(self) -> list[Partial]:
        """Fragments under way rest where they are; what is not taken up again is dropped, and made anew from its
        beginning."""
        paused: list[Partial] = []
        if self._running is not None:
            run, requests = self._running
            paused = [Partial(r, 0, [], [], [], cache=run) for r in requests]
            self._running = None
        paused += [Partial(r, 0, [], [], []) for r, _ in self._waiting]
        self._waiting = []
        return paused

    def resume(self, partials: Sequence[Partial]) -> None:
        kept = [p for p in partials if p.cache is not None]
        if kept:
            self._running = kept[0].cache, [p.request for p in kept]
        self._waiting += [(p.request, time.monotonic()) for p in partials if p.cache is None]

    def load(self, weights: Any, version: int) -> None:
        if weights is not None:
            load_part(self.policy, weights)
        self.policy.serve()
        self.version = version
        if self.opponents is not None:
            self.opponents.serve(version)

    def sleep(self) -> None:
        """Nothing here is worth giving back."""

    def wake(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        if self._filmed >= 0 and self._film_at < float("inf"):
            self.policy.serve()
            self._film()
        if self._vectors is not None:
            self._vectors.close()
            self._vectors = None

    # Evaluating

    def evaluated(self, size: int, tell: Callable[[int], None]) -> dict[str, Any]:
        """Play `size` episodes with the likeliest actions, always of the same seeds; return the fields of
        `flow.records.Evaluation`. An episode counts as solved from `environment.goal` on. In a game, `size` episodes
        are played against each known player."""
        self.policy.serve()
        size, goal = max(1, size), self.settings.goal
        slots = make_slots(self.settings, min(size, EVALUATED_TOGETHER))
        game = slots.game if isinstance(slots, DuelSlots) else None
        answers: list[tuple[str, str, str, bool, float, int]] = []
        try:
            for name, player in known_players(game).items() or [("", None)]:
                if isinstance(slots, DuelSlots) and player is not None:
                    slots.others = Known(player)
                for i, (gained, steps) in enumerate(self._play(slots, size, lambda done: tell(len(answers) + done))):
                    said = f"a return of {gained:g} in {steps} decisions"
                    answers.append((f"episode {i}", name, said, gained >= goal, gained, steps))
        finally:
            slots.close()
        if time.monotonic() > self._film_at:
            self._film()
        kinds = {name: [a[3] for a in answers if a[1] == name] for _, name, *_ in answers if name}
        return {
            "answers": answers,
            "accuracy": sum(a[3] for a in answers) / len(answers),
            "reward": sum(a[4] for a in answers) / len(answers),
            "response_tokens": sum(a[5] for a in answers) / len(answers),
            "shares": {f"against {name}": sum(solved) / len(solved) for name, solved in kinds.items()},
        }

    def _film(self) -> None:
        """Keep a picture of an episode, which takes a twentieth of the run's time at most."""
        if self.run is None or not self.settings.film or self._filmed == self.version:
            return
        began, self._filmed = time.monotonic(), self.version
        fault = film(self.settings, self.policy, int(self._evaluation_seeds(1)[0]), self.run, self.version)
        self._film_at = float("inf") if fault else time.monotonic() + 20 * (time.monotonic() - began)
        if fault:
            print(fault, file=sys.stderr)  # into the worker's log

    def _evaluation_seeds(self, size: int) -> Any:
        return seeds_of(self.config.seed, np.arange(size) + EVALUATION, np.zeros(size, np.int64))

    def _play(self, slots: Any, size: int, tell: Callable[[int], None]) -> list[tuple[float, int]]:
        seeds = self._evaluation_seeds(size)
        count, policy = slots.count, self.policy
        playing = np.arange(count)  # which episode each slot plays; `size` and above: none that counts
        begun = count
        seen = slots.reset(np.arange(count), seeds[:count]).copy()
        state = np.zeros((count, policy.state_width), np.float32) if policy.state_width else None
        returns, lengths, done = np.zeros(size), np.zeros(size, np.int64), 0
        own = np.arange(count)
        while done < size:
            acted = policy.act(seen[own], None, None if state is None else state[own])
            following = seeds[np.minimum(begun + np.arange(len(own)), size - 1)]
            stepped = slots.step(own, policy.moves(acted.actions), following)
            live = np.ones(len(own), np.bool_) if stepped.made is None else stepped.made
            counted = live & (playing[own] < size)
            returns[playing[own][counted]] += stepped.rewards[counted]
            lengths[playing[own][counted]] += 1
            seen[own] = stepped.observations
            if state is not None and acted.state is not None:
                state[own] = acted.state
            ended = np.flatnonzero(stepped.ends != GOES_ON)
            for i in ended.tolist():
                slot = own[i]
                done += bool(playing[slot] < size)
                if state is not None:
                    state[slot] = 0.0
                playing[slot] = min(begun, size)
                if begun < size and not slots.is_joint:  # the one that began at once has another's seed
                    seen[slot] = slots.reset(np.array([slot]), seeds[begun : begun + 1])[0]
                begun += 1
            if len(ended):
                tell(done)
                if not slots.is_joint:
                    own = np.flatnonzero(playing < size)
        return list(zip(returns.tolist(), lengths.tolist()))


def _ended(request: Request) -> list[Completion]:
    return [Completion(request, i, [], [], [], "cancelled") for i in range(request.n)]


def _has_peers(config: Config) -> bool:
    """Whether another process may be making the fragment before the one that is asked for here."""
    return config.flow.schedule == "async" and config.cluster.executor != "local" and config.cluster.rollouts > 1
