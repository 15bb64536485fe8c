"""The server's addresses: who may ask, how much, and what each answers. Nothing that a request says reaches code or
files."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tidemill.serve import chatting, completing, responding
from tidemill.serve.asking import Chatting, Completing, Detokenizing, Generating, Refused, Tokenizing, decoded
from tidemill.serve.link import Answering
from tidemill.serve.service import Service, Session

MOST_BODY = 8 << 20  # bytes of one request
LONG = 1 << 15  # bytes of a request, that take milliseconds
BODY_S = 60.0  # for a request's body to come
CLOSED = 499  # what proxies write down where the client went away

T = TypeVar("T")

encode = msgspec.json.Encoder().encode


class Doorkeeper(Protocol):
    """Who comes in with which key."""

    def session(self, key: str, headers: Mapping[str, str]) -> Session | None: ...


class OneKey:
    """A server with one key, or with none, for everybody."""

    def __init__(self, service: Service, key: str) -> None:
        self.service, self.key = service, key.encode()

    def session(self, key: str, headers: Mapping[str, str]) -> Session | None:
        if self.key and not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key):
            return None
        return self.service.visitor(headers.get("x-session-id"))


@dataclass(slots=True)
class App:
    service: Service
    door: Doorkeeper
    most_body: int = MOST_BODY
    hosts: tuple[str, ...] = ()  # names that it answers to; none: any
    kept: responding.Responses = None  # type: ignore[assignment]  # made below

    def __post_init__(self) -> None:
        self.kept = responding.Responses()

    # Endpoints

    async def chat(self, request: Request, session: Session) -> Response:
        text = await self._body(request)
        body: Chatting = decoded(Chatting, text)
        given = await _apart(len(text), chatting.read, self.service, session, body)
        call = chatting.begin(self.service, session, body, given)
        if body.stream:
            return Events(chatting.chunks(call), lambda: self._cancel(call.answering))
        return JSON(await self._watched(request, chatting.answer(call), [call.answering]))

    async def completions(self, request: Request, session: Session) -> Response:
        text = await self._body(request)
        body: Completing = decoded(Completing, text)
        prompts = await _apart(len(text), completing.read, self.service, body)
        call = completing.begin(self.service, session, body, prompts)
        if body.stream:
            return Events(completing.chunks(call), lambda: self._cancel(*call.answering))
        return JSON(await self._watched(request, completing.answer(call), call.answering))

    async def responses(self, request: Request, session: Session) -> Response:
        text = await self._body(request)
        body: responding.Responding = decoded(responding.Responding, text)
        call = responding.ResponseCall(body, self.kept, _key(request))
        call.begin(self.service, session, await _apart(len(text), chatting.read, self.service, session, call.chat))
        if body.stream:
            return Events(responding.numbered(call.events()), lambda: self._cancel(call.call.answering), has_names=True)
        return JSON(await self._watched(request, call.answer(), [call.call.answering]))

    async def generate(self, request: Request, session: Session) -> Response:
        body: Generating = decoded(Generating, await self._body(request))
        return JSON(await completing.generate(self.service, session, body))

    async def tokenize(self, request: Request, session: Session) -> Response:
        text = await self._body(request)
        return JSON(await _apart(len(text), completing.tokenize, self.service, decoded(Tokenizing, text)))

    async def detokenize(self, request: Request, session: Session) -> Response:
        text = await self._body(request)
        return JSON(await _apart(len(text), completing.detokenize, self.service, decoded(Detokenizing, text)))

    async def models(self, request: Request, session: Session) -> Response:
        return JSON({"object": "list", "data": [_model(m) for m in self.service.models.values()]})

    async def model(self, request: Request, session: Session) -> Response:
        return JSON(_model(self.service.model(request.path_params["name"])))

    async def metrics(self, request: Request, session: Session) -> Response:
        return PlainTextResponse(self.service.metrics.text(self.service.models), media_type="text/plain; version=0.0.4")

    # Around them

    async def _body(self, request: Request) -> bytes:
        """Read no more than is allowed, whatever the client says of its length."""
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self.most_body:
            raise Refused(f"the body is larger than {self.most_body} bytes", status=413)
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    size += len(part)
                    if size > self.most_body:
                        raise Refused(f"the body is larger than {self.most_body} bytes", status=413)
                    parts.append(part)
        except TimeoutError:
            raise Refused(f"the body did not come within {BODY_S:g} s", status=408) from None
        return b"".join(parts)

    async def _watched(self, request: Request, answer: Awaitable[Any], answering: list[Answering]) -> Any:
        """The answer, unless the client goes away before it is made: then nobody makes it to the end."""
        made = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait([made, gone], return_when=asyncio.FIRST_COMPLETED)
            if made.done():
                return made.result()
            raise ClientDisconnect
        finally:
            gone.cancel()
            if not made.done():
                made.cancel()
            self._cancel(*answering)

    def _cancel(self, *answering: Answering) -> None:
        for one in answering:
            for model in self.service.models.values():
                model.link.cancel(one)

    def open(
        self, endpoint: Callable[[Request, Session], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for those who have a key; what is refused is answered as OpenAI's servers do."""

        async def opened(request: Request) -> Response:
            try:
                self._refuse_other_sites(request)
                session = self.door.session(_key(request), request.headers)
                if session is None:
                    raise Refused("the API key is not right", status=401, code="invalid_api_key")
                return await endpoint(request, session)
            except Refused as refused:
                return self._refusal(refused)
            except ClientDisconnect:
                return Response(status_code=CLOSED)

        return opened

    def _refuse_other_sites(self, request: Request) -> None:
        """Refuse a page of the web that the user's browser has open: its name may lead here, or it asks blindly."""
        for header, status in (("host", 421), ("origin", 403)):
            place = request.headers.get(header, "" if header == "host" else None)
            if self.hosts and place is not None and _name(place) not in self.hosts:
                raise Refused(f"without a key this server answers to the {header} localhost alone", status=status)

    def _refusal(self, refused: Refused) -> Response:
        self.service.metrics.refused[refused.status] += 1
        return JSON(error_of(refused), refused.status, close=refused.status in (408, 413))


def application(app: App) -> Starlette:
    posts = {
        "/v1/chat/completions": app.chat,
        "/v1/completions": app.completions,
        "/v1/responses": app.responses,
        "/inference/v1/generate": app.generate,
        "/tokenize": app.tokenize,
        "/detokenize": app.detokenize,
    }
    gets = {"/v1/models": app.models, "/v1/models/{name:path}": app.model, "/metrics": app.metrics}
    routes = [Route(path, app.open(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, app.open(endpoint), methods=["GET"]) for path, endpoint in gets.items()]
    routes.append(Route("/health", _health, methods=["GET"]))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}: {error.detail}"
        return JSON(error_of(Refused(what, status=error.status_code)), error.status_code)

    async def failed(request: Request, error: Exception) -> Response:
        return JSON(error_of(Refused("the server failed; its log says why", status=500)), 500)

    return Starlette(routes=routes, exception_handlers={HTTPException: refused, 500: failed})


async def _apart(size: int, work: Callable[..., T], *given: Any) -> T:
    """What a request asks for, beside the loop where it is long: others are answered in the meantime."""
    return await asyncio.to_thread(work, *given) if size > LONG else work(*given)


async def _health(request: Request) -> Response:
    return PlainTextResponse("")


def _model(model: Any) -> dict[str, Any]:
    about = {"id": model.name, "object": "model", "created": model.created, "owned_by": "tidemill"}
    return {**about, "root": model.root or model.name, "parent": model.parent, "max_model_len": model.window}


def _key(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


def _name(place: str) -> str:
    """Return the host of a Host or Origin header."""
    host = place.rpartition("//")[2]
    return host if host.endswith("]") else host.rpartition(":")[0] or host


def error_of(refused: Refused) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.field, "code": refused.code}}


class JSON(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, *, close: bool = False) -> None:
        super().__init__(encode(content), status_code, {"connection": "close"} if close else None)


class Events(Response):
    """Server-sent events of what is made; a client that goes away ends it."""

    def __init__(
        self, made: AsyncIterator[dict[str, Any]], cancel: Callable[[], None], has_names: bool = False
    ) -> None:
        self.made, self.cancel, self.has_names = made, cancel, has_names
        self.status_code, self.background, self.body = 200, None, b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda _: self.cancel())
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self.made:
                if gone.done():
                    return
                await send(_part(self._event(event)))
        except Refused as refused:  # the answer has begun: what went wrong is its last event
            error = error_of(refused)
            await send(_part(self._event({"type": "error", **error["error"]} if self.has_names else error)))
        finally:
            gone.cancel()
            self.cancel()
        await send({"type": "http.response.body", "body": b"" if self.has_names else b"data: [DONE]\n\n"})

    def _event(self, event: dict[str, Any]) -> bytes:
        name = b"event: %s\n" % event["type"].encode() if self.has_names else b""
        return b"%sdata: %s\n\n" % (name, encode(event))


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
