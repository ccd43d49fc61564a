"""The gateway: MQTT of phones through a WebSocket, `/join/mqtt`, to the broker.

A phone authenticates with the key that it was enrolled with. Then bytes pass unread in both directions, and the broker
applies its own access list: the connection to it has the certificate of this phone.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from aggregator.http.access import is_loopback_host, problem
from aggregator.http.challenges import Challenges
from aggregator.http.pipe import CHUNK_BYTES, ENDED, Closed, pipe
from aggregator.http.settings import HttpSettings
from aggregator.http.snapshots import Stamps
from aggregator.rates import TokenBuckets
from protocol.errors import ProtofleetError
from protocol.log import event
from protocol.mqtt.tls import BrokerAccess, open_tls
from protocol.wire.topics import is_name

if TYPE_CHECKING:
    from aggregator.security.phones import Admitted

log = logging.getLogger(__name__)

SUBPROTOCOL = "mqtt"

MAX_MESSAGE_BYTES = 512 * 1024
"""Of a message of the WebSocket; a packet of the broker is smaller."""

MAX_PHONES = 1000
"""Connections at once, each with two descriptors of this process, and 0.6 MB of its memory with TLS."""

MAX_PER_DEVICE = 3
"""A phone that connects again, while the broker has not noticed the end of its last connection."""

ATTEMPTS_AT_ONCE, ATTEMPTS_PER_S = 100, 10
"""Limits for each client address; all phones behind one proxy share an address."""

CONNECT_S = 15.0

CHECK_S = 0.5
"""Seconds until a revoked phone is disconnected."""

MAX_REASON_BYTES = 123
"""Of a close frame (RFC 6455, 5.5)."""

TOO_MANY, UNREACHABLE = 4429, 4502
"""Close codes; `security.phones` has others."""


@dataclass(eq=False)
class _Connection:
    device: str
    key: bytes
    closed: asyncio.Future[Closed] = field(default_factory=asyncio.Future)
    """Done when the phone may not stay connected."""


class Gateway:
    """Connects phones to the broker."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._state = Path(settings.state)
        self._challenges = Challenges(time.monotonic)
        self._attempts = TokenBuckets[str](capacity=ATTEMPTS_AT_ONCE, per_s=ATTEMPTS_PER_S)
        self._connections: set[_Connection] = set()
        self._watch: asyncio.Task[None] | None = None
        self._has_new = False
        """A connection was not checked yet; a stamp may be older than its admission."""
        self._checked: object = None
        """The stamp of the state at the last check."""

    async def challenge(self, _request: Request) -> JSONResponse:
        return JSONResponse({"challenge": self._challenges.make()})

    async def no_websocket(self, request: Request) -> JSONResponse:
        """Answer a request that a proxy has not passed on as a WebSocket."""
        if "sec-websocket-key" in request.headers:
            event(
                log, logging.WARNING, "phone refused", reason="the proxy must pass on Upgrade and Connection"
            )
        return problem(426, "expected a WebSocket")

    def may_try(self, client: str) -> bool:
        """Return False for an address that asks too often."""
        return self._attempts.take(client, now_s=time.monotonic())

    async def connect(self, websocket: WebSocket) -> None:
        """Connect a phone until it, the broker or a revocation ends it. A refused phone gets the reason."""
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
        device = websocket.query_params.get("device", "")
        try:
            await self._serve(websocket, device)
        except Closed as closed:
            if closed.code != ENDED:
                event(log, logging.WARNING, "phone refused", device=device[:64], reason=closed.reason)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it is gone
                await websocket.close(
                    closed.code, closed.reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
                )

    async def _serve(self, websocket: WebSocket, device: str) -> None:
        if not self.may_try(websocket.client.host if websocket.client else ""):
            raise Closed(TOO_MANY, "too many attempts: try again later")
        admitted = await self._admit(websocket, device)
        of_device = sum(each.device == device for each in self._connections)
        if len(self._connections) >= MAX_PHONES or of_device >= MAX_PER_DEVICE:
            raise Closed(TOO_MANY, "too many connections: try again later")
        connection = _Connection(device, admitted.key)
        self._connections.add(connection)
        self._has_new = True
        try:
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._disconnect_revoked())
            async with self._broker(admitted.access) as (reader, writer):
                event(log, logging.INFO, "phone connected", device=device)
                await pipe(websocket, reader, writer, connection.closed)
        finally:
            self._connections.discard(connection)

    async def _admit(self, websocket: WebSocket, device: str) -> "Admitted":
        from aggregator.security.phones import NOT_ENROLLED, Caller, Refused, admit

        query, settings = websocket.query_params, self._settings
        challenge = query.get("challenge", "")
        fleet, signature = query.get("fleet", ""), query.get("signature", "")
        if not is_name(fleet) or not is_name(device) or not _is_hex(signature):
            raise Closed(NOT_ENROLLED, "expected fleet, device, challenge and signature")
        caller = Caller(
            fleet=fleet,
            device=device,
            challenge=challenge,
            signature=bytes.fromhex(signature),
            is_local=settings.address.is_loopback and is_loopback_host(websocket.headers.get("host", "")),
        )
        try:
            found = await asyncio.to_thread(admit, self._state, caller, settings.access)
        except ProtofleetError as error:
            raise Closed(UNREACHABLE, str(error)[:100]) from error
        if isinstance(found, Refused):
            raise Closed(found.code, found.reason)
        if found.key and not self._challenges.use(challenge):
            raise Closed(NOT_ENROLLED, "this challenge has expired or was used: connect with a new one")
        return found

    @contextlib.asynccontextmanager
    async def _broker(
        self, access: BrokerAccess
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect to the first broker that answers; raises Closed if none does."""
        reasons = []
        for broker in self._settings.brokers:
            try:
                if broker.path is not None:
                    raise OSError("it is reached through a WebSocket: give --broker its own port")
                tls = open_tls(access)
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(
                        broker.host, broker.port, ssl=tls, limit=CHUNK_BYTES
                    )
                break
            except (OSError, ProtofleetError) as error:
                reasons.append(f"{broker}: {str(error) or 'no answer'}")
        else:
            event(log, logging.WARNING, "no broker for phones", reason="; ".join(reasons))
            raise Closed(UNREACHABLE, "the aggregator cannot reach the broker: see its log")
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _disconnect_revoked(self) -> None:
        """Close connections whose devices are revoked or have another key, while there are connections."""
        from aggregator.security.phones import refusals

        stamps = Stamps(self._state)
        try:
            while self._connections:
                await asyncio.sleep(CHECK_S)
                is_new, self._has_new = self._has_new, False
                stamp = await asyncio.to_thread(stamps.read)
                if stamp == self._checked and not is_new:
                    continue
                connected = {(each.device, each.key) for each in self._connections}
                try:
                    found = await asyncio.to_thread(refusals, self._state, connected)
                except ProtofleetError:  # the tables cannot be read: tried again
                    self._has_new = True
                    continue
                self._checked = stamp
                for each in self._connections:
                    refused = found.get((each.device, each.key))
                    if refused is not None and not each.closed.done():
                        each.closed.set_result(Closed(refused.code, refused.reason))
        finally:
            stamps.close()
            for each in self._connections:  # none, unless this has failed
                if not each.closed.done():
                    each.closed.set_result(Closed(UNREACHABLE, "the aggregator's state cannot be read"))


def _is_hex(signature: str) -> bool:
    return re.fullmatch("([0-9a-f]{128})?", signature) is not None
