"""Bytes between a WebSocket and a broker, each side at the pace of the other."""

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.websockets import WebSocket, WebSocketDisconnect

CHUNK_BYTES = 64 * 1024

ENDED = 1000
"""Close code of a connection that one of the sides has ended."""


@dataclass(eq=False)
class Closed(Exception):
    """The end of a connection: the code and the reason that the phone gets."""

    code: int
    reason: str


async def pipe(
    websocket: WebSocket,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    closed: "asyncio.Future[Closed]",
) -> None:
    """Pass bytes on in both directions, each as fast as they are received; raises Closed at the end."""
    tasks = [asyncio.create_task(each) for each in (_upward(websocket, writer), _downward(reader, websocket))]
    try:
        await asyncio.wait([*tasks, closed], return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            raise closed.result()
        for task in tasks:
            if task.done():
                raise task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _upward(websocket: WebSocket, writer: asyncio.StreamWriter) -> Closed:
    try:
        while True:
            writer.write(await websocket.receive_bytes())
            await writer.drain()
    except (WebSocketDisconnect, KeyError):  # it is gone, or has sent text
        return Closed(ENDED, "the phone has ended the connection")
    except OSError:
        return Closed(ENDED, "the broker has ended the connection")


async def _downward(reader: asyncio.StreamReader, websocket: WebSocket) -> Closed:
    with contextlib.suppress(OSError, WebSocketDisconnect):
        while data := await reader.read(CHUNK_BYTES):
            await websocket.send_bytes(data)
    return Closed(ENDED, "the broker has ended the connection")
