"""An engine that plays games of several players: each seat is a conversation of its own, and a sample of its own.

Around any rollout engine, as `rollout.turns.TurnsEngine` is. Of a request's samples, sample k sits on seat k modulo the
game's seats. Where the policy plays itself, one match gives a sample for every seat; against a past version or an
expert, every sample is a match, and the other seats are played without being learned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidemill.environment.api import Closes, Game, HasExpert, Interrupts, Played, Round, Task, Turn
from tidemill.environment.league import POLICY, League, member_name
from tidemill.environment.league import Match as Result
from tidemill.environment.registry import find_game
from tidemill.environment.speech import Speech
from tidemill.errors import PlayError
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.rollout.engine import (
    Completion,
    Finish,
    Partial,
    Request,
    RolloutEngine,
    cache_counts,
    run_callbacks,
    token_limit,
)
from tidemill.rollout.native.check import find_problem
from tidemill.rollout.past import EXPERT, PastVersions, Player
from tidemill.rollout.transcript import Transcript
from tidemill.rollout.turns import ANY, PATIENCE_S, Here, turn_id


@dataclass(slots=True, eq=False, kw_only=True)
class Chair(Transcript):
    """One seat of a match."""

    match: Match
    seat: int
    player: Player  # None: the policy
    sample: int | None  # which of the request's samples it is, if one
    prompt: list[int] = field(default_factory=list)
    turns: int = 0
    has_ended: bool = False  # the model closed its latest message itself
    is_full: bool = False  # it had no room for another turn
    turn_id: int = 0  # of the engine's request under way

    @property
    def room(self) -> int:
        request = self.match.request
        return token_limit(request, self.sample or 0) - len(self.tokens)


@dataclass(slots=True, eq=False)
class Match:
    request: Request
    number: int
    version: int
    opponent: Player
    game: Game
    chairs: list[Chair] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)  # seats that are to speak
    said: dict[int, str] = field(default_factory=dict)
    state: Round = field(default_factory=Round)
    rewards: dict[int, float] = field(default_factory=dict)
    solved: dict[int, bool] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    is_cancelled: bool = False

    def take_in(self, state: Round) -> None:
        self.state = state
        for seat, reward in state.rewards.items():
            self.rewards[seat] = self.rewards.get(seat, 0.0) + float(reward)
            self.chairs[seat].gain(float(reward))
        self.solved |= {seat: bool(solved) for seat, solved in state.solved.items()}
        for name, value in state.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + float(value)


@dataclass(slots=True, eq=False)
class Thinking:
    match: Match
    answer: Future[Round]
    since: float


class SeatsEngine:
    """`RolloutEngine` over another one; requests without a task pass through. `run`: the run's folder, where the league
    is kept; `writer`: this worker's name there."""

    def __init__(
        self, inner: RolloutEngine, loaded: LoadedModel, config: Config, speech: Speech,
        run: Path | None = None, writer: str = "0",
    ) -> None:  # fmt: skip
        assert config.environment is not None
        self.inner, self.settings, self.speech = inner, config.environment, speech
        self.eos_ids = frozenset(loaded.eos_ids)
        self.make, self.seats = find_game(self.settings), self.settings.players
        self.system = config.data.system
        league = self.settings.league
        own = League(run / "league", league, writer, config.seed) if league is not None and run is not None else None
        self.league, self.past = own, PastVersions(own, loaded, config)
        self.evaluates = "auto" if league is None else league.evaluate
        self.executor: Executor = (
            ThreadPoolExecutor(self.settings.workers, "environment") if self.settings.workers else Here()
        )
        self.waiting: list[Match] = []  # for an opponent whose weights are not there yet
        self.under_way: dict[int, Match] = {}  # by the id of the object
        self.thinking: list[Thinking] = []
        self.ready: list[Completion] = []
        self._paused: list[Partial] = []

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def has_work(self) -> bool:
        return bool(self.inner.has_work or self.past.has_work or self.waiting or self.thinking or self.ready)

    def submit(self, request: Request) -> None:
        if request.task is None or find_problem(replace(request, tiles=()), ANY):
            self.inner.submit(request)
            return
        self._paused = [p for p in self._paused if p.request.user.match.request.id != request.id]  # a step made again
        seed = turn_id(request.id, request.sampling.seed, 0)
        task = replace(request.task, prompt=self.speech.text(request.prompt), seed=seed)
        for match in self._matches(request, task):
            self.under_way[id(match)] = match
            self.waiting.append(match)
        self._seat_those_who_wait()

    def _matches(self, request: Request, task: Task) -> list[Match]:
        opponent = self._opponent(request, task)
        is_own = opponent is None
        first = int(task.meta.get("seat", 0)) if task.is_trial else 0
        count = -(-request.n // self.seats) if is_own and not task.is_trial else request.n
        matches = []
        for number in range(count):
            match = Match(request, number, self.version, opponent, self._begin(task))
            own_seats = range(self.seats) if is_own and not task.is_trial else ((number + first) % self.seats,)
            for seat in range(self.seats):
                sample = number * len(own_seats) + own_seats.index(seat) if seat in own_seats else None
                is_sample = sample is not None and sample < request.n
                player = None if seat in own_seats else opponent
                chair = Chair(match=match, seat=seat, player=player, sample=sample if is_sample else None)
                match.chairs.append(chair)
            matches.append(match)
        return matches

    def _opponent(self, request: Request, task: Task) -> Player:
        if not task.is_trial:
            return None if self.league is None else self.league.draw(str(request.id), self.version)
        has_expert = hasattr(self.make, "expert")
        return EXPERT if self.evaluates == "expert" or (self.evaluates == "auto" and has_expert) else None

    def _begin(self, task: Task) -> Game:
        try:
            game: Any = self.make(task, **self.settings.args)
        except Exception as error:
            raise PlayError(
                f"environment {self.settings.name!r} could not begin with {task.where or 'a task'}: "
                f"{type(error).__name__}: {error}",
                "see environment.args and the row's columns",
            ) from error
        if task.is_trial and self.evaluates == "expert" and not isinstance(game, HasExpert):
            raise PlayError(
                f"environment {self.settings.name!r} has no expert to be evaluated against",
                "set environment.league.evaluate=self, or give the class a method expert(seat)",
            )
        return game  # type: ignore[no-any-return]

    def _seat_those_who_wait(self) -> None:
        still = []
        for match in self.waiting:
            if match.opponent in (None, EXPERT) or self.past.hold(match.opponent):
                self._think(match, self.executor.submit(match.game.reset))
            else:
                still.append(match)
        self.waiting = still

    def _think(self, match: Match, answer: Future[Round]) -> None:
        self.thinking.append(Thinking(match, answer, time.monotonic()))

    def step(self) -> list[Completion]:
        made: list[Completion] = []
        if self.inner.has_work or self.past.has_work:
            made = (self.inner.step() if self.inner.has_work else []) + self.past.step()
        elif self.thinking:
            wait([t.answer for t in self.thinking], timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
        done, self.ready = self.ready, []
        for completion in made:
            if isinstance(completion.request.user, Chair):
                done += self._spoken(completion.request.user, completion)
            else:
                done.append(completion)
        done += self._answers()
        self._seat_those_who_wait()
        return run_callbacks(done, self.ready)

    # Rounds

    def _answers(self) -> list[Completion]:
        done: list[Completion] = []
        now, thinking, self.thinking = time.monotonic(), self.thinking, []
        for one in thinking:
            if one.answer.done():
                done += self._heard(one.match, one.answer)
            elif now - one.since > self.settings.timeout_s:
                done += self._fail(one.match, f"gave no answer in {self.settings.timeout_s:g} s")
            else:
                self.thinking.append(one)
        return done

    def _heard(self, match: Match, answer: Future[Round]) -> list[Completion]:
        if match.is_cancelled:
            return self._finish(match, "cancelled")
        error = answer.exception()
        if error is not None:
            return self._fail(match, f"raised {type(error).__name__}: {error}")
        state = answer.result()
        if not isinstance(state, Round):
            return self._fail(match, f"answered with {state!r:.80}, not with a Round")
        if not state.is_done and not state.asks:
            return self._fail(match, "asked nobody and is not done")
        try:
            match.take_in(state)
            if state.is_done:
                return self._finish(match, "stop")
            match.said, match.awaited = {}, set(state.asks)
            for seat, text in sorted(state.asks.items()):
                self._ask(match.chairs[seat], text)
        except Exception as wrong:  # a seat that is none, a reward that is no number, a text that cannot be framed
            return self._fail(match, f"answered with {state!r:.80}: {wrong}")
        return self._go_on(match)

    def _ask(self, chair: Chair, text: str) -> None:
        if chair.prompt:
            chair.hear(self.speech.heard(Turn(text), None, has_ended=chair.has_ended), self.version)
        else:
            chair.prompt = self.speech.opening(text, self.system)
        if chair.player == EXPERT:
            self._say(chair, chair.match.game.expert(chair.seat))  # type: ignore[attr-defined]
        elif chair.room < 1 or chair.turns >= self.settings.max_turns:
            chair.is_full = True
            self._say(chair, "")
        else:
            self._engine(chair).submit(self._request(chair))

    def _engine(self, chair: Chair) -> RolloutEngine:
        return self.inner if chair.player is None else self.past.engine(chair.player)

    def _request(self, chair: Chair) -> Request:
        outer, match = chair.match.request, chair.match
        sampling = outer.sampling
        if isinstance(match.game, Interrupts):
            sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *match.game.stop))
        chair.turn_id = turn_id(outer.id, match.number * self.seats + chair.seat, chair.turns + 1)
        limit = min(chair.room, self.settings.max_turn_tokens or chair.room)
        return Request(chair.turn_id, [*chair.prompt, *chair.tokens], sampling, limits=[limit], user=chair)

    def _spoken(self, chair: Chair, made: Completion) -> list[Completion]:
        match = chair.match
        if id(match) not in self.under_way:
            return []
        chair.speak(made)
        if made.finish in ("error", "cancelled"):
            return self._finish(match, made.finish, made.error)
        chair.has_ended = bool(made.tokens) and made.tokens[-1] in self.eos_ids
        self._say(chair, self.speech.text(made.tokens))
        return self._go_on(match)

    def _say(self, chair: Chair, text: str) -> None:
        chair.turns += 1
        chair.match.said[chair.seat] = text
        chair.match.awaited.discard(chair.seat)

    def _go_on(self, match: Match) -> list[Completion]:
        if not match.awaited:
            self._think(match, self.executor.submit(match.game.step, dict(match.said)))
        return []

    # The end

    def _fail(self, match: Match, why: str) -> list[Completion]:
        message = f"environment {self.settings.name!r} {why}"
        if self.settings.on_error == "fail":
            raise PlayError(message, "mend the environment, or set environment.on_error=end")
        return self._finish(match, "stop", failure=message)

    def _finish(
        self, match: Match, finish: Finish, error: str | None = None, failure: str | None = None
    ) -> list[Completion]:
        self.under_way.pop(id(match), None)
        self.past.let_go(match.opponent)
        for chair in match.chairs:
            if chair.seat in match.awaited and chair.player != EXPERT:
                self._engine(chair).cancel(chair.turn_id)
        if isinstance(match.game, Closes):
            try:
                match.game.close()
            except Exception as wrong:
                failure = failure or f"environment {self.settings.name!r} raised {type(wrong).__name__}: {wrong}"
        if failure is None and finish == "stop" and isinstance(match.opponent, int):
            self._record(match)
        return [self._completion(c, finish, error, failure) for c in match.chairs if c.sample is not None]

    def _record(self, match: Match) -> None:
        if self.league is None or not isinstance(match.opponent, int):
            return
        names = tuple(POLICY if c.player is None else member_name(match.opponent) for c in match.chairs)
        scores = tuple(match.rewards.get(c.seat, 0.0) for c in match.chairs)
        self.league.record([Result(f"{match.request.id}:{match.number}", match.version, names, scores)])

    def _completion(self, chair: Chair, finish: Finish, error: str | None, failure: str | None) -> Completion:
        match = chair.match
        assert chair.sample is not None
        parts = dict(match.parts)
        if isinstance(match.opponent, int):
            parts["against_past"] = 1.0
        played = Played(match.rewards.get(chair.seat, 0.0), chair.turns, match.solved.get(chair.seat), parts, failure)
        if not chair.tokens:  # it never spoke
            chair.prompt = chair.prompt or list(match.request.prompt)
            chair.hear([min(self.eos_ids)], self.version)
        request = replace(match.request, prompt=chair.prompt)
        made = chair.completion(request, chair.sample, "length" if chair.is_full else finish, error, played)
        made.seat = chair.seat
        return made

    # Control

    def cancel(self, request_id: int) -> None:
        for match in [m for m in self.under_way.values() if m.request.id == request_id]:
            match.is_cancelled = True
            if match in self.waiting:
                self.waiting.remove(match)
                self.ready += self._finish(match, "cancelled")
                continue
            if any(p.request.user.match is match for p in self._paused):  # nobody else would end it
                self._paused = [p for p in self._paused if p.request.user.match is not match]
                self.ready += self._finish(match, "cancelled")
                continue
            for chair in match.chairs:
                if chair.seat in match.awaited and chair.player != EXPERT:
                    self._engine(chair).cancel(chair.turn_id)
        self.inner.cancel(request_id)

    def cache_counts(self) -> dict[str, int]:
        return cache_counts(self.inner)

    def pause(self) -> list[Partial]:
        """What others asked of the engine. Matches wait here, where their games are, until it goes on."""
        while self.thinking:
            wait([t.answer for t in self.thinking], timeout=PATIENCE_S)
            self.ready += self._answers()
        outer: list[Partial] = []
        for partial in self.inner.pause():
            (self._paused if isinstance(partial.request.user, Chair) else outer).append(partial)
        return outer

    def resume(self, partials: Sequence[Partial]) -> None:
        ours, self._paused = self._paused, []
        self.inner.resume([*partials, *ours])

    def load(self, weights: Any, version: int) -> None:
        self.inner.load(weights, version)
        self.past.keep(version)

    def sleep(self) -> None:
        self.inner.sleep()
        self.past.sleep()

    def wake(self) -> None:
        self.inner.wake()
        self.past.wake()
