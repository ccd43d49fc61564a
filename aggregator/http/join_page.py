"""The page for phones, `/join/`: its files, and their headers."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from aggregator.http.access import is_loopback_host

PATH = "/join"

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
}
"""Media types by suffix, of which alone files are served."""

NOT_SERVED = frozenset({"tests", "node_modules"})
"""Folders of a checkout."""

LIBRARIES = (
    "mqtt.esm.js",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.wasm.min.mjs",
    "standalone.module.js",
)
"""The page's files in the dashboard's `vendor` folder."""

WORKER = "sw.js"

INSECURE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>HTTPS is needed</title>
<h1>This address needs HTTPS</h1>
<p>Browsers give a page the camera, keys and offline use only over HTTPS, or on the machine itself.</p>
<p>Open the address with <code>https://</code>. If that does not answer, the operator starts the aggregator with
<code>--http-cert</code> and <code>--http-key</code>, or puts a proxy with a certificate in front of it, which sends
<code>X-Forwarded-Proto: https</code>.</p>
</html>
"""


class FileList:
    """The script that names the files of the page for its service worker, which keeps them for use without a network.

    It changes with any of them, and a changed script makes the browser fetch all again.
    """

    def __init__(self, phone: Path, vendor: Path) -> None:
        version, names = hashlib.sha256(), []
        for name, file in [*_page_files(phone), *((f"vendor/{name}", vendor / name) for name in LIBRARIES)]:
            names.append("./" if name == "index.html" else name)
            version.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        listed = {"version": version.hexdigest()[:16], "files": names}
        self.script = b"self.FILES = " + msgspec.json.encode(listed) + b";\n"

    async def answer(self, request: Request) -> Response:
        headers = page_headers(request.headers, is_tls=is_tls(request.scope, request.headers))
        return Response(self.script, headers={"content-type": TYPES[".js"], **headers})


def _page_files(phone: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(phone.rglob("*")):
        name = file.relative_to(phone)
        if file.suffix in TYPES and name.parts[0] not in NOT_SERVED and str(name) != WORKER:
            yield name.as_posix(), file


class JoinPage(StaticFiles):
    """The files of a folder with the headers of the page; nothing but files of TYPES."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        found = Path(path)
        if path != "." and ("\0" in path or found.suffix not in TYPES or found.parts[0] in NOT_SERVED):
            return "", None
        return super().lookup_path(path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        headers = Headers(scope=scope)
        response: Response
        if path in {".", "index.html"} and not is_secure(scope, headers):
            response = HTMLResponse(INSECURE, 403)
        else:
            response = await super().get_response(path, scope)
            if kind := TYPES.get(Path(getattr(response, "path", "")).suffix):
                response.headers["content-type"] = kind
        response.headers.update(page_headers(headers, is_tls=is_tls(scope, headers)))
        return response


def is_secure(scope: Scope, headers: Headers) -> bool:
    """Return True if browsers count the page as a secure context: HTTPS, also of a proxy, or this machine."""
    return is_tls(scope, headers) or is_loopback_host(headers.get("host", ""))


def is_tls(scope: Scope, headers: Headers) -> bool:
    return "https" in (scope["scheme"], headers.get("x-forwarded-proto"))


def page_headers(headers: Headers, *, is_tls: bool) -> dict[str, str]:
    """Return the headers of the page's files; the request's Host was checked by `Access`."""
    # For older browsers, in which 'self' is no WebSocket.
    own = f"{'wss' if is_tls else 'ws'}://{headers['host'].strip()}"
    return {
        "content-security-policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; "
        f"img-src 'self' blob: data:; connect-src 'self' {own}; worker-src 'self'; manifest-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "cross-origin-embedder-policy": "require-corp",
        "permissions-policy": "camera=(self)",
        "cache-control": "no-cache",
    }
