"""The page on which a person reviews findings, with one key a class; it answers this machine only.

The page's address has a random token behind `#`, which browsers do not send; its script sends the token with each
request. Without it no image is shown or moved. There are no cookies.
"""

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from edge_client.apps.http.limits import (
    Answer,
    Body,
    LimitedHandler,
    LimitedServer,
    Refused,
)
from edge_client.apps.http.options import ServerOptions
from edge_client.apps.review.findings import TITLES, Finding, Review
from edge_client.apps.review.relabeling import NotMoved, Relabeling
from edge_client.graphs.session import release_memory
from edge_client.images.decoding import decoded
from edge_client.images.images import LabeledImage
from protocol.models.preprocessing import to_rgb

THUMBNAIL_PX = 640

_FILES = {
    "/review": ("review.html", "text/html; charset=utf-8"),
    "/review.js": ("review.js", "text/javascript; charset=utf-8"),
    "/review.css": ("review.css", "text/css; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class ReviewServer(LimitedServer):
    """Serves the page `/review` of a device's findings.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        options: ServerOptions,
        found: Review,
        *,
        classes: Sequence[str],
        folders: Relabeling,
        has_others: bool,
        keep: Callable[[LabeledImage], None],
    ) -> None:
        self.found, self.classes, self.folders, self.has_others = found, classes, folders, has_others
        self.keep, self.kept = keep, set[int]()
        self.paths = [each.image.path for each in found.findings]
        """Where the findings' images are now."""
        super().__init__(options, RequestHandler)

    def content(self) -> dict[str, Any]:
        """Return what the page shows."""
        held_out, correct = self.found.held_out
        return {
            "classes": self.classes,
            "has_others": self.has_others,
            "titles": TITLES,
            "images": self.found.images,
            "held_out": held_out,
            "correct": correct,
            "findings": [
                {**self._entry(finding, path), "kept": number in self.kept}
                for number, (finding, path) in enumerate(zip(self.found.findings, self.paths, strict=True))
            ],
        }

    def _entry(self, finding: Finding, path: Path) -> dict[str, Any]:
        is_moved = path != finding.image.path
        return {
            **finding.fields(),
            "image": finding.image.relative,
            "moved_to": str(path) if is_moved else None,
        }

    def note(self, before: Path, after: Path) -> None:
        """Note where an image is now: it may be that of several findings."""
        self.paths = [after if path == before else path for path in self.paths]


class RequestHandler(LimitedHandler):
    """Answers the request of one connection."""

    server: ReviewServer
    usage = "expected GET /review"
    further_headers = (("Content-Security-Policy", _POLICY), ("Referrer-Policy", "no-referrer"))

    def check_origin(self) -> None:
        """Refuse the requests of other web pages, and of names that an attacker's DNS server leads here."""
        host = self.headers.get("Host", "")
        port = self.server.server_port
        if host not in {f"127.0.0.1:{port}", f"localhost:{port}"}:
            raise Refused(421, f"expected localhost:{port} or 127.0.0.1:{port} as Host")
        is_own = self.headers.get("Origin") in {None, f"http://{host}"}
        if not is_own or self.headers.get("Sec-Fetch-Site") not in {None, "none", "same-origin"}:
            raise Refused(403, "requests of other web pages are refused")

    def respond(self) -> Answer:
        """Return the page, the findings, an image, or the result of a move."""
        path = urlsplit(self.path).path
        if self.method == "GET" and path in _FILES:
            return 200, _file(path)
        self.check_token()
        if self.method == "GET" and path == "/review/findings":
            return 200, self.server.content()
        if self.method == "GET" and path == "/review/image":
            return 200, self._thumbnail()
        changes = {"/review/move": self._move, "/review/keep": self._keep, "/review/undo": self._undo}
        if self.method == "POST" and path in changes:
            return changes[path]()
        return super().respond()

    def _number(self, name: str, end: int) -> int:
        (text, *_) = parse_qs(urlsplit(self.path).query).get(name, [""])
        if not re.fullmatch("[0-9]{1,6}", text) or int(text) >= end:
            raise Refused(400, f"expected {name} to be below {end}")
        return int(text)

    def _thumbnail(self) -> Body:
        path = self.server.paths[self._number("finding", len(self.server.paths))]
        with self.turn(), contextlib.ExitStack() as stack:
            stack.callback(release_memory)
            image = to_rgb(stack.enter_context(decoded(path)))
            image.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
            data = io.BytesIO()
            image.save(data, "JPEG", quality=85)
        return Body("image/jpeg", data.getvalue())

    def _move(self) -> Answer:
        server = self.server
        number = self._number("finding", len(server.paths))
        others = len(server.classes)  # behind the classes
        label = self._number("class", others + server.has_others)
        with self.turn(), _conflicts():
            path = server.paths[number]
            image = server.found.findings[number].image
            moved = server.folders.move(image, path, None if label == others else label)
            server.note(path, moved)
        return 200, server.content()

    def _keep(self) -> Answer:
        server = self.server
        number = self._number("finding", len(server.paths))
        image = server.found.findings[number].image
        if server.paths[number] == image.path:  # a moved one has its class already
            with self.turn():
                server.keep(image)
                server.kept.add(number)
        return 200, server.content()

    def _undo(self) -> Answer:
        server = self.server
        with self.turn(), _conflicts():
            if (moved := server.folders.undo()) is not None:
                server.note(*moved)
        return 200, server.content()


@contextlib.contextmanager
def _conflicts() -> Iterator[None]:
    try:
        yield
    except NotMoved as error:
        raise Refused(409, str(error)) from error


@cache
def _file(path: str) -> Body:
    name, media_type = _FILES[path]
    return Body(media_type, (Path(__file__).parent / "page" / name).read_bytes())
