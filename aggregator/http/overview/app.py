"""The web application of `aggregator dashboard`: a page, a document and no commands."""

import asyncio
import secrets
import socket

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from aggregator.http.access import Access
from aggregator.http.app import page_folder
from aggregator.http.connection import server_config
from aggregator.http.overview.fleets_file import Fleet
from aggregator.http.overview.summaries import Summaries
from aggregator.http.settings import HttpSettings

PAGE = "fleets.html"

NO_PAGE = (
    "The page is not installed: install the wheel protofleet-dashboard. The fleets are at /api/v1/fleets.\n"
)


def overview(fleets: dict[str, Fleet], *, token: str | None, hosts: tuple[str, ...] = ()) -> Starlette:
    """Return the application; without a token, it can be read without one: for loopback only."""
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
    settings = HttpSettings(
        state="", socket=-1, token=token or secrets.token_urlsafe(32), public=token is None, hosts=hosts
    )
    return Starlette(routes=routes, middleware=[Middleware(Access, settings=settings)])


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve on a socket until SIGINT or SIGTERM."""
    with listening:
        asyncio.run(uvicorn.Server(server_config(app)).serve(sockets=[listening]))
