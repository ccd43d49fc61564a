"""Which requests are accepted: by the name they address, the page they come from, and the token they have.

The token is in a header that the page itself sets. There is no cookie, which a browser would also send for other pages,
and to other servers on this machine.
"""

import asyncio
import hmac
import ipaddress
import logging
import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.http.settings import HttpAddress, HttpSettings
from protocol.log import event

log = logging.getLogger(__name__)

WRONG_TOKEN_S = 1.0
"""Seconds that an answer to a wrong token takes."""

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Headers of every response, unless it has one of its own."""

_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<host>[a-z0-9_.-]+))(?::[0-9]{1,5})?")

OPEN = ("/healthz", "/readyz", "/api/v1/session", "/join/enroll")
"""Paths that need no token; nor do the page and its files, which show nothing of the fleet."""


class Access:
    """ASGI middleware that refuses requests, and adds the security headers."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await (self._app if self._may_connect(Headers(scope=scope)) else _refuse)(scope, receive, send)
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name.encode(), value.encode())
                        for name, value in SECURITY_HEADERS.items()
                        if name.encode() not in given
                    ),
                ]
            await send(message)

        request = Request(scope)
        refused = self._refusal(request) or await self._unauthorized(request)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _may_connect(self, headers: Headers) -> bool:
        """Return True for a WebSocket of the own page, or of a program, which sends no Origin."""
        return is_own_host(headers.get("host", ""), self._settings.hosts) and not is_other_origin(headers)

    def _refusal(self, request: Request) -> JSONResponse | None:
        if not is_own_host(request.headers.get("host", ""), self._settings.hosts):
            return problem(421, "unknown host: give its name as --http-host")
        if (not _is_read(request) or _path(request).startswith("/api/")) and is_cross_site(request.headers):
            return problem(403, "cross-site request")
        return None

    async def _unauthorized(self, request: Request) -> JSONResponse | None:
        settings, path = self._settings, _path(request)
        if has_token(request.headers, settings.token):
            return None
        if may_read(request.headers, settings):
            return None if _is_read(request) else problem(403, "this token is for reading")
        if "authorization" in request.headers:
            where = request.client.host if request.client else None
            event(log, logging.WARNING, "request with a wrong token refused", address=where)
            await asyncio.sleep(WRONG_TOKEN_S)
            return problem(401, "wrong token")
        is_page = not (path.startswith("/api/") or path == "/metrics")
        if path in OPEN or (_is_read(request) and (settings.public or is_page)):
            return None
        return problem(401, "expected the token, as `Authorization: Bearer TOKEN`")


async def _refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer 403 to a WebSocket."""
    await send({"type": "websocket.close"})


def _path(request: Request) -> str:
    """Return the path that is routed; that of `request.url` may contain a part of the header Host."""
    return str(request.scope["path"])


def _is_read(request: Request) -> bool:
    return request.method in {"GET", "HEAD"}


def problem(status: int, text: str, **more: str) -> JSONResponse:
    return JSONResponse({"error": text, **more}, status)


def is_own_host(header: str, hosts: tuple[str, ...]) -> bool:
    """Return True unless the header Host has a name that an attacker's DNS server could answer for.

    An address in digits, which no DNS server answers for, is accepted, as are `localhost` and the configured names.
    """
    host = _host(header)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in {name.lower() for name in hosts}
    return True


def is_loopback_host(header: str) -> bool:
    """Return True if the header Host is `localhost` or a loopback address."""
    return HttpAddress(_host(header), 0).is_loopback


def _host(header: str) -> str:
    """Return the host of a header Host, without the port; empty if it is invalid."""
    found = _HOST.fullmatch(header.strip().lower())
    return (found["ipv6"] or found["host"]) if found is not None else ""


def is_cross_site(headers: Headers) -> bool:
    """Return True if a browser sends the request for a page of another origin."""
    if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return True
    return is_other_origin(headers)


def is_other_origin(headers: Headers) -> bool:
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def may_read(headers: Headers, settings: HttpSettings) -> bool:
    return bool(settings.read_token) and has_token(headers, settings.read_token)


def has_token(headers: Headers, token: str) -> bool:
    """Return True if the request has the token; it is compared in constant time."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(errors="replace"), token.encode()
    )
