"""Predictions over HTTP: an image in, classes and probabilities out."""

import re
from urllib.parse import parse_qs, urlsplit

from edge_client.apps.head_in_use import HeadInUse
from edge_client.apps.http.limits import Answer, LimitedHandler, LimitedServer, Refused
from edge_client.apps.http.options import ServerOptions
from edge_client.graphs.session import release_memory
from protocol.errors import ProtofleetError, UnreadableImage

MAX_TOP = 4096


class PredictionServer(LimitedServer):
    """Answers `POST /predict` and `GET /healthz`.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, options: ServerOptions, heads: HeadInUse) -> None:
        self.heads = heads
        super().__init__(options, RequestHandler)


class RequestHandler(LimitedHandler):
    """Answers the request of one connection."""

    server: PredictionServer
    usage = "expected GET /healthz or POST /predict"

    def respond(self) -> Answer:
        """Return a prediction, or whether there is a head."""
        match self.method, urlsplit(self.path).path:
            case "GET", "/healthz":
                return self._health()
            case "POST", "/predict":
                return self._predict()
        return super().respond()

    def _health(self) -> Answer:
        try:
            head = self.server.heads.follow().installed
        except ProtofleetError:
            return 503, {"status": "no head"}
        return 200, {"status": "ok", **head.identity}

    def _predict(self) -> Answer:
        self.check_token()
        top, size_bytes = self._top(), self.body_size()
        with self.body(size_bytes) as data, self.turn():
            try:
                opened = self.server.heads.follow()
            except ProtofleetError as error:
                raise Refused(503, str(error)) from error
            try:
                prediction = opened.classify(data, top=top)
            except UnreadableImage as error:
                raise Refused(422, f"{error}{self._hint(data)}") from error
            finally:
                release_memory()  # otherwise the allocator keeps it for this thread; few bytes can be many pixels
        return 200, {**prediction.fields(), **opened.installed.identity}

    def _hint(self, data: bytes) -> str:
        """Return the correction of a body that `curl -d` has sent; it omits these bytes, which each image has."""
        is_form = self.headers.get_content_type() == "application/x-www-form-urlencoded"
        if is_form and data and not any(byte in data for byte in b"\r\n\0"):
            return ": `curl -d` changes a file: use `curl --data-binary @photo.jpg`"
        return ""

    def _top(self) -> int:
        (text, *_) = parse_qs(urlsplit(self.path).query).get("top", ["3"])
        if not re.fullmatch("[0-9]{1,4}", text) or not 0 < int(text) <= MAX_TOP:
            raise Refused(400, f"expected top to be from 1 to {MAX_TOP}")
        return int(text)
