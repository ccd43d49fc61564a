"""Which requests are accepted: by the name they address, the page they come from, and the token they have."""

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aggregator.http.settings import HttpSettings

COOKIE = "protofleet_session"

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

SESSION = "/api/v1/session"

_OPEN = ("/healthz", "/readyz", SESSION)
"""Paths that need no token; nor do the page and its files, which show nothing of the fleet."""


class Access:
    """ASGI middleware that refuses requests, and adds the security headers."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
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
        refused = self._refusal(request)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> JSONResponse | None:
        if not is_own_host(request.headers.get("host", ""), self._settings.hosts):
            return problem(421, "unknown host: give its name as --http-host")
        is_read = request.method in {"GET", "HEAD"}
        if (not is_read or request.url.path.startswith("/api/")) and is_cross_site(request.headers):
            return problem(403, "cross-site request")
        return self._unauthorized(request, is_read=is_read)

    def _unauthorized(self, request: Request, *, is_read: bool) -> JSONResponse | None:
        settings, path = self._settings, request.url.path
        is_open = path in _OPEN or not (path.startswith("/api/") or path == "/metrics")
        if path == SESSION or (is_read and (settings.public or is_open)):
            return None
        if has_bearer(request.headers, settings.token):
            return None
        if not has_session(request, settings.token):
            return problem(401, "expected the token, as `Authorization: Bearer TOKEN` or by a sign-in")
        if not is_read and "origin" not in request.headers:
            return problem(403, "expected the header Origin of the dashboard's own page")
        return None


def problem(status: int, text: str) -> JSONResponse:
    """Return an error as JSON."""
    return JSONResponse({"error": text}, status)


def is_own_host(header: str, hosts: tuple[str, ...]) -> bool:
    """Return True unless the header Host has a name that an attacker's DNS server could answer for.

    An address in digits, which no DNS server answers for, is accepted, as are `localhost` and the configured names.
    """
    host = header.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in {name.lower() for name in hosts}
    return True


def is_cross_site(headers: Headers) -> bool:
    """Return True if a browser sends the request for a page of another origin."""
    if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def session_value(token: str) -> str:
    """Return the cookie of a browser that has sent the token; a restart of the server leaves it valid."""
    return hmac.new(token.encode(), b"protofleet dashboard session", hashlib.sha256).hexdigest()


def has_session(request: Request, token: str) -> bool:
    """Return True if the request has the cookie."""
    return hmac.compare_digest(
        request.cookies.get(COOKIE, "").encode(errors="replace"), session_value(token).encode()
    )


def has_bearer(headers: Headers, token: str) -> bool:
    """Return True if the request has the token itself."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and is_token(given.strip(), token)


def is_token(given: str, token: str) -> bool:
    """Compare a token in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
