"""The web application of `aggregator dashboard`: a page, a document and no commands."""

import asyncio
import secrets
import socket

import msgspec
import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from aggregator.http.access import Access
from aggregator.http.app import page_folder
from aggregator.http.connection import server_config
from aggregator.http.fleets import Fleet, Summaries
from aggregator.http.settings import HttpSettings

PAGE = "fleets.html"

NO_PAGE = (
    "The page is not installed: install the wheel protofleet-dashboard. The fleets are at /api/v1/fleets.\n"
)


def overview(fleets: dict[str, Fleet], settings: HttpSettings) -> Starlette:
    """Return the application; there are no commands, so that each token is one for reading."""
    token = settings.token or settings.read_token or secrets.token_urlsafe(32)
    settings = replace(settings, token=token)
    summaries, reading, folder = Summaries(fleets), asyncio.Lock(), page_folder()

    async def all_fleets(_request: Request) -> Response:
        async with reading:
            found = await asyncio.to_thread(summaries.current)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def page(_request: Request) -> Response:
        return PlainTextResponse(NO_PAGE) if folder is None else FileResponse(folder / PAGE)

    routes: list[BaseRoute] = [
        Route("/", page),
        Route("/healthz", health),
        Route("/api/v1/fleets", all_fleets),
    ]
    if folder is not None:
        routes.append(Mount("/", StaticFiles(directory=folder)))
    return Starlette(routes=routes, middleware=[Middleware(Access, settings=settings)])


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve on a socket until SIGINT or SIGTERM."""
    with listening:
        asyncio.run(uvicorn.Server(server_config(app)).serve(sockets=[listening]))
