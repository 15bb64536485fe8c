"""The page's server: JSON of a run's folder, events while it grows, and, where it is allowed, commands to it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tidemill.errors import ConfigError, TidemillError
from tidemill.observe import control
from tidemill.observe.pictures import FOLDER as IMAGES
from tidemill.observe.run_folder import NOTES
from tidemill.watch import lines, samples
from tidemill.watch.compare import compare
from tidemill.watch.guard import Guard
from tidemill.watch.runs import Run, Runs
from tidemill.watch.timeline import steps_of
from tidemill.watch.tokens import Tokens

STATIC = Path(__file__).with_name("static")
LOOK_S = 0.5  # between looks at a run's files for whoever watches it
BEAT_S = 15.0  # a word when nothing happens, so that a lost page is noticed
THREADS = 4  # that answer: each keeps memory of its own
MOST_POINTS, MOST_NAMES, MOST_SAMPLES, MOST_STEPS = 4000, 64, 200, 20
IMAGE = re.compile(r"[0-9a-f]{32}\.png|episode-\d+\.gif")

Answer = dict[str, Any] | list[Any]


class NotFound(TidemillError):
    """The address names a run that is not in the folder."""


class Page:
    """Answers of every address. `may_control`: commands are taken."""

    def __init__(self, runs: Runs, may_control: bool, ending: threading.Event) -> None:
        self.runs, self.may_control, self.ending = runs, may_control, ending
        self.tokens = Tokens()

    def _run(self, request: Request, name: str = "run") -> Run:
        asked = request.query_params.get(name, "")
        found = self.runs.get(asked)
        if found is None:
            raise NotFound(f"there is no run {asked!r} here")
        return found

    def list_runs(self, request: Request) -> Answer:
        found = [run.brief() for name in self.runs.names() if (run := self.runs.get(name)) is not None]
        return {"runs": found, "chosen": self.runs.chosen, "may_control": self.may_control}

    def overview(self, request: Request) -> Answer:
        return self._run(request).overview()

    def series(self, request: Request) -> Answer:
        run, asked = self._run(request), request.query_params
        names = asked.getlist("name")[:MOST_NAMES]
        points = min(MOST_POINTS, _whole(asked.get("points"), 600))
        first, last = _whole(asked.get("from"), 0), _whole(asked.get("to"), 1 << 60)
        curves, is_whole = run.series.curves(names, points, first, last)
        return {"curves": {n: [c.steps, c.values] for n, c in curves.items()}, "is_whole": is_whole}

    def samples(self, request: Request) -> Answer:
        run, asked = self._run(request), request.query_params
        sorts = ("step", "reward", "length", "prompt")
        sort = asked.get("sort", "-step")
        if sort.lstrip("-") not in sorts:
            raise ConfigError(
                f"samples cannot be sorted by {sort!r}", f"by {', '.join(sorts)}, with - in front to fall"
            )
        query = samples.Query(
            text=asked.get("q", ""),
            first=_whole(asked.get("from"), 0),
            last=_whole(asked.get("to"), 1 << 60),
            sort=sort,
            correct={"true": True, "false": False}.get(asked.get("correct", "")),
            count=min(MOST_SAMPLES, _whole(asked.get("n"), 50)),
            cursor=_whole(asked.get("cursor"), -1) if asked.get("cursor") else None,
        )
        return msgspec.to_builtins(samples.find(run.samples, query))  # type: ignore[no-any-return]

    def group(self, request: Request) -> Answer:
        """The samples of one group, with their tokens' texts where the run kept tokens."""
        run = self._run(request)
        found = samples.group_of(run.samples, _whole(request.query_params.get("at"), -1))
        noted = samples.notes_of(run.path / NOTES, found)
        return [self.tokens.added(run.path, sample | noted.get(sample.get("id", -1), {})) for sample in found]

    def image(self, request: Request) -> Path:
        """A picture that a sample shows."""
        run, name = self._run(request), request.query_params.get("name", "")
        file = run.path / IMAGES / name
        if not IMAGE.fullmatch(name) or not file.is_file():
            raise NotFound(f"{run.name} has no picture {name!r}")
        return file

    def flow(self, request: Request) -> Answer:
        run = self._run(request)
        return {"status": run.status(), "last": run.series.last(), "state": run.state()}

    def timeline(self, request: Request) -> Answer:
        """What every worker did in some steps: the newest, or from the one that is asked for."""
        run, asked = self._run(request), request.query_params
        count = min(MOST_STEPS, _whole(asked.get("n"), 3))
        return steps_of(run.path, _whole(asked.get("step"), 0), count)

    def weights(self, request: Request) -> Answer:
        return {"checkpoints": self._run(request).checkpoints()}

    def config(self, request: Request) -> Answer:
        return self._run(request).config()

    def compare(self, request: Request) -> Answer:
        return compare(self._run(request, "one"), self._run(request, "other"))

    def steer(self, run: Run, asked: dict[str, Any]) -> Answer:
        if run.state() != "running":
            raise ConfigError(f"{run.name} is not running", f"tidemill resume {run.path}")
        if asked.get("kind") == "scale":
            from tidemill.cluster.driver.status import want_rollouts

            want_rollouts(run.path, max(1, int(asked.get("value", 1))))
            return {"asked": "scale"}
        try:
            value = float(asked.get("value") or 0.0)
        except (TypeError, ValueError):
            raise ConfigError(f"{asked.get('value')!r} is no number", "write it as 1e-6 or 0.8") from None
        made = control.command(str(asked.get("kind", "")), str(asked.get("key") or ""), value, by="watch")
        control.ask(run.path, made)
        return {"asked": made.kind, "id": made.id}


def application(
    runs: Runs,
    *,
    token: str,
    may_control: bool = False,
    hosts: tuple[str, ...] = (),
    ending: threading.Event | None = None,
) -> Starlette:
    """`hosts`: names under which the page may be asked for; empty: any. `token`: "" for none. `ending`: set when the
    server is to end, because streams of events would keep it."""
    page = Page(runs, may_control, ending or threading.Event())
    answers = {
        "runs": page.list_runs,
        "run": page.overview,
        "series": page.series,
        "samples": page.samples,
        "group": page.group,
        "flow": page.flow,
        "timeline": page.timeline,
        "weights": page.weights,
        "config": page.config,
        "compare": page.compare,
    }
    routes = [
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        *[Route(f"/api/{name}", _answering(answer)) for name, answer in answers.items()],
        Route("/api/image", _showing(page)),
        Route("/api/events", partial(_events, page)),
        Route("/api/control", _commanding(page), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    guard = Middleware(Guard, token=token, hosts=hosts)
    return Starlette(routes=routes, middleware=[guard], lifespan=_indexing(runs))


def _answering(answer: Callable[[Request], Answer]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            return _json(await run_in_threadpool(answer, request))
        except TidemillError as error:
            return _refusal(error)

    return endpoint


def _showing(page: Page) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            file = await run_in_threadpool(page.image, request)
        except TidemillError as error:
            return _refusal(error)
        return FileResponse(file, headers={"cache-control": "max-age=86400, immutable"})  # its name is what it shows

    return endpoint


def _commanding(page: Page) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        if not page.may_control:
            return _json({"error": "this page only reads: start it with --control to steer runs"}, 403)
        if request.headers.get("content-type", "").split(";")[0] != "application/json":
            return _json({"error": "a command is a JSON object"}, 415)  # a form of a foreign page cannot send one
        try:
            asked = json.loads(await request.body())
            run = page.runs.get(str(asked["run"]))
        except (ValueError, KeyError, TypeError):
            return _json({"error": "a command is a JSON object with run and kind"}, 400)
        try:
            if run is None:
                raise NotFound(f"there is no run {asked['run']!r} here")
            return _json(await run_in_threadpool(page.steer, run, asked))
        except TidemillError as error:
            return _refusal(error)

    return endpoint


async def _events(page: Page, request: Request) -> Response:
    """What moved in the runs that are watched: one event each time, none while nothing moves."""
    names = request.query_params.getlist("run")[:8]
    found = [run for name in names if (run := page.runs.get(name)) is not None]

    async def stream() -> AsyncIterator[bytes]:
        told: dict[str, Any] = {}
        quiet = 0.0
        while not (page.ending.is_set() or await request.is_disconnected()):
            for run in found:
                now = await run_in_threadpool(_moved, run)
                if told.get(run.name) != now:
                    told[run.name], quiet = now, 0.0
                    yield b"data: " + json.dumps({"run": run.name, **now}).encode() + b"\n\n"
            if quiet >= BEAT_S:
                quiet = 0.0
                yield b": nothing new\n\n"
            await asyncio.sleep(LOOK_S)
            quiet += LOOK_S

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _moved(run: Run) -> dict[str, Any]:
    """What a page needs to know to ask again; costs four looks at file sizes."""
    sizes = {name: lines.size_of(run.path / name) for name in ("metrics.jsonl", "samples.jsonl", control.DONE)}
    try:
        status = (run.path / "status.json").stat().st_mtime
    except OSError:
        status = 0.0
    is_indexed = run.series.offset >= sizes["metrics.jsonl"]
    return {"metrics": sizes["metrics.jsonl"], "samples": sizes["samples.jsonl"], "status": status} | {
        "steered": sizes[control.DONE],
        "is_indexed": is_indexed,
    }


def _indexing(runs: Runs) -> Callable[[Starlette], Any]:
    """Index opened runs beside the requests, a slice at a time."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ending = threading.Event()
        to_thread.current_default_thread_limiter().total_tokens = THREADS

        def work() -> None:
            while not ending.is_set():
                has_more = [run.series.advance() for run in runs.opened()]
                ending.wait(0.002 if any(has_more) else LOOK_S)

        thread = threading.Thread(target=work, name="index", daemon=True)
        thread.start()
        yield
        ending.set()
        await run_in_threadpool(thread.join, 5.0)

    return lifespan


def _json(answer: Answer, status: int = 200) -> Response:
    body = json.dumps(answer, default=str, ensure_ascii=False).encode()
    return Response(body, status, media_type="application/json", headers={"cache-control": "no-store"})


def _refusal(error: TidemillError) -> Response:
    status = 404 if isinstance(error, NotFound) else 400
    return _json({"error": error.message, "remedy": error.remedy or ""}, status)


def _whole(text: str | None, otherwise: int) -> int:
    try:
        return int(text) if text else otherwise
    except ValueError:
        raise ConfigError(f"{text!r} is no whole number", "write digits") from None
