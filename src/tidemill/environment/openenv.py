"""Environments that are servers with OpenEnv's protocol: a WebSocket per conversation, with `reset`, `step`, `state`.

A row has the seed and the opening that the server showed for it. A conversation resets the server with that seed when
the model has spoken for the first time, so rows that wait hold no session.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tidemill.data.generators import Generator, Problem
from tidemill.environment.api import Maker, Task, Turn
from tidemill.errors import ConfigError, DataError, MissingExtra

CONNECT_S, ANSWER_S = 30.0, 60.0
PAUSE_S = 0.2  # before a full server is asked again
LARGEST = 16 << 20  # bytes of one message
OWN = ("done", "reward", "metadata")  # fields of an observation that are not for the model to read


class ServerError(Exception):
    """The server could not do what it was asked."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Session:
    """One WebSocket: one episode at a time. `patience_s`: for how long a server that is full is asked again."""

    def __init__(self, url: str, patience_s: float = 60.0, answer_s: float = ANSWER_S) -> None:
        self.url, self.answer_s = url, answer_s
        deadline = time.monotonic() + patience_s
        while True:
            self._socket = _connected(url)
            try:
                self.state()
                return
            except ServerError as error:
                self.close()
                if error.code != "CAPACITY_REACHED" or time.monotonic() > deadline:
                    raise
            except Exception:
                self.close()
                raise
            time.sleep(PAUSE_S)

    def reset(self, **given: Any) -> dict[str, Any]:
        return self._asked("reset", given)

    def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """`observation`, `reward` and `done`."""
        return self._asked("step", dict(action))

    def state(self) -> dict[str, Any]:
        return self._asked("state", None)

    def _asked(self, kind: str, data: Any) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # a server that is full says so before it closes: what it said is read below
            self._socket.send(json.dumps({"type": kind} | ({} if data is None else {"data": data})))
        try:
            told = json.loads(self._socket.recv(self.answer_s))
        except TimeoutError:
            self._socket.close()  # what it answers later belongs to no question
            raise ServerError(f"{self.url} gave no answer to {kind} in {self.answer_s:g} s") from None
        except ConnectionClosed as error:
            raise ServerError(f"{self.url} closed the connection: {error}") from error
        about: dict[str, Any] = told.get("data") or {}
        if told.get("type") == "error":
            raise ServerError(str(about.get("message", "unknown error")), str(about.get("code", "")))
        return about

    def close(self) -> None:
        self._socket.close()


def _connected(url: str) -> Any:
    try:
        from websockets.sync.client import connect
    except ImportError:
        raise MissingExtra("environment.name: openenv:…", "websockets", "openenv") from None
    place = url.rstrip("/").replace("http://", "ws://", 1).replace("https://", "wss://", 1)
    try:
        return connect(f"{place}/ws", open_timeout=CONNECT_S, max_size=LARGEST, proxy=None if _is_here(url) else True)
    except (OSError, TimeoutError) as error:
        raise ServerError(f"{url} does not answer: {error}") from error


def _is_here(url: str) -> bool:
    return any(f"//{host}" in url for host in ("localhost", "127.0.0.1", "[::1]"))


class OpenEnv:
    def __init__(
        self,
        task: Task,
        url: str,
        action: str = "message",
        read: str | None = None,
        fields: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        patience_s: float = 60.0,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`action`: the action's field for what the model says, or `json`: it says the whole action. `fields`: the
        action's other fields. `read`: the observation's field that the model reads; none: all of it, as JSON.
        `reset`: more arguments of a reset."""
        self.url, self.action, self.read, self.fields = url, action, read, dict(fields or {})
        self.seed, self.begin_with = int(task.meta.get("seed", task.seed)) % (1 << 31), dict(reset or {})
        self.opening: str | None = task.meta.get("opening")
        self.patience_s, self.answer_s = patience_s, answer_s
        self._session: Session | None = None

    def reset(self) -> str:
        return self._begin() if self.opening is None else self.opening

    def step(self, text: str) -> Turn:
        if self._session is None:
            shown = self._begin()
            if self.opening is not None and shown != self.opening:
                raise ValueError(f"the environment shows another opening for seed {self.seed} than it did before")
        assert self._session is not None
        try:
            told = self._session.step(self._said(text))
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Turn(is_done=True, parts={"broken_rules": 1.0})  # no action at all
        done = bool(told.get("done"))
        parts = {}
        if done:
            count = self._session.state().get("step_count")
            parts = {"steps": float(count)} if isinstance(count, int | float) else {}
        return Turn(self._text(told), is_done=done, reward=float(told.get("reward") or 0.0), parts=parts)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _begin(self) -> str:
        self._session = Session(self.url, self.patience_s, self.answer_s)
        return self._text(self._session.reset(seed=self.seed, **self.begin_with))

    def _said(self, text: str) -> dict[str, Any]:
        if self.action != "json":
            return {**self.fields, self.action: text}
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError("the model's words are no JSON object", "VALIDATION_ERROR")
        return {**self.fields, **found}

    def _text(self, told: Mapping[str, Any]) -> str:
        seen = told.get("observation")
        if not isinstance(seen, Mapping):
            return str(seen)
        if self.read is None:
            return json.dumps({k: v for k, v in seen.items() if k not in OWN}, ensure_ascii=False)
        if self.read not in seen:
            raise ConfigError(
                f"environment openenv:{self.url}: an observation has no field {self.read!r}",
                f"its fields are {', '.join(seen)}",
            )
        found = seen[self.read]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def maker(url: str) -> Maker:
    return lambda task, **args: OpenEnv(task, url, **args)


def generator(url: str) -> Generator:
    """Openings that the server shows, one per seed; `data.args` are the environment's own."""

    def make(rng: random.Random, **args: Any) -> Problem:
        seed = rng.randrange(1 << 31)
        environment = OpenEnv(Task(seed=seed), url, **args)
        try:
            opening = environment.reset()
        except ServerError as error:
            raise DataError(f"data.source openenv:{url}: {error}", "start the server") from error
        finally:
            environment.close()
        return Problem(opening, "", None, {"seed": seed, "opening": opening}, key=f"{url} {seed}")

    return make
