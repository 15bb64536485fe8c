"""Who may see the page: whoever brings the token that `tidemill watch` printed, under a name the page answers to."""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "tidemill-watch"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Nothing is loaded from anywhere else, nobody may frame the page, and no script stands in the HTML.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """The token comes once in the address and is a cookie from then on; it is compared in constant time."""

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...] = ()) -> None:
        self.app, self.token, self.hosts = app, token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else ""
        if self.hosts and host not in self.hosts:  # a foreign name that leads here would read with the user's cookie
            return PlainTextResponse("this page does not answer to that name", 421)
        if not self.token:
            return None
        if self._is_right(_cookie(headers.get("cookie", ""))):
            return None
        asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        given = asked.pop("token", "")
        if self._is_right(given):
            rest = f"?{urlencode(asked)}" if asked else ""
            answer = RedirectResponse(scope["path"] + rest, 303)  # so that the token leaves the address bar
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        if self._is_right(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        return PlainTextResponse("open the address that `tidemill watch` printed: it carries the token", 401)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
