"""An engine whose samples are made by programs: each is given an endpoint, a key and its task, and what the model says
to it is what is learned.

Around any rollout engine, as `rollout.turns.TurnsEngine` is. Requests with a task start a program per sample; the
endpoint in front of the engine is this process's own, on the loopback address, and a sample's key ties its calls
together. Calls are answered whenever the worker steps the engine, so weights may change in the middle of a
conversation.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidemill.environment.api import Played
from tidemill.errors import PlayError
from tidemill.models.load import LoadedModel
from tidemill.recipe.config import Config
from tidemill.rollout.engine import Completion, Finish, Partial, Request, RolloutEngine, cache_counts, run_callbacks
from tidemill.serve.app import App
from tidemill.serve.link import EngineLink
from tidemill.serve.programs.capture import row_of, trajectories
from tidemill.serve.programs.processes import Outcome, Programs
from tidemill.serve.programs.seat import Seat
from tidemill.serve.server import HttpServer, listen
from tidemill.serve.service import SERVED, Served, Service, Session
from tidemill.serve.talk import Talk

PATIENCE_S = 0.02  # between looks, when no model works
AT_ONCE = 32
TOKENIZER = "TIDEMILL_TOKENIZER"  # the tokenizer's folder, for programs that make tokens themselves
GRACE_S = 5.0  # for a killed program to be reported


class Doors:
    """Who comes in: the samples under way, by their keys."""

    def __init__(self) -> None:
        self._seats: dict[bytes, Seat] = {}

    def let_in(self, seat: Seat) -> None:
        self._seats[_digest(seat.key)] = seat

    def forget(self, seat: Seat) -> None:
        self._seats.pop(_digest(seat.key), None)

    def session(self, key: str, headers: Mapping[str, str]) -> Session | None:
        return self._seats.get(_digest(key))  # found by its hash: how long that takes tells nothing of the key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ProgramsEngine:
    def __init__(self, inner: RolloutEngine, loaded: LoadedModel, config: Config) -> None:
        assert config.environment is not None and config.environment.program is not None
        self.inner, self.settings = inner, config.environment
        self.window = min(loaded.window, config.data.max_prompt_tokens + config.rollout.max_new_tokens)
        talk = Talk(loaded.tokenizer, config.data.chat_args, is_chat=config.data.chat != "off")
        self.link = EngineLink(inner)
        eos_ids = frozenset(loaded.eos_ids)
        self.end_token = loaded.eos_ids[0]
        self.service = Service([Served("policy", talk, self.link, self.window, eos_ids)], takes_any_name=True)
        self.text = talk.text
        self.doors = Doors()
        self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="tidemill-tokenizer-")
        loaded.tokenizer.save_pretrained(self._tokenizer_folder.name)
        variables = {TOKENIZER: self._tokenizer_folder.name}
        self.programs = Programs(config.environment, self.link.notice, variables)
        self.waiting: deque[Seat] = deque()
        self.playing: dict[str, Seat] = {}  # by the program's name
        self.ready: list[Completion] = []
        self._paused: list[Partial] = []
        self._http: HttpServer | None = None
        self._names = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def has_work(self) -> bool:
        return bool(self.inner.has_work or self.waiting or self.playing or self.ready or self.link.has_asked)

    def submit(self, request: Request) -> None:
        if request.task is None:
            self.inner.submit(request)
            return
        prompt = self.text(request.prompt)
        for index in range(request.n):
            self.waiting.append(Seat(request, index, prompt, self.settings, secrets.token_urlsafe(24)))

    def step(self) -> list[Completion]:
        self._fill()
        self.link.rest()
        self.link.exchange()
        made: list[Completion] = []
        if self.inner.has_work:
            made = [c for c in self.inner.step() if c.request.user is not SERVED]
            self.link.hand_over()
        elif self.playing and not self.programs.done:
            self.link.wait(PATIENCE_S)
        done, self.ready = self.ready, []
        return made + run_callbacks(done + self._ended(), self.ready)

    # Programs

    def _fill(self) -> None:
        at_once = self.settings.workers or AT_ONCE
        while self.waiting and len(self.playing) < at_once:
            seat = self.waiting.popleft()
            self._names += 1
            name = f"{self._names}"
            self.playing[name] = seat
            self.doors.let_in(seat)
            seat.begin()
            self.programs.start(name, f"{self._address()}/v1", seat.key, seat.task())

    def _address(self) -> str:
        if self._http is None:
            app = App(self.service, self.doors, self.settings.max_body)
            self._http = HttpServer(app, [self.link], listen("127.0.0.1", 0))
            self._http.start()
        return self._http.address

    def _ended(self) -> list[Completion]:
        done = []
        while self.programs.done:
            outcome = self.programs.done.popleft()
            seat = self.playing.pop(outcome.name, None)
            if seat is not None:
                done.append(self._finish(seat, outcome))
        now = time.monotonic()
        for name, seat in list(self.playing.items()):
            if seat.fault is None and now > seat.deadline:
                seat.fault = f"did not end within {self.settings.timeout_s:g} s"
            if seat.fault is not None and not seat.is_killed:
                seat.is_killed, seat.deadline = True, now + GRACE_S
                self.programs.kill(name)
            elif seat.is_killed and now > seat.deadline:  # the report itself was lost
                done.append(self._finish(self.playing.pop(name), Outcome(name)))
        return done

    def _finish(self, seat: Seat, outcome: Outcome) -> Completion:
        self.doors.forget(seat)
        for answering in seat.close():
            self.link.cancel(answering)
        if seat.is_cancelled:
            return self._completion(seat, Played(), "cancelled")
        error = seat.fault or outcome.error
        if error is None:
            try:
                played = seat.played(outcome.value)
            except (TypeError, ValueError) as wrong:
                error = f"gave {outcome.value!r:.80}, which is no outcome: {wrong}"
        if error is not None:
            error = f"environment.program {self.settings.program!r} {error}"
            if self.settings.on_error == "fail":
                raise PlayError(error, "mend the program, or set environment.on_error=end")
            played = Played(turns=len(seat.calls), error=error)
        return self._completion(seat, played, "length" if seat.is_cut else "stop")

    def _completion(self, seat: Seat, played: Played, finish: Finish) -> Completion:
        found = trajectories(seat.calls)
        dropped = len(found) - self.settings.max_trajectories
        row = row_of(found[max(dropped, 0) :], seat.request.prompt, self.end_token, self.version)
        parts = {**played.parts, "trajectories": float(len(found)), "calls": float(len(seat.calls))}
        if dropped > 0:
            parts["dropped_trajectories"] = float(dropped)
        request = replace(seat.request, prompt=row.prompt)
        made = Completion(
            request, seat.index, row.tokens, row.logprobs, row.versions, finish, None, row.kept, None, row.mask,
            replace(played, parts=parts),
        )  # fmt: skip
        made.starts = row.starts
        made.turn_rewards = seat.turn_rewards(row.turns, row.calls)
        return made

    # Control

    def cancel(self, request_id: int) -> None:
        for seat in [s for s in self.waiting if s.request.id == request_id]:
            self.waiting.remove(seat)
            self.ready.append(self._completion(seat, Played(), "cancelled"))
        for seat in self.playing.values():
            if seat.request.id == request_id:
                seat.is_cancelled, seat.fault = True, "was cancelled"
        self.inner.cancel(request_id)

    def cache_counts(self) -> dict[str, int]:
        return cache_counts(self.inner)

    def pause(self) -> list[Partial]:
        """What others asked of the engine. Calls of programs wait here until it goes on."""
        outer = list[Partial]()
        for partial in self.inner.pause():
            (self._paused if partial.request.user is SERVED else outer).append(partial)
        return outer

    def resume(self, partials: Sequence[Partial]) -> None:
        ours, self._paused = self._paused, []
        self.inner.resume([*partials, *ours])

    def load(self, weights: Any, version: int) -> None:
        self.inner.load(weights, version)

    def sleep(self) -> None:
        self.inner.sleep()

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        """End all programs and the endpoint."""
        self.programs.close()
        if self._http is not None:
            self._http.end()
            self._http = None
        self._tokenizer_folder.cleanup()
