"""The web application: routes of the API, the metrics, the files and the page."""

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from aggregator.http.access import Access, has_token, may_read, problem
from aggregator.http.commands import (
    COMMANDS,
    CommandReply,
    EnrollArguments,
    LinkArguments,
    LinkReply,
    enrollment_archive,
    join,
    make_join_link,
    run_command,
)
from aggregator.http.gateway import Gateway
from aggregator.http.join_page import PATH, FileList, JoinPage
from aggregator.http.metrics import CONTENT_TYPE, metrics_text
from aggregator.http.openapi import JSON_TYPE, Endpoint, openapi_document
from aggregator.http.page_folders import page_folder, phone_folder
from aggregator.http.settings import HttpSettings
from aggregator.http.snapshots import Snapshot, Snapshots
from aggregator.status.model import Status
from protocol.errors import JoinRefused, ProtofleetError
from protocol.log import event

log = logging.getLogger(__name__)

BINARY_TYPE = "application/octet-stream"

EVENTS = "Server-sent events: `change`, with the version of the newest state, at each change."
ENROLL = "Enroll a device, which closes the fleet; answers its enrollment folder, with its private keys."

LINK = "Make a link that enrolls a device, good once and for 15 minutes; its first use closes the fleet."

MAX_BODY_BYTES = 16 * 1024

NO_PAGE = (
    "The pages of the dashboard and for phones are not installed: install the wheel protofleet-dashboard beside this "
    "one, and restart the aggregator. The API is at /api/v1/openapi.json, metrics are at /metrics.\n"
)


class Readiness(msgspec.Struct, frozen=True):
    """The readiness for uploads of devices, and what is wrong without it."""

    ready: bool
    problems: tuple[str, ...] = ()


class Session(msgspec.Struct, frozen=True):
    """The rights of the client, by its token."""

    read: bool
    command: bool


def make_app(settings: HttpSettings, snapshots: Snapshots) -> Starlette:
    server = _Server(settings, snapshots)
    routes: list[BaseRoute] = []
    for each in server.endpoints:
        answered = Route(each.path, each.handler, methods=[each.method])  # GET answers HEAD, too
        routes += [answered, Route(each.path, _WrongMethod(answered.methods or ()))]
    gateway = Gateway(settings)
    routes += [
        Route(f"{PATH}/enroll", partial(server.join, gateway), methods=["POST"]),
        Route(f"{PATH}/challenge", gateway.challenge),
        WebSocketRoute(f"{PATH}/mqtt", gateway.connect),
        Route(f"{PATH}/mqtt", gateway.no_websocket),
    ]
    routes.append(Route("/api/{path:path}", _unknown, methods=["GET", "POST"]))
    folder = page_folder()
    routes += _join_page(folder)
    routes.append(
        Route("/", _no_page) if folder is None else Mount("/", StaticFiles(directory=folder, html=True))
    )
    return Starlette(
        routes=routes,
        middleware=[Middleware(Access, settings=settings)],
        exception_handlers=dict.fromkeys(
            (HTTPException, ProtofleetError, msgspec.MsgspecError, RecursionError), _problem
        ),
    )


def _join_page(static: Path | None) -> list[BaseRoute]:
    """Return the routes of the page for phones, which shares libraries with the dashboard."""
    folder = phone_folder(static)
    if static is None or folder is None:
        return [Route(path, _no_page) for path in (PATH, f"{PATH}/")]
    return [
        Route(PATH, lambda _: RedirectResponse("join/")),  # also below a path of a proxy
        Route(f"{PATH}/files.js", FileList(folder, static / "vendor").answer),
        Mount(f"{PATH}/vendor", JoinPage(directory=static / "vendor")),
        Mount(PATH, JoinPage(directory=folder, html=True)),
    ]


async def _problem(_request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        answer = problem(error.status_code, error.detail)
        answer.headers.update(error.headers or {})
        return answer
    if isinstance(error, JoinRefused):
        return problem(409, str(error), reason=error.reason)
    return problem(409 if isinstance(error, ProtofleetError) else 400, str(error))


@dataclass(frozen=True)
class _WrongMethod:
    """The answer to a method that a path does not have."""

    allowed: Collection[str]

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        allowed = ", ".join(sorted(self.allowed))
        text = f"expected {allowed}, got {scope['method']}"
        raise HTTPException(405, text, headers={"allow": allowed})


async def _unknown(_request: Request) -> Response:
    return problem(404, "unknown path: /api/v1/openapi.json lists all")


async def _no_page(_request: Request) -> Response:
    return PlainTextResponse(NO_PAGE)


class _Server:
    def __init__(self, settings: HttpSettings, snapshots: Snapshots) -> None:
        self._settings = settings
        self._state = Path(settings.state)
        self._snapshots = snapshots
        self._commands = asyncio.Lock()
        self._joins = asyncio.Lock()
        """Another one, so that devices without a token delay no operator."""
        self.endpoints = self._endpoints()

    def _endpoints(self) -> tuple[Endpoint, ...]:
        command = "/api/v1/commands"
        return (
            Endpoint("/api/v1/status", self.status, "What `aggregator status --json` prints.", Status),
            Endpoint("/api/v1/events", self.events, EVENTS, "text/event-stream"),
            Endpoint("/api/v1/openapi.json", self.openapi, "This document.", JSON_TYPE),
            Endpoint("/api/v1/session", self.session, "The rights of the client.", Session),
            Endpoint("/healthz", self.health, "The HTTP server answers.", "text/plain"),
            Endpoint("/readyz", self.ready, "200 if the fleet is served; 503 otherwise.", Readiness),
            Endpoint("/metrics", self.metrics, "Metrics for Prometheus.", "text/plain"),
            Endpoint("/api/v1/files/head.onnx", self.file, "The current head.", BINARY_TYPE),
            Endpoint("/api/v1/files/model.onnx", self.file, "Head and backbones in one.", BINARY_TYPE),
            Endpoint(f"{command}/enroll", self.enroll, ENROLL, "application/zip", EnrollArguments),
            Endpoint(f"{command}/link", self.link, LINK, LinkReply, LinkArguments),
            *(
                Endpoint(f"{command}/{name}", partial(self.command, name), each.summary, CommandReply, each.arguments)
                for name, each in COMMANDS.items()
            ),
        )  # fmt: skip

    async def health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(self, _request: Request) -> Response:
        if self._snapshots.problem:  # neither disk nor database may be usable
            found = Readiness(ready=False, problems=(f"the aggregator has ended: {self._snapshots.problem}",))
        else:
            found = _readiness(await self._snapshots.current())
        return _json(found, 200 if found.ready else 503)

    async def metrics(self, _request: Request) -> Response:
        text = metrics_text(await self._snapshots.current())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        """Answer the status, compressed if the client can read that, or that it has not changed."""
        snapshot = await self._snapshots.current()
        if snapshot.status is None:
            return problem(503, snapshot.problem)
        tag = f'"{snapshot.version}"'
        headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding, authorization"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        body = snapshot.body
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"], body = "gzip", snapshot.compressed
        return Response(body, headers=headers, media_type=JSON_TYPE)

    async def events(self, _request: Request) -> Response:
        # A reverse proxy passes each event on at once.
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._event_lines(), headers=headers, media_type="text/event-stream")

    async def _event_lines(self) -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        async for version in self._snapshots.changes():
            yield f'event: change\ndata: {{"version": "{version}"}}\n\n' if version else ": alive\n\n"

    async def openapi(self, _request: Request) -> Response:
        return _json(openapi_document(self.endpoints, importlib.metadata.version("protofleet")))

    async def session(self, request: Request) -> Response:
        can_command = has_token(request.headers, self._settings.token)
        can_read = self._settings.public or can_command or may_read(request.headers, self._settings)
        return _json(Session(read=can_read, command=can_command))

    async def file(self, request: Request) -> Response:
        snapshot, name = await self._snapshots.current(), request.scope["path"].rpartition("/")[2]
        status = snapshot.status
        paths = {"head.onnx": status.head_path, "model.onnx": status.model_path} if status else {}
        path = paths.get(name)
        if path is None:
            return problem(
                404, f"no {name} yet: the first head is not trained, or this task has no such file"
            )
        return FileResponse(path, filename=name, media_type=BINARY_TYPE)

    async def command(self, name: str, request: Request) -> Response:
        arguments = await _body(request)
        async with self._commands:
            reply = await asyncio.to_thread(run_command, self._state, name, arguments)
        event(log, logging.INFO, "operator command", command=name, outcome=reply.message)
        return _json(reply)

    async def enroll(self, request: Request) -> Response:
        arguments = await _body(request)
        async with self._commands:
            device, archive = await asyncio.to_thread(enrollment_archive, self._state, arguments)
        event(log, logging.INFO, "operator command", command="enroll", device=device)
        headers = {"content-disposition": f'attachment; filename="{device}.zip"'}
        return Response(archive, headers=headers, media_type="application/zip")

    async def link(self, request: Request) -> Response:
        arguments = await _body(request)
        async with self._commands:
            reply = await asyncio.to_thread(make_join_link, self._state, arguments)
        event(log, logging.INFO, "operator command", command="link")
        return _json(reply)

    async def join(self, gateway: Gateway, request: Request) -> Response:
        """Enroll a device that has a join link, which needs no token."""
        if not gateway.may_try(request.client.host if request.client else ""):
            return problem(429, "too many requests: try again in a minute", reason="too_many")
        arguments = await _body(request)
        async with self._joins:
            device, answer = await asyncio.to_thread(join, self._state, arguments)
        event(log, logging.INFO, "device joined", device=device)
        return Response(answer, media_type=JSON_TYPE)


def _readiness(snapshot: Snapshot) -> Readiness:
    """Return the readiness: an aggregator runs on the state and stores uploads."""
    status = snapshot.status
    if status is None:
        return Readiness(ready=False, problems=(snapshot.problem,))
    problems = []
    if not status.running:
        problems.append("the aggregator is not running: start `aggregator run`")
    if status.intake.stopped_s is not None:
        problems.append(f"uploads cannot be stored: {status.intake.reason}")
    return Readiness(ready=not problems, problems=tuple(problems))


async def _body(request: Request) -> bytes:
    """Return the JSON body of a request.

    Raises:
        HTTPException: it is not JSON by its type, or too large.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "expected content-type application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"expected at most {MAX_BODY_BYTES} bytes")
    return body


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
